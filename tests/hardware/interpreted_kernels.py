"""Triton's kernels against plain operations; a test beside this runs it interpreted."""

import dataclasses

import numpy as np
import torch
from conftest import SMALL, varied_model
from grouping import make, random_event, run_some
from test_backbone import Native, OnHardware, check_equal

from oled_sim.hardware import copy_kernels
from oled_sim.hardware.place import Place

CPU = Place(torch.device("cpu"), torch.float32)
NARROW = dataclasses.replace(SMALL, hidden_size=40, moe_intermediate_size=24)
"""Widths that no tile divides."""


def check(cost, tokens, captured):
    grouped = make(CPU, cost, 40, triton=True)
    if captured:
        ring_as_if_captured(grouped)
    for seed in range(2 if captured else 1):
        out, expected = run_some(grouped, CPU, cost, tokens, seed)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def ring_as_if_captured(grouped):
    """Let calls go through the ring of staged tables, launched eagerly: the CPU has no graphs."""
    launcher = grouped._launcher

    class Eager:
        def __contains__(self, key):
            self.call = key
            return True

        def replay(self, key):
            launcher._from_ring(*current, key[2])

    current = []
    run = launcher.run

    def remember(x, rows, which, slots, out):
        current[:] = [x, out]
        run(x, rows, which, slots, out)

    launcher.run = remember
    launcher.graphs = Eager()
    launcher.rooms = np.array([4, 8, 16, 24], np.int32)


def check_rows_are_independent():
    grouped = make(CPU, SMALL, 20, triton=True)
    rows, slots = random_event(SMALL, 20)
    x = torch.randn(20, SMALL.hidden_size)
    together = torch.zeros(20 * SMALL.top_k, SMALL.hidden_size)
    apart = torch.zeros_like(together)
    grouped.load(rows)
    every = np.arange(len(rows.expert))
    grouped.run(x, every, slots, together)
    for i in every[::-1]:
        grouped.run(x, [i], [slots[i]], apart)
    assert torch.equal(together, apart)


def check_copy():
    source, target = torch.randn(2, 700), torch.zeros(2, 1000)
    copy_kernels.copy[(2,)](source[:1], target[1:], 700, chunk=512)
    assert torch.equal(target[1, :700], source[0])
    assert not target[0].any()
    assert not target[1, 700:].any()


check_copy()
for cost, tokens in ((SMALL, 1), (NARROW, 5), (SMALL, 40)):
    check(cost, tokens, captured=False)
check(SMALL, 5, captured=True)
check_rows_are_independent()
check_equal(OnHardware(varied_model(), CPU, True, fused=True), Native(varied_model()))
