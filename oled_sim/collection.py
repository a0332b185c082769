"""The collection job: prompts through a model, in batches, into a trace that can be continued.

Needs the ``torch`` extra. What records is a collector plug-in, loaded by name.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from oled_sim.errors import TraceError, UsageError
from oled_sim.geometry import GEOMETRIES
from oled_sim.prompts import Prompt
from oled_sim.trace.background import BackgroundRequest, BackgroundWriter
from oled_sim.trace.manifest import MANIFEST, Decode, Manifest, Model, Prompts, Runtime
from oled_sim.trace.schema import Kind
from oled_sim.trace.writer import OpenRequest, TraceWriter

if TYPE_CHECKING:
    from oled_sim.model.config import LLaDA2Config
    from oled_sim.model.decoding import DecodeSettings
    from oled_sim.model.generate import Generation, PassRecord
    from oled_sim.model.llada2 import LLaDA2MoeModelLM
    from oled_sim.model.tokenizer import Tokenizer

HASHED_BYTES = 256 << 20
"""Checkpoints up to this size are identified in the manifest by the hash of their weights."""


class PromptRequest(NamedTuple):
    """One request to record: its token ids and the open request that takes its passes."""

    tokens: Sequence[int]
    target: OpenRequest | BackgroundRequest


class Collector(Protocol):
    """What a collector plug-in offers once it is bound to a model.

    Attributes:
        SIGNALS: signals that it always records.
    """

    SIGNALS: Sequence[str]

    def record(
        self,
        requests: Sequence[PromptRequest],
        settings: DecodeSettings,
        on_pass: Callable[[PassRecord], None] | None = None,
    ) -> list[Generation]:
        """Generate for ``requests`` as one batch and finish each of their open requests."""
        ...


@dataclass(slots=True)
class Tally:
    """What a collection recorded. ``seconds`` is generation alone, without loading."""

    requests: int = 0
    skipped: int = 0
    output_tokens: int = 0
    denoise_passes: int = 0
    accepted_tokens: int = 0
    commit_passes: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of generation; NaN when nothing was generated."""
        return self.output_tokens / self.seconds if self.seconds else float("nan")

    @property
    def tokens_per_denoise_pass(self) -> float:
        """Positions accepted per denoising pass, prefill and commit passes left out."""
        passes = self.denoise_passes
        return self.accepted_tokens / passes if passes else float("nan")

    def add_pass(self, record: PassRecord) -> None:
        """Count one pass of one request."""
        if record.kind == Kind.DENOISE:
            self.denoise_passes += 1
            self.accepted_tokens += int(np.count_nonzero(record.accepted))
        self.commit_passes += record.kind == Kind.COMMIT


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a collection needs; see :func:`collect`.

    ``collector`` is the plug-in, already bound to the model; ``prompts`` are in trace order.
    """

    model: LLaDA2MoeModelLM
    tokenizer: Tokenizer
    collector: Collector
    prompts: Sequence[Prompt]
    settings: DecodeSettings
    batch: int = 1


def collect(
    job: Job,
    out: Path,
    manifest: Manifest,
    *,
    overwrite: bool = False,
    on_request: Callable[[int], None] = lambda count: None,
    on_pass: Callable[[PassRecord], None] = lambda record: None,
) -> Tally:
    """Record every prompt of ``job`` that the trace ``out`` does not hold yet.

    Args:
        job: what to run.
        out: directory of the trace. One that holds a trace of the same settings is continued.
        manifest: of the trace, without requests.
        overwrite: start anew instead.
        on_request: called with the number of requests just finished or found finished.
        on_pass: called after every pass.

    Raises:
        UsageError: ``out`` holds something else, or a prompt does not fit the context.
        TraceError: the trace in ``out`` was recorded with other settings or prompts.
    """
    from oled_sim.model.generate import check_prompts

    tokens = [job.tokenizer.encode(prompt.text) for prompt in job.prompts]
    check_prompts(tokens, job.settings, job.model.config)  # before anything is written
    resume = not overwrite and (out / MANIFEST).exists()
    tally = Tally()

    def count_pass(record: PassRecord) -> None:
        tally.add_pass(record)
        on_pass(record)

    with (
        TraceWriter(out, manifest, resume=resume, overwrite=overwrite) as writer,
        BackgroundWriter(writer) as background,
    ):
        _check_same_prompts(writer, job.prompts)
        todo = [n for n in range(len(job.prompts)) if n not in writer.finished]
        tally.skipped = len(job.prompts) - len(todo)
        on_request(tally.skipped)
        for first in range(0, len(todo), job.batch):
            numbers = todo[first : first + job.batch]
            requests = [_open_request(job, background, n, tokens[n]) for n in numbers]
            _record_batch(job, requests, tally, count_pass)
            on_request(len(numbers))
    return tally


def _open_request(
    job: Job, writer: BackgroundWriter, number: int, tokens: Sequence[int]
) -> PromptRequest:
    prompt = job.prompts[number]
    target = writer.begin(number, prompt_row=prompt.row, prompt_sha256=prompt.sha256)
    return PromptRequest(tokens, target)


def _record_batch(
    job: Job, requests: Sequence[PromptRequest], tally: Tally, on_pass: Callable[..., None]
) -> None:
    began = time.perf_counter()
    done = job.collector.record(requests, job.settings, on_pass)
    tally.seconds += time.perf_counter() - began
    tally.requests += len(requests)
    tally.output_tokens += sum(len(g.tokens) for g in done)


def _check_same_prompts(writer: TraceWriter, prompts: Sequence[Prompt]) -> None:
    for entry in writer.manifest.requests:
        number = entry.request
        if number >= len(prompts) or entry.prompt_sha256 != prompts[number].sha256:
            raise TraceError(
                f"request {number} of {writer.path} answers another prompt than row {number} of"
                " this call: use the same prompts, another directory, or --overwrite"
            )


def make_manifest(
    name: str,
    job: Job,
    *,
    collector: str,
    weights: Path,
    source: str,
    stands_for: str | None,
    signals: Sequence[str],
    redact: bool,
) -> Manifest:
    """Describe a collection before it starts.

    Raises:
        UsageError: ``stands_for`` is no known geometry.
    """
    if stands_for is not None and stands_for not in GEOMETRIES:
        raise UsageError(f"unknown geometry {stands_for!r}: known are {', '.join(GEOMETRIES)}")
    return describe_run(
        name, job.model, job.settings, collector=collector, weights=weights, source=source,
        stands_for=stands_for, signals=signals, redact=redact, batch=job.batch,
    )  # fmt: skip


def describe_run(
    name: str,
    model: LLaDA2MoeModelLM,
    settings: DecodeSettings,
    *,
    collector: str,
    weights: Path,
    source: str,
    stands_for: str | None,
    signals: Sequence[str],
    redact: bool = False,
    batch: int = 1,
) -> Manifest:
    """Describe generation by a native model whose trace ``collector`` records.

    ``name``, ``weights``: of the model. ``stands_for``: by default the geometry of its size.
    """
    config = model.config
    return Manifest(
        model=_describe_model(name, config, str(model.dtype), weights),
        origin="real",
        signals=tuple(signals),
        stands_for=stands_for or geometry_of(config),
        decode=_describe_decode(settings),
        runtime=Runtime.here(
            collector,
            device=model.device.type,
            hardware=_hardware(model),
            batch_size=batch,
            command=_command(),
        ),
        prompts=Prompts(source=source, redacted=redact),
    )


def _command() -> str:
    """Return the command line, folders left out: a trace is passed on, a home directory not."""
    return " ".join(["oled-sim", *(Path(a).name if "/" in a else a for a in sys.argv[1:])])


def _describe_model(name: str, config: LLaDA2Config, dtype: str, weights: Path) -> Model:
    return Model(
        name=name,
        layers=config.moe_layers,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        expert_size=config.moe_intermediate_size,
        shared_experts=config.num_shared_experts,
        vocabulary=config.vocab_size,
        total_layers=config.num_hidden_layers,
        dtype=dtype.removeprefix("torch."),
        weights_sha256=_weights_hash(weights),
    )


def _describe_decode(settings: DecodeSettings) -> Decode:
    editing = settings.rule == "2.1"
    return Decode(
        rule=settings.rule,
        block_length=settings.block_length,
        threshold=settings.threshold,
        steps=None if editing else settings.steps,
        editing_threshold=settings.editing_threshold if editing else None,
        max_post_steps=settings.max_post_steps if editing else None,
        temperature=settings.temperature,
        seed=settings.seed,
        max_new_tokens=settings.max_new_tokens,
        ignore_eos=settings.ignore_eos,
    )


def geometry_of(config: LLaDA2Config) -> str:
    """Return the published model of the same widths, else LLaDA2.0-mini."""
    for geometry in GEOMETRIES.values():
        widths = (geometry.hidden_size, geometry.moe_intermediate_size, geometry.layers)
        if widths == (config.hidden_size, config.moe_intermediate_size, config.num_hidden_layers):
            return geometry.name
    return "llada2.0-mini"


def _weights_hash(path: Path) -> str | None:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if sum(f.stat().st_size for f in files) > HASHED_BYTES:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _hardware(model: LLaDA2MoeModelLM) -> str:
    if model.device.type != "cuda":
        return ""
    import torch

    return torch.cuda.get_device_name(model.device)
