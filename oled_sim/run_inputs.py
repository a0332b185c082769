"""What a simulation takes besides policies and budgets: requests, costs, sizes of experts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts, load_costs
from oled_sim.engine.source import TraceSource
from oled_sim.geometry import DEFAULT_GEOMETRY, find_geometry
from oled_sim.policy import Policy
from oled_sim.trace import Trace

ALWAYS_READ = frozenset({"ids", "gates", "confidence", "token_state"})
"""Small signals, decoded whether a policy declares them or not."""


def costs_for(
    trace: Trace, geometry: str | None, profile: str | None, extrapolate: bool
) -> LaneCosts:
    """Return the lane costs of the geometry asked for, of what the trace stands for, or mini's."""
    name = geometry or trace.manifest.stands_for or DEFAULT_GEOMETRY
    return load_costs(find_geometry(name), profile, extrapolate=extrapolate)


def source_for(trace: Trace, policies: Iterable[Policy]) -> TraceSource:
    """Return a trace as a source of the signals that some policies use."""
    needed = frozenset().union(*(policy.needs | policy.wants for policy in policies))
    return TraceSource(trace, needed | ALWAYS_READ)


def expert_bytes_of(trace: Trace, costs: LaneCosts) -> NDArray[np.int64]:
    """Return the bytes of an expert per layer, int64 [L]: the trace's own, else the geometry's."""
    own = trace.manifest.expert_bytes
    return np.array(own or [costs.geometry.expert_bytes] * len(trace.geometry.layers), np.int64)
