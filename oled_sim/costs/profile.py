"""The hardware profile: what every lane of one machine costs, for one cost geometry.

A profile is a TOML file of measured medians with their spreads, in microseconds. It names the
machine, the software, the script that made it and the cost geometry it holds for; costs of one
geometry are never used for another. `docs/cost-model.md` says how each table is measured.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from oled_sim.errors import ProfileError
from oled_sim.geometry import CostGeometry

FORMAT = 1
"""Version of the file format; another one is refused."""

Status = Literal["measured", "estimated", "synthetic"]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Unknown keys in a file are errors: a misspelt table must not pass as a missing one."""


MOST = 1e9
"""Nothing takes longer than this many µs, a quarter of an hour, nor is slowed so much: sums of what
does would lose the rest."""


class Quantiles(_Strict, frozen=True):
    """Median of a repeated measurement with its 10th and 90th percentiles, and its mean.

    In microseconds where it is a time, without unit where it is a slow-down factor.
    """

    median: float
    p10: float
    p90: float
    repeats: int
    mean: float | None = None

    def __post_init__(self) -> None:
        if self.repeats == 0:
            raise ValueError("a figure that has no table was not measured")
        _check_spread([self.median], [self.p10], [self.p90], [self.repeats])
        if self.mean is not None and not 0 <= self.mean <= MOST:
            raise ValueError(f"a mean is {self.mean}")

    @property
    def expected(self) -> float:
        """What it is on average: what a run of many events adds up.

        A lane beside others now and then loses its core or its turn for much longer than usual,
        which the median does not see.
        """
        return self.median if self.mean is None else self.mean


class Curve(_Strict, frozen=True):
    """A time by one count: ``points`` ascending, the rest one entry per point, in µs."""

    axis: str
    points: list[int]
    median_us: list[float]
    p10_us: list[float]
    p90_us: list[float]
    repeats: list[int]

    def __post_init__(self) -> None:
        _check_axis(self.axis, self.points)
        _check_spread(self.median_us, self.p10_us, self.p90_us, self.repeats)
        if len(self.points) != len(self.median_us):
            raise ValueError(f"{len(self.points)} points but {len(self.median_us)} times")
        if any(math.isnan(t) for t in self.median_us):
            raise ValueError("a time is nan, which only a table of two counts may hold")


class Grid(_Strict, frozen=True):
    """A time by two counts: lists of rows [len(rows)][len(columns)], in µs.

    A cell with 0 repeats was not measured. Its time lies between those of the rows beside it, or is
    ``nan``, which the cost model refuses to use.
    """

    axes: tuple[str, str]
    rows: list[int]
    columns: list[int]
    median_us: list[list[float]]
    p10_us: list[list[float]]
    p90_us: list[list[float]]
    repeats: list[list[int]]

    def __post_init__(self) -> None:
        _check_axis(self.axes[0], self.rows)
        _check_axis(self.axes[1], self.columns)
        for cells in (self.median_us, self.p10_us, self.p90_us, self.repeats):
            _check_shape(cells, len(self.rows), len(self.columns))
        for row in zip(self.median_us, self.p10_us, self.p90_us, self.repeats, strict=True):
            _check_spread(*row, may_be_between=True)
        for i in (0, -1):  # nothing lies beyond them
            _check_spread(self.median_us[i], self.p10_us[i], self.p90_us[i], self.repeats[i])


class Beside(_Strict, frozen=True):
    """Slow-down factors (≥ 1) of one lane while the others named by the field are busy."""

    both: Quantiles
    gpu: Quantiles | None = None
    h2d: Quantiles | None = None
    cpu: Quantiles | None = None

    def __post_init__(self) -> None:
        for factor in (self.gpu, self.h2d, self.cpu, self.both):
            if factor is not None and min(factor.median, factor.expected) < 1.0:
                least = min(factor.median, factor.expected)
                raise ValueError(f"slow-down factor {least} is below 1")


class Interference(_Strict, frozen=True):
    """How much each lane slows down while one other lane, or both others, are busy."""

    gpu: Beside
    h2d: Beside
    cpu: Beside

    def __post_init__(self) -> None:
        for lane in ("gpu", "h2d", "cpu"):
            given = {o for o in ("gpu", "h2d", "cpu") if getattr(getattr(self, lane), o)}
            if given != {"gpu", "h2d", "cpu"} - {lane}:
                raise ValueError(f"interference of {lane} must name exactly the other two lanes")


class Host(_Strict, frozen=True):
    """What the host adds to the parts of a pass when a run puts them together, µs.

    Attributes:
        per_pass: to every pass: what is done before its first and after its last kernel.
        per_event: to every MoE layer: from a gate's routing on the host to copies and kernels.
        per_arrival: to the last experts of a layer that are copied: noticing that they are there.
        per_cpu_job: to every job of the CPU lane, beside a host that polls.
        per_prefetch: between two prefetches: noticing that one has come, letting it in and starting
            the next. None in profiles of before this was measured; counts as nothing.
        first_prefetch: from a gate until a prefetch can start: what was decided is launched first.
            None in profiles of before this was measured: their ``per_prefetch`` is the time of a
            prefetch in excess of its copy with the engine in full use, and occupies it.
        prefetch_after_layer: from the end of a layer's lanes until a prefetch can start: merge and
            way to the next gate are launched first.
        gate_after_prefetch: from the start of a prefetch before a gate until the host can see that
            the gate's routing is there. Both or neither; where None, the host starts prefetches
            right after a layer, and as late as the gate is seen.
        per_cpu_job_beside_copies: more to a job of the CPU lane in an event that copies, too:
            first the host queues copies. None likewise.
    """

    per_pass: Quantiles
    per_event: Quantiles
    per_arrival: Quantiles
    per_cpu_job: Quantiles
    per_prefetch: Quantiles | None = None
    first_prefetch: Quantiles | None = None
    prefetch_after_layer: Quantiles | None = None
    gate_after_prefetch: Quantiles | None = None
    per_cpu_job_beside_copies: Quantiles | None = None

    def __post_init__(self) -> None:
        """Refuse what no trial measures without the other."""
        for name, needs in (
            ("first_prefetch", "per_prefetch"),
            ("prefetch_after_layer", "gate_after_prefetch"),
            ("gate_after_prefetch", "prefetch_after_layer"),
            ("prefetch_after_layer", "first_prefetch"),
        ):
            if getattr(self, name) is not None and getattr(self, needs) is None:
                raise ValueError(f"{name} is there without {needs}")


class Hardware(_Strict, frozen=True):
    """The machine as found. ``workers``: CPU threads that compute experts."""

    gpu: str
    gpu_memory_bytes: int
    driver: str
    pcie_generation: int
    pcie_width: int
    cpu: str
    cores: int
    workers: int
    host_memory_bytes: int

    def __post_init__(self) -> None:
        for of in ("pcie_generation", "pcie_width", "gpu_memory_bytes", "host_memory_bytes"):
            if getattr(self, of) < 0:
                raise ValueError(f"{of} is {getattr(self, of)}")
        if self.workers < 1 or self.cores < 1:
            raise ValueError(f"{self.workers} workers on {self.cores} cores are impossible")


class Software(_Strict, frozen=True):
    """Versions that the measured kernels came from."""

    os: str
    python: str
    torch: str
    cuda: str
    numpy: str


class Origin(_Strict, frozen=True):
    """When and by what a profile was made. ``revision``: sha256 of the sources that measured."""

    date: datetime.date
    script: str
    revision: str
    note: str = ""


class GeometryFields(_Strict, frozen=True):
    """The cost geometry that the times hold for; the fields of :class:`CostGeometry`."""

    name: str
    hidden_size: int
    dense_intermediate_size: int
    moe_intermediate_size: int
    layers: int
    dense_layers: int
    experts: int
    top_k: int
    shared_experts: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    weight_bytes: int


class Profile(_Strict, frozen=True):
    """Everything a profile file holds.

    Attributes:
        status: ``measured`` on the hardware named, ``estimated`` from published figures, or
            ``synthetic`` (a formula, for tests and what-if).
        provisional: true while a better profile of the same machine is expected.
        h2d, h2d_pageable, d2h: one copy by bytes, in a queue of copies.
        gpu_experts: grouped kernel over resident experts, by experts × mean tokens per expert.
        cpu_experts: makespan of the CPU workers, by experts × mean tokens per expert.
        cpu_link: activations to the host and sums back, by tokens.
        dense: norms, attention and output projection of one layer, by tokens × context tokens.
        projections: ``dense`` without the attention kernel, by tokens of all requests.
        block_attention: the attention kernel alone over a batch of requests with a block of 32
            tokens and keys of its own each, by requests × keys per request.
        gate: router, top-k, sort by expert, ids and weights on the host, by tokens.
        shared_expert, dense_layer, lm_head, merge, embedding: by tokens.
        launch, synchronize: host time of one kernel launch; of waiting for a finished one.
        host: what the host adds when a run puts the parts together; None counts as nothing.
    """

    format: int
    name: str
    status: Status
    provisional: bool
    origin: Origin
    hardware: Hardware
    software: Software
    geometry: GeometryFields
    launch: Quantiles
    synchronize: Quantiles
    interference: Interference
    h2d: Curve
    h2d_pageable: Curve
    d2h: Curve
    gpu_experts: Grid
    cpu_experts: Grid
    cpu_link: Curve
    dense: Grid
    projections: Curve
    block_attention: Grid
    gate: Curve
    shared_expert: Curve
    dense_layer: Curve
    lm_head: Curve
    merge: Curve
    embedding: Curve
    host: Host | None = None

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not {FORMAT}, the one this version reads")
        for name, axes in AXES.items():
            table = getattr(self, name)
            found = (table.axis,) if isinstance(table, Curve) else table.axes
            if found != axes:
                raise ValueError(f"axes of {name} are {found} instead of {axes}")

    @property
    def cost_geometry(self) -> CostGeometry:
        """The cost geometry that the times hold for."""
        return CostGeometry(**msgspec.structs.asdict(self.geometry))

    def require_geometry(self, cost: CostGeometry) -> None:
        """Refuse to be used for another cost geometry.

        Raises:
            ProfileError: a field differs; the sentence names the first one.
        """
        for field, mine in msgspec.structs.asdict(self.geometry).items():
            if (theirs := getattr(cost, field)) != mine:
                raise ProfileError(
                    f"profile {self.name!r} was made for {self.geometry.name!r} ({field} {mine}), "
                    f"not for {cost.name!r} ({field} {theirs}): use a profile of that geometry"
                )

    def require_hardware(self, found: Hardware) -> None:
        """Refuse to stand for another machine: for predictions that are held against this one.

        Args:
            found: the machine at hand, see :func:`oled_sim.hardware.identity.hardware`.

        Raises:
            ProfileError: GPU, processor or number of workers differ; the sentence names the first.
        """
        for field, what in (("gpu", "GPU"), ("cpu", "processor"), ("workers", "CPU workers")):
            mine, theirs = getattr(self.hardware, field), getattr(found, field)
            if mine != theirs:
                raise ProfileError(
                    f"profile {self.name!r} was measured on other hardware ({what}: {mine}; here: "
                    f"{theirs}): measure this machine with oled-sim profile, or give "
                    "--allow-other-hardware"
                )


_BYTES, _TOKENS, _EXPERTS = ("bytes",), ("tokens",), ("experts", "tokens_per_expert")
AXES: dict[str, tuple[str, ...]] = {
    "h2d": _BYTES,
    "h2d_pageable": _BYTES,
    "d2h": _BYTES,
    "gpu_experts": _EXPERTS,
    "cpu_experts": _EXPERTS,
    "cpu_link": _TOKENS,
    "dense": ("tokens", "context"),
    "projections": _TOKENS,
    "block_attention": ("requests", "keys"),
    "gate": _TOKENS,
    "shared_expert": _TOKENS,
    "dense_layer": _TOKENS,
    "lm_head": _TOKENS,
    "merge": _TOKENS,
    "embedding": _TOKENS,
}
"""Every table of a profile, in the order of the compiled form, with its axes."""


def _check_axis(axis: str, points: Sequence[int]) -> None:
    if not points or points[0] < 0:
        raise ValueError(f"axis {axis!r} must hold at least one count, none negative")
    if any(a >= b for a, b in pairwise(points)):
        raise ValueError(f"axis {axis!r} must ascend")


def _check_shape(cells: Sequence[Sequence[object]], rows: int, columns: int) -> None:
    if len(cells) != rows or any(len(row) != columns for row in cells):
        raise ValueError(f"a table is not {rows} rows of {columns} columns")


def _check_spread(
    median: Sequence[float],
    p10: Sequence[float],
    p90: Sequence[float],
    repeats: Sequence[int],
    *,
    may_be_between: bool = False,
) -> None:
    if not len(median) == len(p10) == len(p90) == len(repeats):
        raise ValueError("medians, percentiles and repeats differ in number")
    for middle, low, high, count in zip(median, p10, p90, repeats, strict=True):
        if count == 0 and all(math.isnan(v) for v in (middle, low, high)):
            continue
        least = 0 if may_be_between else 1
        if count < least or not 0 <= low <= middle <= high <= MOST:
            raise ValueError(
                f"median {middle} with percentiles {low} and {high} of {count} repeats "
                "is not a measurement"
            )
