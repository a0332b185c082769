"""Figure 16: what batch size and block length do to OLED."""

from __future__ import annotations

from collections.abc import Iterator

from oled_sim.experiment import Experiment, Size, SyntheticTrace, TraceName
from oled_sim.plotting.sensitivity import draw_fig16

from ._grids import CACHES, DATA_SETS, MACHINES, MODELS
from ._parts import PartPoint

BATCHES = (1, 2, 4, 8, 16, 32)
BLOCKS = (1, 2, 4, 8, 16, 32, 64)
BLOCK_CACHES = (20, 40, 60, 100, 140, 256)
REAL_BATCHES = (1, 2, 4, 8, 16)
"""mini-gsm8k has 16 requests."""


def points(size: Size) -> list[PartPoint]:
    """Return the batch sizes of (a), then the block lengths of (b)."""
    if size == "quick":
        return [*_quick()]
    return [
        point
        for machine in MACHINES
        for model in MODELS
        for point in (*_batches(machine, model), *_blocks(machine, model))
    ]


def _batches(machine: str, model: str) -> Iterator[PartPoint]:
    profile = f"{machine}-{model}"
    if model == "llada2.0-mini":
        yield from _batch_points("mini-gsm8k", profile, REAL_BATCHES, 16)
    for data_set in DATA_SETS:
        many = SyntheticTrace(model, data_set, requests=max(BATCHES), output_tokens=256)
        yield from _batch_points(many, profile, BATCHES, max(BATCHES))


def _batch_points(
    trace: TraceName, profile: str, batches: tuple[int, ...], requests: int
) -> Iterator[PartPoint]:
    """Yield runs over the same requests; none warms up, as batches could not be equal then."""
    for cache in CACHES:
        for batch in batches:
            yield PartPoint(
                trace, cache=cache, profile=profile, batch=batch, requests=requests,
                history=0, warmup=0, part="batch",
            )  # fmt: skip


def _blocks(machine: str, model: str) -> Iterator[PartPoint]:
    for data_set in DATA_SETS:
        for length in BLOCKS:
            trace = SyntheticTrace(
                model, data_set, requests=4, output_tokens=512, block_length=length
            )
            yield from _block_points(trace, f"{machine}-{model}", BLOCK_CACHES)


def _block_points(trace: TraceName, profile: str, caches: tuple[int, ...]) -> Iterator[PartPoint]:
    for cache in caches:
        yield PartPoint(trace, cache=cache, profile=profile, history=0, warmup=1, part="block")


def _quick() -> Iterator[PartPoint]:
    profile = "h200-llada2.0-mini"
    yield from _batch_points("mini-gsm8k", profile, (1, 2, 4, 8), 8)
    for length in (1, 4, 16, 64):
        trace = SyntheticTrace(
            "llada2.0-mini", "gsm8k", requests=3, output_tokens=64, block_length=length
        )
        yield from _block_points(trace, profile, (20, 60, 140))


EXPERIMENT = Experiment(
    "fig16",
    "TPOT of OLED by batch size, and by block length and cache",
    "5.4, figure 16",
    points,
    draw_fig16,
)
