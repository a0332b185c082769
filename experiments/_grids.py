"""What the grids of several figures have in common: traces, machines, caches, systems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oled_sim.experiment import RunPoint, Size, SyntheticTrace, TraceName

CACHES = (40, 100)
"""The paper's two expert-cache capacities, slots per layer."""

EXPERTS = 256
"""Experts per layer of every trace here: the capacity of full residency."""

PRIOR = ("moe-infinity", "finemoe", "ktransformers")
"""The systems that the paper compares with, as ported here."""

SYSTEMS = (*PRIOR, "lru", "oled", "ideal")

DATA_SETS = ("gsm8k", "humaneval", "science")
"""The paper's data sets; science questions stand for its GPQA."""

MODELS = ("llada2.0-mini", "llada2.0-flash")

MACHINES = ("h200", "paper-testbed")
"""Measured; and estimated from published rates of the paper's own GPUs."""

REAL_REQUESTS = 6
"""Requests of a recorded trace: two for history, one for warm-up, three counted."""

REQUESTS, OUTPUT_TOKENS = 6, 256
"""Of a synthetic trace, split likewise. The systems that prefetch are Python, most of the time of
figure 12: with the paper's 1,024 tokens it would take four times as long."""

SIGNALS = ("full_gate", "embedding")
"""What FineMoE and HybriMoE predict from, where a trace holds it."""


class On(NamedTuple):
    """A trace under a profile. ``requests``: how many of it are used."""

    trace: TraceName
    profile: str
    requests: int | None

    def run(self, policy: str, cache: int, kind: type[RunPoint] = RunPoint) -> RunPoint:
        """Return the point of a policy with a cache."""
        return kind(
            self.trace, policy=policy, cache=cache, profile=self.profile, requests=self.requests
        )


def synthetic(model: str, data_set: str) -> SyntheticTrace:
    """Return the paper-scale trace of a model and a data set, the same in every figure."""
    return SyntheticTrace(
        model, data_set, requests=REQUESTS, output_tokens=OUTPUT_TOKENS, signals=SIGNALS
    )


def traces_of(size: Size, machines: Sequence[str] = MACHINES) -> Iterator[On]:
    """Yield the traces of a size.

    Quick: four requests of one recorded trace. Full: three recorded traces of mini's geometry, and
    synthetic ones of mini and flash, each under every machine.
    """
    if size == "quick":
        yield On("mini-gsm8k", "h200-llada2.0-mini", 4)
        return
    for machine in machines:
        for data_set in DATA_SETS:
            yield On(f"mini-{data_set}", f"{machine}-llada2.0-mini", REAL_REQUESTS)
        for model in MODELS:
            for data_set in DATA_SETS:
                yield On(synthetic(model, data_set), f"{machine}-{model}", None)
