"""When prefetches start, read off copies by hand."""

from __future__ import annotations

import pytest

from oled_sim.hardware.clock import Clock, Mark
from oled_sim.hardware.copy_lane import Copy
from oled_sim.hardware.layer_run import LayerMarks
from oled_sim.hardware.measured import PassMarks
from oled_sim.hardware.measuring.prefetch_starts import StartTimes, starts_of


def test_after_a_gate_and_after_one_another():
    # 40 µs after the gate at 100, then 10 and 20 µs after the copies that end at 200 and 270.
    found = starts_of([100.0], [(140.0, 200.0), (210.0, 270.0), (290.0, 350.0)])
    assert found.first == [40.0] and found.between == [10.0, 20.0]


@pytest.mark.parametrize(("ends", "first"), [(490.0, [50.0]), (500.0, [50.0]), (510.0, [])])
def test_one_that_waits_for_the_copy_before_tells_nothing_of_the_gate(ends, first):
    found = starts_of([500.0], [(400.0, ends), (550.0, 600.0)])
    assert found.first == first and found.between == []


def test_copies_of_different_layers_have_a_gate_between_them():
    found = starts_of([0.0, 100.0], [(30.0, 60.0), (150.0, 180.0)])
    assert found.first == [30.0, 50.0] and found.between == []


def test_layers_without_a_copy_tell_nothing():
    assert starts_of([0.0, 100.0, 200.0], [(130.0, 160.0)]) == ([30.0], [])
    assert starts_of([0.0], []) == ([], [])


def test_decisions_do_not_count(cpu):
    """Of a gate at 100 µs, as times of events go; by then decisions of its layer took 20 µs."""
    layer = LayerMarks(Mark(None), Mark(None), gate_us=100.0, paused_before_us=5.0, paused_us=25.0)
    copy = Copy(0, 1, 2, began=Mark(None, 175.0), ended=Mark(None, 300.0))
    marks = PassMarks(0.0, 5.0, layers=[layer], prefetches=[copy])
    times = StartTimes(Clock(cpu.device), skip=1)
    times.note(0, marks)
    assert times.found == ([], [])
    times.note(1, marks)
    assert times.found.first == [175.0 - (100.0 + 20.0)]
