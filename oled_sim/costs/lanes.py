"""Lane costs: what the engine and the policies ask of a hardware profile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs import tables as compiled
from oled_sim.costs.profile import AXES, Beside, Curve, Grid, Profile
from oled_sim.costs.store import bundled_profile_for, load_profile
from oled_sim.costs.tables import NOT_MEASURED, CostTables
from oled_sim.errors import ProfileError, UsageError
from oled_sim.geometry import CostGeometry

__all__ = ["CostTables", "LaneCosts", "load_costs"]


BEYOND = "allow extrapolation (--extrapolate), or use a profile that covers it"
"""What to do where a profile does not reach."""


@dataclass(frozen=True)
class LaneCosts:
    """The costs of one profile, all in microseconds, interpolated between measured points.

    Every method raises :class:`ProfileError` outside the profiled range unless ``extrapolate``
    is true, which continues the line of the outermost cell. ``tables`` holds the same costs for
    compiled kernels. ``bandwidth_gb_s`` is set by :meth:`with_bandwidth` alone.
    """

    profile: Profile
    extrapolate: bool = False
    bandwidth_gb_s: float | None = None
    tables: CostTables = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = {name: _values(getattr(self.profile, name)) for name in AXES}
        if self.bandwidth_gb_s is not None:
            _scale_links(self.profile, values, self.bandwidth_gb_s)
        if self.extrapolate:
            values = {name: _fill(getattr(self.profile, name), v) for name, v in values.items()}
        object.__setattr__(self, "tables", _pack(self.profile, values, self.extrapolate))

    @property
    def geometry(self) -> CostGeometry:
        """The cost geometry that the costs hold for."""
        return self.profile.cost_geometry

    @property
    def workers(self) -> int:
        """CPU threads that compute experts."""
        return self.profile.hardware.workers

    @property
    def link_bandwidth_gb_s(self) -> float:
        """Asymptotic bandwidth of pinned host-to-GPU copies, 10⁹ bytes per second."""
        return self.bandwidth_gb_s or 1e-3 / _slope(self.profile.h2d)

    def with_bandwidth(self, gb_s: float) -> LaneCosts:
        """Return the costs of the same machine with a link of ``gb_s`` · 10⁹ bytes per second.

        The part of each copy (both directions, and of the activations that the CPU lane moves)
        that is proportional to its size is scaled; the fixed part stays.

        Raises:
            UsageError: the bandwidth is not a positive number.
        """
        if not 0 < gb_s < np.inf:
            raise UsageError(f"bandwidth {gb_s} GB/s is impossible: give a positive number")
        return replace(self, bandwidth_gb_s=gb_s)

    def h2d_us(self, size_bytes: float) -> float:
        """Copy ``size_bytes`` from pinned host memory to the GPU."""
        return self._curve(compiled.H2D, size_bytes)

    def pageable_us(self, size_bytes: float) -> float:
        """Copy ``size_bytes`` from pageable host memory to the GPU."""
        return self._curve(compiled.PAGEABLE, size_bytes)

    def d2h_us(self, size_bytes: float) -> float:
        """Copy ``size_bytes`` from the GPU to pinned host memory."""
        return self._curve(compiled.D2H, size_bytes)

    def gpu_experts_us(self, experts: float, tokens: float) -> float:
        """One grouped kernel over ``experts`` residents that share ``tokens`` routed tokens."""
        return self._experts(compiled.GPU_EXPERTS, experts, tokens)

    def cpu_experts_us(self, experts: float, tokens: float) -> float:
        """Makespan of all CPU workers over ``experts`` that share ``tokens`` routed tokens."""
        return self._experts(compiled.CPU_EXPERTS, experts, tokens)

    def cpu_link_us(self, tokens: float) -> float:
        """Activations of ``tokens`` tokens to the host, the sums back, and what a job adds."""
        if tokens <= 0:
            return 0.0
        return self._curve(compiled.CPU_LINK, tokens) + self.tables.per_cpu_job_us

    def dense_us(self, tokens: float, context: float) -> float:
        """Norms, attention, output projection of one layer for ``tokens`` of one request."""
        return 0.0 if tokens <= 0 else self._lookup(compiled.DENSE, tokens, context)

    def dense_batch_us(self, tokens: float, requests: float, context: float) -> float:
        """The same for ``tokens`` of all ``requests`` together, each with its own context.

        ``context`` is the average over the requests.
        """
        if requests <= 1:
            return self.dense_us(tokens, context)
        keys = context + tokens / requests
        shared = self._curve(compiled.PROJECTIONS, tokens)
        return shared + self._lookup(compiled.BLOCK_ATTENTION, requests, keys)

    def gate_us(self, tokens: float) -> float:
        """Router, top-k, sort by expert, until ids and weights are on the host."""
        return self._curve(compiled.GATE, tokens)

    def shared_expert_us(self, tokens: float) -> float:
        """The shared expert of one layer."""
        return self._curve(compiled.SHARED_EXPERT, tokens)

    def dense_layer_us(self, tokens: float) -> float:
        """The MLP of one dense layer."""
        return self._curve(compiled.DENSE_LAYER, tokens)

    def lm_head_us(self, tokens: float) -> float:
        """Final norm, LM head, softmax, argmax, confidence, until they are on the host."""
        return self._curve(compiled.LM_HEAD, tokens)

    def merge_us(self, tokens: float) -> float:
        """Sum of routed outputs, shared expert and residual."""
        return self._curve(compiled.MERGE, tokens)

    def embedding_us(self, tokens: float) -> float:
        """Token embedding at the start of a pass."""
        return self._curve(compiled.EMBEDDING, tokens)

    def slowdown(self, lane: int, busy: int) -> float:
        """Factor by which ``lane`` (0 GPU, 1 H2D, 2 CPU) slows while those in ``busy`` work."""
        return float(compiled.slowdown(self.tables, lane, busy))

    def _curve(self, table: int, count: float) -> float:
        return 0.0 if count <= 0 else self._lookup(table, count, 0.0)

    def _experts(self, table: int, experts: float, tokens: float) -> float:
        return 0.0 if experts <= 0 else self._lookup(table, experts, tokens / experts)

    def _lookup(self, table: int, x: float, y: float) -> float:
        time = float(compiled.lookup(self.tables, table, float(x), float(y)))
        if np.isnan(time):
            raise ProfileError(self._explain(compiled.TABLE_NAMES[table], (x, y)))
        return time

    def _explain(self, name: str, at: tuple[float, float]) -> str:
        """Return the sentence that says which count left the profiled range."""
        table = getattr(self.profile, name)
        axes = [table.points] if isinstance(table, Curve) else [table.rows, table.columns]
        for axis, points, value in zip(AXES[name], axes, at, strict=False):
            if not points[0] <= value <= points[-1]:
                return (
                    f"table {name} of profile {self.profile.name!r} covers {points[0]} to "
                    f"{points[-1]} {axis}, not {value:g}: {BEYOND}"
                )
        where = " × ".join(f"{v:g} {a}" for a, v in zip(AXES[name], at, strict=True))
        return (
            f"table {name} of profile {self.profile.name!r} was not measured at {where}: {BEYOND}"
        )


def load_costs(
    geometry: CostGeometry, profile: str | Path | None = None, *, extrapolate: bool = False
) -> LaneCosts:
    """Load the costs for a cost geometry.

    Args:
        geometry: the geometry of the run; the profile must match it in every field.
        profile: a bundled name or a path; by default the bundled profile of the geometry.
        extrapolate: allow counts outside the profiled range.

    Raises:
        UsageError: no bundled profile by that name.
        ProfileError: unreadable, or made for another geometry.
    """
    loaded = load_profile(profile or bundled_profile_for(geometry))
    loaded.require_geometry(geometry)
    return LaneCosts(loaded, extrapolate)


def _values(table: Curve | Grid) -> NDArray[np.float64]:
    """Return the times of a table as float64 [rows, columns]; a curve has one column."""
    times = np.array(table.median_us, dtype=np.float64)
    return times[:, None] if isinstance(table, Curve) else times


def _fill(table: Curve | Grid, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Continue every row of a grid over cells that were not measured, along its last slope."""
    if isinstance(table, Curve):
        return times
    x, filled = table.columns, times.copy()
    for row in filled:
        for j in np.flatnonzero(np.isnan(row)):
            slope = (row[j - 1] - row[j - 2]) / (x[j - 1] - x[j - 2])
            row[j] = row[j - 1] + max(slope, 0.0) * (x[j] - x[j - 1])
    return filled


def _pack(
    profile: Profile, values: dict[str, NDArray[np.float64]], extrapolate: bool
) -> CostTables:
    layout, pieces, end = np.zeros((len(AXES), 5), np.int64), [], 0
    for i, (name, times) in enumerate(values.items()):
        table = getattr(profile, name)
        is_curve = isinstance(table, Curve)
        rows, columns = (table.points, [0]) if is_curve else (table.rows, table.columns)
        layout[i] = end, len(rows), end + len(rows), len(columns), end + len(rows) + len(columns)
        pieces += [np.array(rows, np.float64), np.array(columns, np.float64), times.ravel()]
        end += len(rows) + len(columns) + times.size
    return CostTables(
        layout=layout,
        data=np.concatenate(pieces),
        interference=_factors(profile),
        launch_us=profile.launch.median,
        synchronize_us=profile.synchronize.median,
        **_host(profile),
        extrapolate=extrapolate,
    )


def _host(profile: Profile) -> dict[str, float]:
    """Return what the host adds, by the names that tables have for it, µs."""
    names = (
        "per_pass", "per_event", "per_arrival", "per_cpu_job", "per_prefetch", "first_prefetch",
        "prefetch_after_layer", "gate_after_prefetch", "per_cpu_job_beside_copies",
    )  # fmt: skip
    given = {name: getattr(profile.host, name, None) for name in names}
    found = {f"{name}_us": value.expected if value else 0.0 for name, value in given.items()}
    if given["gate_after_prefetch"] is None:  # the rule does not hold, which is not 0 µs
        found["gate_after_prefetch_us"] = NOT_MEASURED
    on_lane_us = 0.0
    if given["first_prefetch"] is None:  # then the other is the time of a copy engine in full use
        on_lane_us, found["per_prefetch_us"] = found["per_prefetch_us"], 0.0
    return found | {"prefetch_on_lane_us": on_lane_us}


def _factors(profile: Profile) -> NDArray[np.float64]:
    """Return the slow-down factors as float64 [3 lanes, 8 sets of busy lanes]."""
    lanes = ("gpu", "h2d", "cpu")
    factors = np.ones((3, 8))
    for lane, name in enumerate(lanes):
        beside: Beside = getattr(profile.interference, name)
        for busy in range(8):
            others = [o for i, o in enumerate(lanes) if busy >> i & 1 and o != name]
            if others:
                key = others[0] if len(others) == 1 else "both"
                factors[lane, busy] = getattr(beside, key).expected
    return factors


def _slope(copy: Curve) -> float:
    """Return µs per byte between the two largest copies: the link's asymptotic rate."""
    (x0, x1), (t0, t1) = copy.points[-2:], copy.median_us[-2:]
    return (t1 - t0) / (x1 - x0)


def _scale_links(profile: Profile, values: dict[str, NDArray[np.float64]], gb_s: float) -> None:
    """Replace the asymptotic rate of both directions by ``gb_s``, in place."""
    slope = 1e-3 / gb_s
    down, up = slope - _slope(profile.h2d), slope - _slope(profile.d2h)
    token_bytes = profile.geometry.hidden_size * profile.geometry.weight_bytes
    changes = {
        "h2d": (profile.h2d.points, down),
        "d2h": (profile.d2h.points, up),
        "cpu_link": (profile.cpu_link.points, token_bytes * (down + up)),
    }
    for name, (points, change) in changes.items():
        times = values[name][:, 0] + np.array(points) * change
        values[name] = np.maximum(times, 0.0)[:, None]
