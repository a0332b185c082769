"""What lru, lfu, oled and fiddler decide at a gate: kernels, bit for bit what hooks answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from oled_sim.costs.tables import cpu_experts_us
from oled_sim.engine.jit import kernel, merged
from oled_sim.errors import ProfileError
from oled_sim.policy import Setting

from ._cooperative import add_token, normalised, split_cooperatively
from ._load_split import load_split

# ruff: noqa: ANN001, ANN202

BY_TRANSFER, ON_CPU = 1, 2
DISPATCH = {"transfer": 0, "load": 1, "coop": 2}
STALE = {"recency": 0, "last_priority": 1, "id": 2}
PSI = {"linear": 0, "square": 1, "sqrt": 2, "one": 3}
LOAD, COOP = 1, 2
LAST_PRIORITY, BY_ID = 1, 2
SQUARE, SQRT, ONE = 1, 2, 3
BEYOND_ONE = "the profile has no CPU time for as many tokens of one expert"


def split_data(setting: Setting, dispatch: str) -> tuple[Any, ...]:
    """Return what :func:`split` reads: the rule, costs, and scratch int64 [2, E]."""
    scratch = np.zeros((2, setting.routing.experts), np.int64)
    return DISPATCH[dispatch], setting.costs.tables, setting.timer.lanes.copy_us, scratch


@merged
def split(how, gate, v, layer, resident, lanes):
    """Residents to the GPU, misses transferred or, by ``how``, split by load alone."""
    rule, tables, copy_us, scratch = how
    order, load = scratch[0], scratch[1]
    first, misses = gate.offset[v], 0
    if rule != LOAD:
        for i in range(len(lanes)):
            lanes[i] = 1 - int(resident[gate.experts[first + i]])
        return
    for i in range(len(lanes)):
        missed = not resident[gate.experts[first + i]]
        lanes[i] = BY_TRANSFER if missed else 0
        if missed:
            tokens, at = gate.tokens[first + i], misses
            while at > 0 and load[at - 1] < tokens:  # equals stay in order
                order[at], load[at] = order[at - 1], load[at - 1]
                at -= 1
            order[at], load[at] = i, tokens
            misses += 1
    if misses > 0:
        rows = gate.rows[v + 1] - gate.rows[v]
        transfers = load_split(tables, load[:misses], rows, copy_us[layer])
        for i in range(transfers, misses):
            lanes[order[i]] = ON_CPU


@merged
def decide_lru(own, gate, v, layer, resident, lanes, scores):
    """Leave all scores equal, as they are: the engine falls back to the most recent use."""
    split(own, gate, v, layer, resident, lanes)


@merged
def decide_lfu(own, gate, v, layer, resident, lanes, scores):
    """Count the event; ``own``: for :func:`split`, counts float64 [L, E], whether by tokens."""
    how, counts, by_tokens = own
    split(how, gate, v, layer, resident, lanes)
    for i in range(gate.offset[v], gate.offset[v + 1]):
        counts[layer, gate.experts[i]] += np.float64(gate.tokens[i]) if by_tokens else 1.0
    for expert in range(len(scores)):
        scores[expert] = counts[layer, expert]


@merged
def decide_fiddler(own, gate, v, layer, resident, lanes, scores):
    """Send every miss to the cheaper lane; residents stay, and no arrival does.

    ``own``: cost tables; µs per token on the CPU, 0 for the tables'; µs of a miss on the GPU,
    float64 [L]; popularity float64 [L, E], and whether to count it.
    """
    tables, token_us, gpu_us, popularity, learning = own
    first = gate.offset[v]
    for i in range(len(lanes)):
        expert, tokens = gate.experts[first + i], gate.tokens[first + i]
        if learning:
            popularity[layer, expert] += tokens
        lanes[i] = 0
        if not resident[expert]:
            cpu_us = tokens * token_us if token_us > 0.0 else cpu_experts_us(tables, 1, tokens)
            if np.isnan(cpu_us):
                raise ProfileError(BEYOND_ONE)
            lanes[i] = ON_CPU if cpu_us < gpu_us[layer] else BY_TRANSFER
    for expert in range(len(scores)):
        scores[expert] = 0.0 if resident[expert] else -np.inf


@merged
def decide_oled(own, gate, v, layer, resident, lanes, scores):
    """Work out priorities, split misses, rank.

    ``own``: for :func:`split`; ψ and the order of stale residents by number; lanes, queue and
    tables of a timer; scratch for misses; the numbers of :func:`split_cooperatively`; the last
    priorities float64 [L, E]; scratch float64 [E].
    """
    how, psi, stale, lanes_model, queue, tables, misses, numbers, last, active = own
    first, n = gate.offset[v], len(lanes)
    ids = gate.experts[first : first + n]
    total = _gate_shares(gate, v, psi, scores)
    split(how, gate, v, layer, resident, lanes)
    for i in range(n):
        active[i] = normalised(scores[ids[i]], total)
        last[layer, ids[i]] = active[i]
    if how[0] == COOP:
        rows, tokens = gate.rows[v + 1] - gate.rows[v], gate.tokens[first : first + n]
        mean_tokens, reuse_weight, swaps, slack = numbers
        split_cooperatively(
            lanes_model, queue, tables, layer, rows, tokens, active[:n], lanes, misses,
            mean_tokens, reuse_weight, swaps, slack,
        )  # fmt: skip
    if stale == LAST_PRIORITY:
        for expert in range(len(scores)):
            scores[expert] = last[layer, expert] - 2.0
    elif stale == BY_ID:
        for expert in range(len(scores)):
            scores[expert] = -1.0 - expert
    for i in range(n):
        scores[ids[i]] = active[i]


@merged
def _gate_shares(gate, v, psi, p):
    """Fill p, float64 [E], with Σ gate · ψ(confidence) over each expert's tokens; return Σ p."""
    p[:] = 0.0
    total = 0.0
    for row in range(gate.rows[v], gate.rows[v + 1]):
        c = gate.confidence[row]
        if psi == SQUARE:
            c = c * c
        elif psi == SQRT:
            c = np.sqrt(c)
        elif psi == ONE:
            c = 1.0
        total += add_token(p, gate.routes[row], gate.gates[row], c)
    return total


@kernel
def smooth(old, new, weight):
    """Smooth exponentially; where one side is unknown (NaN) the other stands alone."""
    mixed = np.empty(len(old))
    for layer in range(len(old)):
        if np.isnan(old[layer]) or np.isnan(new[layer]):
            mixed[layer] = old[layer] if np.isnan(new[layer]) else new[layer]
        else:
            mixed[layer] = weight * new[layer] + (1.0 - weight) * old[layer]
    return mixed


@kernel
def shares(ratio, utilization, budget):
    """Return the slots of each layer by w = a · u, float64 [L]; all 0 if no layer has a weight."""
    wanted, total = np.zeros(len(ratio)), 0.0
    for layer in range(len(ratio)):
        weight = ratio[layer] * utilization[layer]
        if weight > 0.0:  # not NaN
            wanted[layer] = weight
            total += weight
    for layer in range(len(ratio)):
        wanted[layer] = budget * wanted[layer] / total if total > 0.0 else 0.0
    return wanted
