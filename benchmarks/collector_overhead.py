"""Measure what recording costs: decode time with and without a collector, same prompts.

Two collectors: `native`, and `hf` on a stand-in with the call paths of LLaDA2's remote code. Runs
alternate (off, on, off, on, ...) so that drift of the machine hits both alike; the figure is the
median over rounds of on / off, each the time spent inside whole generations, prefill included.
What the writing thread still has to do after the last one is timed apart (`drain_seconds`). Tokens
are compared too.

    python benchmarks/collector_overhead.py --random llada2.0-mini --device cuda --out FILE.json
    python benchmarks/collector_overhead.py --model nano --prompts 2 --max-new-tokens 32

`--random` builds a published geometry with random weights (mini takes 33 GB of the device).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch

import oled_sim
from oled_sim import plugins
from oled_sim.collection import PromptRequest
from oled_sim.geometry import GEOMETRIES
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import generate
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.loading import checkpoint_path, load_model, load_tokenizer
from oled_sim.prompts import bundled_prompts, read_prompts, read_templates
from oled_sim.testing.remote_code import LLaDA20
from oled_sim.trace import Manifest, Model, TraceWriter
from oled_sim.trace.background import BackgroundWriter
from oled_sim.trace.manifest import load_manifest, processor_name

SIGNAL_SETS = {"routing": (), "all signals": ("full_gate", "embedding", "cosines")}


class Run(NamedTuple):
    """One round: seconds inside generations, seconds of writing after them, tokens, passes."""

    seconds: float
    drain_seconds: float
    tokens: list[Any]
    passes: int


class Subject(Protocol):
    """A way to generate, plain and recorded."""

    def plain(self) -> Run:
        """Generate for every prompt."""
        ...

    def recorded(self, signals: tuple[str, ...], out: Path) -> Run:
        """The same while a collector records into ``out``."""
        ...


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that ``call`` took, device work included, and its result."""
    started = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


class Native:
    """The native model with its prefix cache and the collector `native`."""

    def __init__(
        self, model: LLaDA2MoeModelLM, prompts: list[list[int]], settings: DecodeSettings
    ) -> None:
        self.model, self.prompts, self.settings = model, prompts, settings

    def plain(self) -> Run:
        """See :class:`Subject`."""
        seconds, done = timed(
            lambda: [generate(self.model, [p], self.settings)[0] for p in self.prompts]
        )
        return Run(seconds, 0.0, done, sum(g.passes for g in done))

    def recorded(self, signals: tuple[str, ...], out: Path) -> Run:
        """See :class:`Subject`."""
        config = self.model.config
        described = Model(
            name="benchmark", layers=config.moe_layers, experts=config.num_experts,
            top_k=config.num_experts_per_tok,
        )  # fmt: skip
        collector = plugins.load(plugins.COLLECTORS, "native")(self.model, signals=signals)
        manifest = Manifest(model=described, origin="real", signals=(*collector.SIGNALS, *signals))
        with TraceWriter(out, manifest) as writer:
            background = BackgroundWriter(writer)
            background.__enter__()

            def run() -> list[Any]:
                requests = [
                    PromptRequest(p, background.begin(n)) for n, p in enumerate(self.prompts)
                ]
                return [collector.record([r], self.settings)[0] for r in requests]

            seconds, done = timed(run)
            drain, _ = timed(lambda: background.__exit__(None))
        return Run(seconds, drain, done, passes_of(out))


class RemoteCode:
    """The stand-in for LLaDA2's remote code: no KV cache, and the collector `hf`."""

    def __init__(
        self, model: LLaDA2MoeModelLM, prompts: list[list[int]], settings: DecodeSettings
    ) -> None:
        self.model = LLaDA20(model).eval()
        self.prompts = [torch.tensor([p], device=model.device) for p in prompts]
        self.call = {
            "block_length": settings.block_length,
            "steps": settings.steps,
            "gen_length": settings.max_new_tokens,
            "threshold": settings.threshold,
            "eos_id": model.config.eos_token_id,
            "mask_id": model.config.mask_token_id,
        }

    def plain(self) -> Run:
        """See :class:`Subject`."""
        return Run(*self._generate(), passes=0)

    def recorded(self, signals: tuple[str, ...], out: Path) -> Run:
        """See :class:`Subject`."""
        recording = oled_sim.record(self.model, out, signals=signals)
        recording.__enter__()
        seconds, _, tokens = self._generate()
        drain, _ = timed(lambda: recording.__exit__(None, None, None))
        return Run(seconds, drain, tokens, passes_of(out))

    def _generate(self) -> tuple[float, float, list[Any]]:
        seconds, out = timed(lambda: [self.model.generate(p, **self.call) for p in self.prompts])
        return seconds, 0.0, [tokens.tolist() for tokens in out]


def passes_of(out: Path) -> int:
    """Return the passes of all requests of a trace."""
    return sum(entry.passes for entry in load_manifest(out).requests)


def measure(subject: Subject, rounds: int) -> dict[str, Any]:
    """Return seconds of every run, and the overhead of each set of signals in percent."""
    runs: dict[str, list[Run]] = {"off": [], **{name: [] for name in SIGNAL_SETS}}
    for _ in range(rounds + 1):  # the first round warms up
        runs["off"].append(subject.plain())
        for name, signals in SIGNAL_SETS.items():
            with TemporaryDirectory() as folder:
                runs[name].append(subject.recorded(signals, Path(folder) / "t"))
    tokens = runs["off"][0].tokens
    seconds = {name: [run.seconds for run in each[1:]] for name, each in runs.items()}
    passes = runs["routing"][0].passes
    result: dict[str, Any] = {
        "seconds": seconds,
        "passes": passes,
        "ms_per_pass": 1000 * statistics.median(seconds["off"]) / passes,
        "tokens_equal": all(run.tokens == tokens for each in runs.values() for run in each),
    }
    for name in SIGNAL_SETS:
        pairs = zip(seconds[name], seconds["off"], strict=True)
        drains = [run.drain_seconds for run in runs[name][1:]]
        result[name] = {
            "overhead_percent": 100 * (statistics.median(on / off for on, off in pairs) - 1),
            "drain_seconds": statistics.median(drains),
        }
    return result


def random_model(geometry: str, device: str, layers: int | None) -> LLaDA2MoeModelLM:
    """Return a model of a published geometry with random weights, in bfloat16.

    ``layers``: how many of its layers, all by default.
    """
    g = GEOMETRIES[geometry]
    config = LLaDA2Config(
        hidden_size=g.hidden_size, num_hidden_layers=layers or g.layers,
        first_k_dense_replace=g.dense_layers, intermediate_size=g.dense_intermediate_size,
        moe_intermediate_size=g.moe_intermediate_size, num_experts=g.experts,
        num_experts_per_tok=g.top_k, num_shared_experts=g.shared_experts, n_group=8, topk_group=4,
        routed_scaling_factor=2.5, num_attention_heads=g.heads, num_key_value_heads=g.kv_heads,
        head_dim=g.head_dim, partial_rotary_factor=0.5, rope_theta=600_000.0, rms_norm_eps=1e-6,
        vocab_size=g.vocabulary, tie_word_embeddings=False, max_position_embeddings=32_768,
        mask_token_id=156_895, eos_token_id=156_892, pad_token_id=156_892,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LLaDA2MoeModelLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def random_prompts(model: LLaDA2MoeModelLM, count: int, length: int) -> list[list[int]]:
    """Return prompts of random tokens, none of them special."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, length)
    return torch.randint(model.config.vocab_size // 2, shape, generator=generator).tolist()


def model_prompts(name: str, limit: int) -> list[list[int]]:
    """Return the bundled prompts as the named model is asked them."""
    tokenizer, templates = load_tokenizer(name), read_templates(checkpoint_path(name))
    prompts = read_prompts(bundled_prompts(), limit=limit, templates=templates)
    return [tokenizer.encode(p.text) for p in prompts]


def main() -> None:
    """Parse arguments, measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--random", choices=sorted(GEOMETRIES), help="instead of --model")
    parser.add_argument("--layers", type=int, help="layers of --random, to rehearse it")
    parser.add_argument("--device", default=None)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=100, help="of --random")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--collector", choices=("native", "hf", "both"), default="both")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.random:
        model = random_model(options.random, options.device or "cpu", options.layers)
        prompts = random_prompts(model, options.prompts, options.prompt_tokens)
    else:
        model = load_model(options.model, options.device)
        prompts = model_prompts(options.model, options.prompts)
    settings = DecodeSettings(
        max_new_tokens=options.max_new_tokens, threshold=0.7, block_length=options.block_length
    )
    subjects: dict[str, Subject] = {
        name: kind(model, prompts, settings)
        for name, kind in {"native": Native, "hf": RemoteCode}.items()
        if options.collector in (name, "both")
    }
    result: dict[str, Any] = {
        "model": options.random or options.model,
        "layers": model.config.num_hidden_layers,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "processor": processor_name(),
        "dtype": str(model.dtype),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "prompts": options.prompts,
        "max_new_tokens": options.max_new_tokens,
        "block_length": options.block_length,
        "date": time.strftime("%Y-%m-%d"),
    }
    for name, subject in subjects.items():
        result[name] = measure(subject, options.rounds)
        print(name, json.dumps({k: v for k, v in result[name].items() if k != "seconds"}))
    text = json.dumps(result, indent=2) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
