"""The full gate of synthetic traces: the mean sigmoid score of all experts over a block."""

from __future__ import annotations

import math

from oled_sim.engine.jit import lean
from oled_sim.synthesis.course import MASKED

# ruff: noqa: ANN001, ANN201


@lean
def add_mean(mean, masks, words, state, token, block, tokens, base):
    """Add a block's sigmoid scores to the mean [E] of an event of ``tokens`` tokens.

    Candidates count with their score; all others with their log rate, at least ``floor``.

    Args:
        masks, words: float64 [E], log rates of either. state: [T], the block's from ``token``
            on. block: its candidates. base: slope, offset and floor of gates.
    """
    ids, score, noise = block
    slope, shift, floor = base
    part = 1.0 / tokens
    for s in range(2):
        logs = words if s == 1 else masks
        with_state = 0
        for t in range(ids.shape[1]):
            with_state += int((state[token + t] != MASKED) == (s == 1))
        if with_state > 0:
            for e in range(len(mean)):
                x = slope * max(logs[e], floor) + shift
                mean[e] += with_state * part / (1 + math.exp(-x))
    for t in range(ids.shape[1]):
        logs = masks if state[token + t] == MASKED else words
        for j in range(len(ids)):
            x = slope * (float(score[j, t]) + float(noise[j, t])) + shift
            other = slope * max(logs[ids[j, t]], floor) + shift
            mean[ids[j, t]] += part / (1 + math.exp(-x)) - part / (1 + math.exp(-other))
