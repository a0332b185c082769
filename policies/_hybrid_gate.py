"""What hybrimoe decides at a gate: kernels, bit for bit what its hooks answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.tables import CostTables, cpu_link_us
from oled_sim.engine.jit import inlined, merged
from oled_sim.errors import ProfileError
from oled_sim.trace import Kind

from ._hybrid_schedule import BY_TRANSFER, ON_GPU, Constants, fill_line, schedule
from ._sums import fill_largest, pairwise_sum

# ruff: noqa: ANN001, ANN202

PREFILL = int(Kind.PREFILL)
TINY = float(np.finfo(np.float64).tiny)
BEYOND_LINK = "the profile has no time for as many tokens on the CPU's link"


class Hybrid(NamedTuple):
    """What the kernels read. L layers, E experts.

    Attributes:
        s: float64 [L, E]. constants: float64 [L, 6], ``Constants`` each. tables: costs.
        a, first_token, forced, by_profile: ``a``, ``tokens=first``, ``admit=forced`` and
            ``constants=profile`` of the policy.
        prefill_on_gpu, block_on_gpu: whether such passes run on the GPU alone.
        lacks: bool [1], becomes true where a trace has no full gate.
        best: int64 [n], scratch for the experts whose score enters S; asked: int64 [m], for those
            to prefetch.
        new: float64 [E], order: int64 [E], missed: bool [E], scratch.
    """

    s: NDArray[np.float64]
    constants: NDArray[np.float64]
    tables: CostTables
    a: float
    first_token: bool
    forced: bool
    by_profile: bool
    prefill_on_gpu: bool
    block_on_gpu: bool
    lacks: NDArray[np.bool_]
    best: NDArray[np.int64]
    asked: NDArray[np.int64]
    new: NDArray[np.float64]
    order: NDArray[np.int64]
    missed: NDArray[np.bool_]


@merged
def decide_hybrimoe(own, gate, v, layer, resident, lanes, scores):
    """Move S; give every expert a lane; rank by S."""
    value, first, n = own.s[layer], gate.offset[v], len(lanes)
    _move_scores(own, gate, v, value)
    ids, tokens = gate.experts[first : first + n], gate.tokens[first : first + n]
    missed = own.missed[:n]
    for i in range(n):
        missed[i] = not resident[ids[i]]
        lanes[i] = BY_TRANSFER if missed[i] else ON_GPU
    alone = _all_on_gpu(own, gate, v)
    for expert in range(len(scores)):
        scores[expert] = value[expert] + (2.0 if alone and resident[expert] else 0.0)
    if alone:
        return
    link_us = 0.0
    if own.by_profile:
        link_us = cpu_link_us(own.tables, gate.rows[v + 1] - gate.rows[v])
        if np.isnan(link_us):
            raise ProfileError(BEYOND_LINK)
    fill_line(missed, tokens, own.order[:n])
    c = own.constants[layer]
    constants = Constants(c[0], c[1], c[2], c[3], c[4], c[5])
    last = schedule(constants, link_us, own.order[:n], missed, tokens, lanes)
    if own.forced and last >= 0:
        scores[ids[last]] = np.inf


@merged
def ask_hybrimoe(own, gate, v, layer, resident, wanted):
    """Ask for the experts of highest S of the next layer."""
    following = layer + 1
    if following == len(own.s) or _all_on_gpu(own, gate, v):
        return 0
    fill_largest(own.s[following], own.asked)
    for i in range(len(own.asked)):
        wanted[i, 0], wanted[i, 1] = following, own.asked[i]
        wanted[i, 2] = own.s[following, own.asked[i]]
    return len(own.asked)


@inlined
def _all_on_gpu(own, gate, v):
    prefill = gate.kind[gate.event_pass[v]] == PREFILL
    return own.prefill_on_gpu if prefill else own.block_on_gpu


@inlined
def _move_scores(own, gate, v, value):
    """Move a layer's S, float64 [E], by the router's scores of an event."""
    new, best = own.new, own.best
    _router_scores(own, gate, v, new)
    total = max(pairwise_sum(new), TINY)
    for expert in range(len(new)):
        new[expert] /= total
        value[expert] *= 1.0 - own.a
    fill_largest(new, best)
    for i in range(len(best)):
        value[best[i]] += own.a * new[best[i]]


@inlined
def _router_scores(own, gate, v, new):
    """Fill ``new``, float64 [E], with full or top-k gates; their sum is whatever it is."""
    first, last = gate.rows[v], gate.rows[v + 1]
    new[:] = 0.0
    if own.first_token:
        for j in range(gate.routes.shape[1]):
            new[gate.routes[first, j]] = gate.gates[first, j]
    elif len(gate.full_gate) > 0:
        for expert in range(len(new)):
            new[expert] = gate.full_gate[v, expert]
    else:
        own.lacks[0] = True
        for row in range(last - 1, first - 1, -1):  # in the order of ``Event.gate_mass``
            for j in range(gate.routes.shape[1] - 1, -1, -1):
                new[gate.routes[row, j]] += np.float64(gate.gates[row, j])
