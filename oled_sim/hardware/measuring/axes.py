"""The counts at which each table is measured."""

from __future__ import annotations

from dataclasses import dataclass

from oled_sim.geometry import CostGeometry

MIB = 1 << 20
WORKERS = 12
"""Up to twice so many experts a CPU lane of about as many workers is measured one by one: what it
takes has a step wherever the workers come out even."""
POWERS = tuple(1 << i for i in range(15))
EXPERTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ON_CPU = (*range(1, 2 * WORKERS), 24, 28, 32, 40, 48, 64, 96, 128, 192, 256)
_ON_CPU_LONG = {*EXPERTS, WORKERS + 1, 2 * WORKERS + 4}
LONG = 1024
"""Tokens per expert from which on the CPU is measured at fewer numbers of experts: a job takes up
to seconds there, and is the expert's arithmetic whichever worker does it."""


@dataclass(frozen=True)
class ExpertAxes:
    """Points of an expert table, ascending.

    Attributes:
        experts: rows. tokens_per_expert: columns.
        tokens: of the largest pass that the table must serve.
        skipped: rows that are not measured where an expert has :data:`LONG` tokens or more; what
            lies between the rows beside them is taken there. Never the first or the last one.
    """

    experts: list[int]
    tokens_per_expert: list[int]
    tokens: int
    skipped: frozenset[int] = frozenset()

    def reachable(self, experts: int, per_expert: int, cost: CostGeometry) -> bool:
        """Whether interpolation needs this cell.

        A pass of T tokens routes at most k·T rows, so a cell is needed only if the lowest corner
        of those it belongs to is within k·T rows.
        """
        rows, columns = self.experts, self.tokens_per_expert
        lowest_row = rows[max(rows.index(experts) - 1, 0)]
        lowest_column = columns[max(columns.index(per_expert) - 1, 0)]
        return lowest_row * lowest_column <= cost.top_k * self.tokens

    def between(self, experts: int, per_expert: int, cost: CostGeometry) -> bool:
        """Whether a cell is not measured but taken from the rows beside it."""
        if experts not in self.skipped or per_expert < LONG:
            return False
        beyond = {n for n in self.experts if n > experts} - self.skipped
        return any(self.reachable(n, per_expert, cost) for n in beyond)


@dataclass(frozen=True)
class Axes:
    """Points of every axis, ascending.

    Attributes:
        copies: bytes. tokens: of one pass. head_tokens: rows of the LM head.
        on_gpu, on_cpu: of the expert tables.
        dense_tokens, context: of the dense part of one request; ``usual_context`` is that of the
            tables which have no context.
        requests, keys: of a batch's attention.
    """

    copies: list[int]
    tokens: list[int]
    head_tokens: list[int]
    on_gpu: ExpertAxes
    on_cpu: ExpertAxes
    dense_tokens: list[int]
    context: list[int]
    usual_context: int
    requests: list[int]
    keys: list[int]


def full_axes(cost: CostGeometry, block: int) -> Axes:
    """Return the points of a GPU's profile; the expert's own size is one of the copies."""
    return Axes(
        copies=sorted({4096 << i for i in range(15)} | {cost.expert_bytes}),
        tokens=_around(block, 1 << 14),
        head_tokens=_around(block, 1 << 12),
        on_gpu=ExpertAxes(_up_to(cost.experts, EXPERTS), list(POWERS[:13]), 1 << 14),
        on_cpu=_on_cpu(cost),
        dense_tokens=_around(block, 1 << 13),
        context=[0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768],
        usual_context=512,
        requests=list(POWERS[:11]),
        keys=[1, 32, 128, 256, 512, 1024, 2048, 4096, 8192],
    )


def cpu_axes(cost: CostGeometry, block: int) -> Axes:
    """Return the points where CPU threads stand for the GPU: small models, shorter passes."""
    return Axes(
        copies=sorted({4096 << i for i in range(0, 13, 2)} | {cost.expert_bytes}),
        tokens=_around(block, 1 << 10),
        head_tokens=_around(block, 1 << 10),
        on_gpu=ExpertAxes(_up_to(cost.experts, EXPERTS), list(POWERS[:9]), 1 << 10),
        on_cpu=ExpertAxes(_up_to(cost.experts, _ON_CPU), [1, 2, 4, *POWERS[4:9:2]], 1 << 10),
        dense_tokens=_around(block, 1 << 10),
        context=[0, 128, 512, 2048],
        usual_context=128,
        requests=list(POWERS[:6]),
        keys=[1, 32, 128, 512, 2048],
    )


def quick_axes(cost: CostGeometry, block: int) -> Axes:
    """Return a few points, to run all code in seconds on any machine."""
    return Axes(
        copies=sorted({4096, cost.expert_bytes, MIB}),
        tokens=_around(block, 4 * block),
        head_tokens=[1, block],
        on_gpu=ExpertAxes(_up_to(cost.experts, (1, 2, 4)), [1, 4], block),
        on_cpu=ExpertAxes(_up_to(cost.experts, (1, 2, 4)), [1, 4], block),
        dense_tokens=_around(block, 2 * block),
        context=[0, 32],
        usual_context=32,
        requests=[1, 2],
        keys=[1, 32],
    )


def _on_cpu(cost: CostGeometry) -> ExpertAxes:
    rows = _up_to(cost.experts, _ON_CPU)
    skipped = frozenset(rows[1:-1]) - _ON_CPU_LONG
    return ExpertAxes(rows, [1, 2, 4, *POWERS[4:13:2]], 1 << 12, skipped)


def _around(block: int, most: int) -> list[int]:
    """Return powers of two, the block length and the count above it.

    A pass of a block runs as one graph, a longer one kernel by kernel: the step between them must
    not become a slope.
    """
    powers = {1 << i for i in range(most.bit_length())}
    return sorted(powers | {block, block + 1})


def _up_to(most: int, points: tuple[int, ...]) -> list[int]:
    return sorted({p for p in points if p < most} | {most})
