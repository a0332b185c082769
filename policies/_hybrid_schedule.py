"""HybriMoE's schedule: the GPU takes experts from one end of a line, the CPU from the other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.jit import lean

# ruff: noqa: ANN001, ANN202

ON_GPU, BY_TRANSFER, ON_CPU = 0, 1, 2
"""The values of :class:`oled_sim.policy.Lane`."""

BLOCK_TOKENS = 16
"""Tokens per expert, besides one, at which the CPU is asked for its time per token."""


class Constants(NamedTuple):
    """What the schedule takes experts to cost, in µs.

    ``gpu``: an expert on the GPU; ``gpu_first``: more for the first. ``move``: a copy. ``cpu``: an
    expert on the CPU; ``cpu_token``: more for each of its tokens; ``cpu_first``: more for the first
    expert.
    """

    gpu: float
    gpu_first: float
    move: float
    cpu: float
    cpu_token: float
    cpu_first: float


RELEASED = Constants(500.0, 0.0, 417.91011235117914, 0.0, 1000.0, 790.0)
"""The numbers in the code ("need to be tested"), which are milliseconds, for DeepSeek-V2-Lite."""


def measured(costs: LaneCosts, copy_us: float) -> Constants:
    """Return the constants of a profile.

    Experts work side by side in both lanes, so one more costs what the profile says that as many
    experts as workers take above one, shared among them; the rest of the first one's time is paid
    once. Times per token come from 1 and 16 tokens per expert.
    """
    many = max(2, costs.workers)

    def one_more(tokens: int) -> float:
        several = costs.cpu_experts_us(many, many * tokens)
        return max(0.0, several - costs.cpu_experts_us(1, tokens)) / (many - 1)

    gpu_first = costs.gpu_experts_us(1, 1)
    gpu = max(0.0, costs.gpu_experts_us(many, many) - gpu_first) / (many - 1)
    light, heavy = one_more(1), one_more(BLOCK_TOKENS)
    token = max(0.0, heavy - light) / (BLOCK_TOKENS - 1)
    return Constants(
        gpu=gpu,
        gpu_first=max(0.0, gpu_first - gpu),
        move=copy_us,
        cpu=max(0.0, light - token),
        cpu_token=token,
        cpu_first=max(0.0, costs.cpu_experts_us(1, 1) - light),
    )


@lean
def schedule(constants, link_us, order, missed, tokens, lanes):
    """Give every expert of an event a lane.

    The GPU's candidate is the head of the line, the CPU's its tail; who would finish first takes
    its own, the GPU in a tie. A miss at the head starts when its copy has arrived.

    Args:
        constants: :class:`Constants`.
        link_us: time that the CPU lane takes once, whatever it computes.
        order: int64 [A], the line, as indices into what follows.
        missed: bool [A]. tokens: int64 [A].
        lanes: int64 [A], filled: a ``Lane`` each.

    Returns:
        The last expert in line that is transferred, as an index; -1 for none.
    """
    gpu_us = cpu_us = move_us = 0.0
    head, tail, last = 0, len(order) - 1, -1
    while head <= tail:
        first, other = order[head], order[tail]
        gpu_end = gpu_us + constants.gpu + (constants.gpu_first if head == 0 else 0.0)
        if missed[first]:
            gpu_end += max(0.0, move_us + constants.move - gpu_us)
        cpu_end = cpu_us + constants.cpu + constants.cpu_token * tokens[other]
        if tail == len(order) - 1:
            cpu_end += constants.cpu_first + link_us
        if gpu_end <= cpu_end:
            gpu_us = gpu_end
            lanes[first] = ON_GPU
            if missed[first]:
                move_us += constants.move
                lanes[first], last = BY_TRANSFER, first
            head += 1
        else:
            cpu_us = cpu_end
            lanes[other] = ON_CPU
            tail -= 1
    return last


def line(missed: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the line, int64 [A]: residents and then misses, heaviest first, equals as given."""
    return np.lexsort((-tokens, missed))


@lean
def fill_line(missed, tokens, order):
    """Write the line, as :func:`line` returns it, to int64 [A]."""
    n = 0
    for group in range(2):
        first = n
        for i in range(len(tokens)):
            if missed[i] == (group == 1):
                at = n
                while at > first and tokens[order[at - 1]] < tokens[i]:  # equals stay in order
                    order[at] = order[at - 1]
                    at -= 1
                order[at] = i
                n += 1
