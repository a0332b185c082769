"""Where the traces of experiments come from: bundled ones, and synthetic ones made once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from oled_sim.errors import TraceError
from oled_sim.experiment.sources import digest
from oled_sim.places import require_place
from oled_sim.trace import Trace, open_trace
from oled_sim.trace.files import sha256_hex

MADE_FROM = ("synthesis", "trace", "geometry.py")
"""Sources that the bytes of a synthetic trace depend on."""


@dataclass(frozen=True)
class SyntheticTrace:
    """A synthetic trace at the paper's scale, as ``oled-sim synth`` makes it.

    Attributes:
        model: such as ``llada2.0-mini``. data_set: ``gsm8k``, ``humaneval`` or ``science``.
        requests, output_tokens: how many, and how long each.
        coupling: relation of confidence and route stability.
        seed: of all random numbers.
        block_length: tokens of a block; None is the data set's own.
        prompt_tokens: of every prompt; None is the data set's own distribution.
        signals: ``full_gate`` and ``embedding``, which some policies predict from.
    """

    model: str
    data_set: str
    requests: int = 6
    output_tokens: int = 1024
    coupling: str = "measured"
    seed: int = 0
    block_length: int | None = None
    prompt_tokens: int | None = None
    signals: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What tables call it: model, data set, and what is not as usual; not its length."""
        block = f"-b{self.block_length}" if self.block_length else ""
        prompt = f"-p{self.prompt_tokens}" if self.prompt_tokens else ""
        relation = "" if self.coupling == "measured" else f"-{self.coupling}"
        return f"synthetic-{self.model}-{self.data_set}{block}{prompt}{relation}"


TraceName = str | SyntheticTrace


class Inputs:
    """Opens the traces that points name.

    Args:
        folder: where synthetic traces are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, trace: TraceName) -> Trace:
        """Return an open trace.

        Raises:
            UsageError, TraceError: no such trace; a synthetic one has not been made.
        """
        return open_trace(self.path(trace) if isinstance(trace, SyntheticTrace) else trace)

    def stands_for(self, trace: TraceName) -> str | None:
        """Return the model that a trace stands for, whether it has been made or not."""
        if isinstance(trace, SyntheticTrace):
            return trace.model.replace("2.1", "2.0")
        return self.open(trace).manifest.stands_for

    def path(self, trace: SyntheticTrace) -> Path:
        """Return the folder of a synthetic trace; its name says what it was made from."""
        made_from = {**asdict(trace), "sources": digest(MADE_FROM)}
        key = sha256_hex(json.dumps(made_from, sort_keys=True).encode())
        return self.folder / f"{trace.name}-{key[:12]}"

    def missing(self, traces: list[TraceName]) -> list[SyntheticTrace]:
        """Return the synthetic traces that have not been made, each once."""
        wanted = [t for t in dict.fromkeys(traces) if isinstance(t, SyntheticTrace)]
        return [t for t in wanted if not self.path(t).is_dir()]

    def check(self, traces: Sequence[SyntheticTrace]) -> None:
        """Refuse traces that could not be kept, before they are made.

        Raises:
            UsageError: something else is in the place of one.
        """
        for trace in traces:
            require_place(self.path(trace), "a synthetic trace", folder=True)

    def make(self, trace: SyntheticTrace) -> Path:
        """Make a synthetic trace; its folder appears only when it is whole.

        Raises:
            UsageError: an unknown model or data set.
            TraceError: the file system refuses.
        """
        from msgspec.structs import replace

        from oled_sim.synthesis.generate import make_recipe, write_synthetic
        from oled_sim.synthesis.parameters import Prompts, load_data_set

        data = load_data_set(trace.data_set)
        if trace.block_length is not None:
            data = replace(data, block_length=trace.block_length)
        if trace.prompt_tokens is not None:
            data = replace(
                data, prompts=Prompts(median_tokens=float(trace.prompt_tokens), log_spread=0.0)
            )
        recipe = make_recipe(
            data,
            trace.model,
            coupling=trace.coupling,
            output_tokens=trace.output_tokens,
            seed=trace.seed,
            signals=trace.signals,
        )
        path = self.path(trace)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            write_synthetic(temporary, recipe, trace.requests, overwrite=True)
            temporary.replace(path)
        except OSError as error:
            if not path.is_dir():  # else another process has made it meanwhile, the same
                raise TraceError(f"{path} cannot be written: {error.strerror}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return path
