"""When prefetches start, and what that keeps the host from, read off copies by hand."""

from __future__ import annotations

import pytest

from oled_sim.hardware.clock import Clock, Mark
from oled_sim.hardware.copy_lane import Copy
from oled_sim.hardware.layer_run import LayerMarks
from oled_sim.hardware.measured import PassMarks
from oled_sim.hardware.measuring.prefetch_starts import Layer, Starts, StartTimes, starts_of

LATE = 1000.0
"""When the lanes of a layer end of which the end tells nothing."""


def test_after_a_gate_and_after_one_another():
    # 40 µs after the gate at 100, then 10 and 20 µs after the copies that end at 200 and 270.
    copies = [(140.0, 200.0), (210.0, 270.0), (290.0, 350.0)]
    found = starts_of([Layer(100.0, LATE)], copies, [])
    assert found == Starts([40.0], [10.0, 20.0], [], [])


@pytest.mark.parametrize(("ends", "first"), [(490.0, [50.0]), (500.0, [50.0]), (510.0, [])])
def test_one_that_waits_for_the_copy_before_tells_nothing_of_the_gate(ends, first):
    found = starts_of([Layer(500.0, LATE)], [(400.0, ends), (550.0, 600.0)], [])
    assert found == Starts(first, [], [], [])


def test_one_behind_a_demand_transfer_tells_nothing():
    found = starts_of([Layer(0.0, LATE)], [(130.0, 250.0)], [(10.0, 130.0)])
    assert found == Starts([], [], [], [])


def test_copies_of_different_layers_have_a_gate_between_them():
    layers = [Layer(0.0, 90.0), Layer(100.0, LATE)]
    found = starts_of(layers, [(30.0, 60.0), (150.0, 180.0)], [])
    assert found == Starts([30.0, 50.0], [], [], [])


def test_layers_without_a_copy_tell_nothing():
    layers = [Layer(0.0, 90.0), Layer(100.0, 190.0), Layer(200.0, LATE)]
    assert starts_of(layers, [(130.0, 160.0)], []).first == [30.0]
    assert starts_of([Layer(0.0, LATE)], [], []) == Starts([], [], [], [])


def test_after_a_layers_end_the_host_launches_what_follows_first():
    """Lanes end at 300, the way to the next gate has been launched at 350.

    Copies do not tell: the prefetch before ends at 340 or at 420, and the next one follows it.
    """
    layers = [Layer(0.0, 300.0, launched=350.0, routed=390.0, seen=395.0), Layer(395.0, LATE)]
    for ends in (340.0, 420.0):
        copies = [(190.0, ends), (max(ends, 350.0) + 30.0, 550.0)]
        found = starts_of(layers, copies, [(70.0, 190.0)])
        assert found.onwards == [50.0]
        assert found.after_layer(between_us=30.0) == [80.0]


@pytest.mark.parametrize(("routed", "unseen"), [(400.0, [75.0]), (440.0, [])])
def test_a_gate_that_came_meanwhile_is_seen_later(routed, unseen):
    """A prefetch begins at 380, the host sees the gate at 455: at once, if it came at 440."""
    layer = Layer(0.0, 300.0, routed=routed, seen=455.0)
    found = starts_of([layer], [(190.0, 310.0), (380.0, 500.0)], [(70.0, 190.0)])
    assert found.unseen == unseen


def test_one_that_had_arrived_did_not_keep_the_host_from_seeing_the_gate():
    """It ends at 440, the host decides on it until 480, and sees the gate that came at 445."""
    layer = Layer(0.0, 300.0, routed=445.0, seen=480.0)
    found = starts_of([layer], [(190.0, 310.0), (320.0, 440.0)], [(70.0, 190.0)])
    assert found.unseen == []


def test_the_last_layer_of_a_pass_has_no_gate_after_it():
    found = starts_of([Layer(0.0, 300.0)], [(190.0, 310.0), (380.0, 500.0)], [])
    assert found.unseen == []


def test_decisions_do_not_count(cpu):
    """Of a gate at 100 µs, as times of events go; by then decisions of its layer took 20 µs."""
    layer = LayerMarks(Mark(None), Mark(None), gate_us=100.0, paused_before_us=5.0, paused_us=25.0)
    layer.lanes = Mark(None, 160.0)
    copy = Copy(0, 1, 2, began=Mark(None, 175.0), ended=Mark(None, 300.0))
    marks = PassMarks(0.0, 5.0, layers=[layer], prefetches=[copy])
    times = StartTimes(Clock(cpu.device), skip=1)
    times.note(0, marks)
    assert times.found == Starts([], [], [], [])
    times.note(1, marks)
    assert times.found.onwards == []  # nothing follows
    assert times.found.first == [175.0 - (100.0 + 20.0)]


def test_a_gate_is_seen_with_the_decisions_before_it(cpu):
    """Decisions on arrivals took 30 µs between the layers, that at the second gate 10."""
    first = LayerMarks(Mark(None), Mark(None), lanes=Mark(None, 300.0))
    second = LayerMarks(
        Mark(None, 310.0), Mark(None, 400.0), gate_us=425.0,
        paused_before_us=0.0, paused_gate_us=30.0, paused_us=40.0, lanes=Mark(None, 900.0),
    )  # fmt: skip
    copies = [
        Copy(0, expert, expert, began=Mark(None, begin), ended=Mark(None, begin + 120.0))
        for expert, begin in ((1, 190.0), (2, 380.0))
    ]
    times = StartTimes(Clock(cpu.device), skip=0)
    times.note(0, PassMarks(0.0, 0.0, layers=[first, second], prefetches=copies))
    assert times.found.unseen == [455.0 - 380.0]


def test_what_follows_a_layer_is_launched_without_the_decisions_on_what_was_held(cpu):
    """Lanes end at 300; two decisions on held arrivals take 40 µs, launching 50."""
    first = LayerMarks(Mark(None), Mark(None), paused_us=20.0, lanes=Mark(None, 300.0))
    second = LayerMarks(
        Mark(None, 345.0), Mark(None, 400.0), launched_us=390.0, gate_us=425.0,
        paused_before_us=60.0, paused_gate_us=60.0, paused_us=70.0, lanes=Mark(None, 900.0),
    )  # fmt: skip
    times = StartTimes(Clock(cpu.device), skip=0)
    times.note(0, PassMarks(0.0, 0.0, layers=[first, second]))
    assert times.found.onwards == [50.0]
