"""Cost tables in the form a compiled kernel reads, and the functions that read them.

Every function here works alike compiled and interpreted (``NUMBA_DISABLE_JIT=1``), to the bit: it
uses nothing but comparisons and +, −, ×, ÷ on float64. Outside the profiled range a function
returns NaN, since a kernel cannot word an error; :class:`~oled_sim.costs.lanes.LaneCosts` words
it. A caller must test for NaN before it compares times.

Interpolation is linear in the counts themselves over grids whose points are roughly powers of
two. Lane costs are piecewise affine (a fixed overhead, then bytes over bandwidth or operations
over rate), which linear interpolation reproduces exactly; on logarithmic axes an affine cost
would be overestimated between any two points. Grid points are returned exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.profile import AXES
from oled_sim.engine.jit import merged

__all__ = [
    "BUSY_CPU",
    "BUSY_GPU",
    "BUSY_H2D",
    "CostTables",
    "cpu_experts_us",
    "cpu_link_us",
    "d2h_us",
    "dense_batch_us",
    "dense_layer_us",
    "dense_us",
    "embedding_us",
    "gate_us",
    "gpu_experts_us",
    "h2d_us",
    "lm_head_us",
    "lookup",
    "merge_us",
    "pageable_us",
    "shared_expert_us",
    "slowdown",
]

TABLE_NAMES = tuple(AXES)

NOT_MEASURED = -1.0
"""Time of what a profile does not hold and where 0 would mean something else."""
H2D, PAGEABLE, D2H, GPU_EXPERTS, CPU_EXPERTS, CPU_LINK, DENSE, PROJECTIONS = range(8)
BLOCK_ATTENTION, GATE, SHARED_EXPERT, DENSE_LAYER, LM_HEAD, MERGE, EMBEDDING = range(8, 15)

BUSY_GPU, BUSY_H2D, BUSY_CPU = 1, 2, 4
"""Bits of a set of busy lanes; a lane's own bit is ignored. Lane i has bit ``1 << i``."""


class CostTables(NamedTuple):
    """All tables of a profile in two arrays, cheap to hand to a compiled kernel.

    Attributes:
        layout: int64 [tables, 5] per table: start in ``data`` of its row points, their number,
            start of its column points, their number, start of its values (row-major).
        data: float64, points and values (µs) of all tables.
        interference: float64 [3, 8], slow-down of lane (0 GPU, 1 H2D, 2 CPU) while the lanes of
            a bit set are busy.
        launch_us: host time of one kernel launch.
        synchronize_us: host time of waiting for a finished kernel.
        per_pass_us, per_event_us, per_arrival_us, per_cpu_job_us, per_prefetch_us,
            first_prefetch_us, prefetch_after_layer_us, gate_after_prefetch_us,
            per_cpu_job_beside_copies_us: what the host adds, see
            :class:`oled_sim.costs.profile.Host`.
            ``gate_after_prefetch_us`` is ``NOT_MEASURED`` where the profile does not hold it.
        prefetch_on_lane_us: what a prefetch adds to its copy, where the profile does not tell when
            the host starts one.
        extrapolate: whether the last cell's line continues outside the profiled range.
    """

    layout: NDArray[np.int64]
    data: NDArray[np.float64]
    interference: NDArray[np.float64]
    launch_us: float
    synchronize_us: float
    per_pass_us: float
    per_event_us: float
    per_arrival_us: float
    per_cpu_job_us: float
    per_prefetch_us: float
    first_prefetch_us: float
    prefetch_after_layer_us: float
    gate_after_prefetch_us: float
    prefetch_on_lane_us: float
    per_cpu_job_beside_copies_us: float
    extrapolate: bool


@merged
def _cell(data: Any, start: int, count: int, x: float) -> int:
    """Return i such that points i and i + 1 bracket x; the first or last cell outside.

    A binary search without branches, since where x lies cannot be predicted.
    """
    low, width = 0, count - 1
    while width > 1:
        half = width // 2
        low += half * int(data[start + low + half] <= x)
        width -= half
    return low


@merged
def _blend(low: float, high: float, weight: float) -> float:
    """Interpolate; exact at both ends even where the other end was not measured (NaN)."""
    if weight == 0.0:
        return low
    if weight == 1.0:
        return high
    return low * (1.0 - weight) + high * weight


@merged
def _weight(data: Any, start: int, count: int, cell: int, x: float) -> float:
    """Return where x lies in a cell, 0 to 1; beyond outside; 0 on an axis of one point."""
    if count == 1:
        return 0.0
    left, right = data[start + cell], data[start + cell + 1]
    return (x - left) / (right - left)


@merged
def _outside(data: Any, start: int, count: int, x: float) -> bool:
    return not (data[start] <= x <= data[start + count - 1])


@merged
def lookup(tables: CostTables, table: int, x: float, y: float) -> float:
    """Return the time in µs of one table at (x, y), NaN outside what was profiled.

    A table of one count has a single column at 0; pass ``y`` = 0.
    """
    data: Any = tables.data
    rows, n_rows = tables.layout[table, 0], tables.layout[table, 1]
    columns, n_columns = tables.layout[table, 2], tables.layout[table, 3]
    values = tables.layout[table, 4]
    outside = _outside(data, rows, n_rows, x) or _outside(data, columns, n_columns, y)
    if outside and not tables.extrapolate:
        return np.nan
    i = _cell(data, rows, n_rows, x)
    j = _cell(data, columns, n_columns, y)
    down = _weight(data, rows, n_rows, i, x)
    across = _weight(data, columns, n_columns, j, y)
    time = 0.0
    here = values + i * n_columns + j
    right = here + min(1, n_columns - 1)
    below = min(1, n_rows - 1) * n_columns
    if down == 1.0:
        time = _blend(data[here + below], data[right + below], across)
    elif down == 0.0:
        time = _blend(data[here], data[right], across)
    else:
        upper = _blend(data[here], data[right], across)
        lower = _blend(data[here + below], data[right + below], across)
        time = _blend(upper, lower, down)
    return 0.0 if time < 0.0 else time


@merged
def _curve(tables: CostTables, table: int, count: float) -> float:
    """Return the time of a table of one count; nothing costs nothing."""
    if count <= 0:
        return 0.0
    return lookup(tables, table, float(count), 0.0)


@merged
def _experts(tables: CostTables, table: int, experts: float, tokens: float) -> float:
    """Return the time of ``experts`` experts that share ``tokens`` routed tokens."""
    if experts <= 0:
        return 0.0
    return lookup(tables, table, float(experts), tokens / experts)


@merged
def h2d_us(tables: CostTables, size_bytes: float) -> float:
    """Copy from pinned host memory to the GPU."""
    return _curve(tables, H2D, size_bytes)


@merged
def pageable_us(tables: CostTables, size_bytes: float) -> float:
    """Copy from pageable host memory to the GPU."""
    return _curve(tables, PAGEABLE, size_bytes)


@merged
def d2h_us(tables: CostTables, size_bytes: float) -> float:
    """Copy from the GPU to pinned host memory."""
    return _curve(tables, D2H, size_bytes)


@merged
def gpu_experts_us(tables: CostTables, experts: float, tokens: float) -> float:
    """One grouped kernel over ``experts`` resident experts with ``tokens`` routed tokens in all."""
    return _experts(tables, GPU_EXPERTS, experts, tokens)


@merged
def cpu_experts_us(tables: CostTables, experts: float, tokens: float) -> float:
    """Makespan of the CPU workers over ``experts`` experts, ``tokens`` routed tokens in all."""
    return _experts(tables, CPU_EXPERTS, experts, tokens)


@merged
def cpu_link_us(tables: CostTables, tokens: float) -> float:
    """Activations of ``tokens`` tokens to the host, the sums back, and what a job adds."""
    if tokens <= 0:
        return 0.0
    return _curve(tables, CPU_LINK, tokens) + tables.per_cpu_job_us


@merged
def dense_us(tables: CostTables, tokens: float, context: float) -> float:
    """Norms, attention and output projection of one layer for one request.

    ``tokens`` are those of the pass; ``context`` those whose keys and values are kept already.
    """
    if tokens <= 0:
        return 0.0
    return lookup(tables, DENSE, float(tokens), float(context))


@merged
def dense_batch_us(tables: CostTables, tokens: float, requests: float, context: float) -> float:
    """Norms, attention and output projection of one layer for a batch.

    ``tokens`` are those of all ``requests`` together; every request has a context of its own, of
    ``context`` tokens on average. One request is :func:`dense_us`.
    """
    if tokens <= 0:
        return 0.0
    if requests <= 1:
        return lookup(tables, DENSE, float(tokens), float(context))
    keys = context + tokens / requests
    shared = lookup(tables, PROJECTIONS, float(tokens), 0.0)
    return shared + lookup(tables, BLOCK_ATTENTION, float(requests), keys)


@merged
def gate_us(tables: CostTables, tokens: float) -> float:
    """Router, top-k and sort by expert, until ids and weights are on the host."""
    return _curve(tables, GATE, tokens)


@merged
def shared_expert_us(tables: CostTables, tokens: float) -> float:
    """The shared expert of one layer."""
    return _curve(tables, SHARED_EXPERT, tokens)


@merged
def dense_layer_us(tables: CostTables, tokens: float) -> float:
    """The MLP of one dense layer (instead of experts)."""
    return _curve(tables, DENSE_LAYER, tokens)


@merged
def lm_head_us(tables: CostTables, tokens: float) -> float:
    """Final norm, LM head, softmax, argmax and confidence, until they are on the host."""
    return _curve(tables, LM_HEAD, tokens)


@merged
def merge_us(tables: CostTables, tokens: float) -> float:
    """Sum of routed outputs, shared expert and residual."""
    return _curve(tables, MERGE, tokens)


@merged
def embedding_us(tables: CostTables, tokens: float) -> float:
    """Token embedding at the start of a pass."""
    return _curve(tables, EMBEDDING, tokens)


@merged
def slowdown(tables: CostTables, lane: int, busy: int) -> float:
    """Return the factor (≥ 1) by which ``lane`` slows while the lanes in ``busy`` work too.

    ``lane``: 0 GPU, 1 H2D, 2 CPU. ``busy``: a set of :data:`BUSY_GPU` and the like.
    """
    return tables.interference[lane, busy]
