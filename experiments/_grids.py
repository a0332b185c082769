"""What the grids of several figures have in common: traces, machines, caches, systems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oled_sim.experiment import Size, SyntheticTrace, TraceName

CACHES = (40, 100)
"""The paper's two expert-cache capacities, slots per layer."""

PRIOR = ("moe-infinity", "finemoe", "ktransformers")
"""The systems that the paper compares with, as ported here."""

SYSTEMS = (*PRIOR, "lru", "oled", "ideal")

DATA_SETS = {"gsm8k": "gsm8k", "humaneval": "humaneval", "gpqa": "science"}
"""The paper's data sets, and the fitted ones that stand for them: science questions for GPQA."""

MODELS = ("llada2.0-mini", "llada2.0-flash")

MACHINES = ("h200", "paper-testbed")
"""Measured; and estimated from public figures of the paper's own GPUs."""

REQUESTS = 6
"""Requests of a synthetic trace: two for history, one for warm-up, three counted."""

SIGNALS = ("full_gate", "embedding")
"""What FineMoE and HybriMoE predict from, where a trace holds it."""


class On(NamedTuple):
    """A trace under a profile, and how many of its requests are used (None all)."""

    trace: TraceName
    profile: str
    requests: int | None


def synthetic(model: str, data_set: str) -> SyntheticTrace:
    """Return the paper-scale trace of a model and a data set, the same in every figure."""
    return SyntheticTrace(model, data_set, requests=REQUESTS, signals=SIGNALS)


def traces_of(size: Size) -> Iterator[On]:
    """Yield the traces of a size.

    Quick: four requests of one recorded trace. Full: three recorded traces of mini's geometry, and
    synthetic ones of mini and flash at the paper's length, each under every machine.
    """
    if size == "quick":
        yield On("mini-gsm8k", "h200-llada2.0-mini", 4)
        return
    for machine in MACHINES:
        for data_set in DATA_SETS.values():
            yield On(f"mini-{data_set}", f"{machine}-llada2.0-mini", None)
        for model in MODELS:
            for data_set in DATA_SETS.values():
                yield On(synthetic(model, data_set), f"{machine}-{model}", None)
