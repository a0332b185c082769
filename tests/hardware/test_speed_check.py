"""Waiting for a machine that is slower than its profile says."""

import time

import pytest

pytest.importorskip("torch", reason="the check times a job of the CPU lane, which needs torch")

from oled_sim.hardware.speed_check import SLOWER, settled
from oled_sim.validation.measured import Speed


def looks(*jobs_us):
    """A check that finds these times, one a millisecond, and the last one from then on."""
    left = list(jobs_us)

    def measure():
        time.sleep(0.001)
        cpu_us = left.pop(0) if len(left) > 1 else left[0]
        return Speed(cpu_experts=12, cpu_tokens_per_expert=2, cpu_us=cpu_us, synchronize_us=20.0)

    return measure


def test_a_machine_as_profiled_is_looked_at_once():
    measure = looks(100.0, 50.0)
    assert settled(measure, 100.0, 10.0).cpu_us == 100.0
    assert measure().cpu_us == 50.0


def test_a_slower_machine_is_waited_for():
    found = settled(looks(200.0, 150.0, 100.0 * (1.0 + SLOWER), 90.0), 100.0, 10.0)
    assert found.cpu_us == 100.0 * (1.0 + SLOWER)
    assert 0.0 < found.waited_s < 10.0


def test_patience_ends():
    found = settled(looks(200.0), 100.0, 0.02)
    assert found.cpu_us == 200.0
    assert found.waited_s >= 0.02


def test_without_patience_the_first_look_counts():
    measure = looks(200.0, 100.0)
    assert settled(measure, 100.0, 0.0).cpu_us == 200.0
    assert measure().cpu_us == 100.0
