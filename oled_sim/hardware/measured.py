"""From marks to the engine's tables: when every event of a pass began and ended on hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from oled_sim.engine.state import CPU, GPU, H2D, T_BUSY, T_END, T_GATE, T_LANES, T_START, Course
from oled_sim.hardware.clock import Clock, Mark
from oled_sim.hardware.copy_lane import Copy
from oled_sim.hardware.layer_run import LayerMarks

Span = tuple[float, float]
"""Begin and end, µs."""

T_CRITICAL = T_BUSY + 3


@dataclass
class PassMarks:
    """Marks of a pass. Times are µs of the run, in which decisions at gates take none.

    ``begin_us``, ``end_us``: from before the embedding until the sampled tokens are on the host.
    ``paused_us``: how long decisions had kept the run waiting before the pass.
    ``decide_us``: time that the pass's decisions took; ``kept_waiting_us``: by how much they kept
    the lanes waiting. ``prefetches``: copies that ended in it.
    """

    begin_us: float
    paused_us: float
    end_us: float = 0.0
    decide_us: float = 0.0
    kept_waiting_us: float = 0.0
    layers: list[LayerMarks] = field(default_factory=list)
    head: tuple[Mark, Mark] | None = None
    prefetches: Sequence[Copy] = ()


def note_times(clock: Clock, marks: PassMarks, course: Course, p: int) -> None:
    """Fill the times of pass ``p`` and its events.

    The clock of the GPU and the host's meet at the start of the pass. What runs before an event's
    end is not earlier than the event before, however the clocks round.
    """
    now, first = marks.begin_us, int(course.pass_event[p])
    course.pass_times[p, 0] = marks.begin_us
    totals = np.zeros(6)
    for v, layer in enumerate(marks.layers, first):
        row = course.times[v]
        now = _note_event(clock, layer, row, now)
        totals += row[T_BUSY:]
    end = max(marks.end_us, now)
    rest = end - marks.begin_us - totals[3:].sum()  # embedding, dense layers, LM head
    totals[GPU] = min(totals[GPU] + rest, end - marks.begin_us)
    totals[3 + GPU] += rest
    totals[H2D] += _total(_span(clock, c, marks.paused_us) for c in marks.prefetches)
    course.pass_times[p, 1] = end
    course.pass_times[p, 2:5] = np.minimum(totals[:3], end - marks.begin_us)
    course.pass_times[p, 5:] = totals[3:]


def _note_event(clock: Clock, layer: LayerMarks, row: np.ndarray, now: float) -> float:
    """Fill the times of one event that begins no earlier than ``now``; return its end."""
    assert layer.lanes is not None and layer.end is not None
    before, after = layer.paused_before_us, layer.paused_us
    start = max(now, clock.time_us(layer.start) - before)
    gate = max(start, layer.gate_us - before)
    kernels = [(clock.time_us(a) - after, clock.time_us(b) - after) for a, b in layer.kernels]
    copies = [_span(clock, copy, after) for copy in layer.copies]
    cpu = [] if layer.cpu_us is None else [(layer.cpu_us[0] - after, layer.cpu_us[1] - after)]
    lanes = max([gate, clock.time_us(layer.lanes) - after, *(e for _, e in (*kernels, *cpu))])
    end = max(lanes, clock.time_us(layer.end) - layer.paused_end_us)
    row[T_START], row[T_GATE], row[T_LANES], row[T_END] = start, gate, lanes, end
    row[T_BUSY + GPU] = (gate - start) + _total(kernels) + (end - lanes)
    row[T_BUSY + H2D] = _total(copies)
    row[T_BUSY + CPU] = _total(cpu)
    row[T_CRITICAL:] = _critical(start, gate, lanes, end, copies, cpu, kernels)
    return end


def _critical(
    start: float, gate: float, lanes: float, end: float,
    copies: Sequence[Span], cpu: Sequence[Span], kernels: Sequence[Span],
) -> tuple[float, float, float]:  # fmt: skip
    """Return how much of the event's length each lane decided: GPU, H2D, CPU, µs.

    The CPU's work, if its sums came last; else the copies', if a kernel had to wait for the last
    arrival; everything else, waiting for the host included, is the GPU's.
    """
    waited = 0.0
    last_cpu = max((e for _, e in cpu), default=-np.inf)
    last_kernel = max((e for _, e in kernels), default=-np.inf)
    last_copy = max((e for _, e in copies), default=-np.inf)
    if cpu and last_cpu >= last_kernel:
        waited = min(_total(cpu), lanes - gate)
        return end - start - waited, 0.0, waited
    if copies and kernels and max(b for b, _ in kernels) >= last_copy:
        waited = min(_total(copies), max(0.0, last_copy - gate))
    return end - start - waited, waited, 0.0


def _span(clock: Clock, copy: Copy, paused_us: float) -> Span:
    assert copy.began is not None and copy.ended is not None
    return clock.time_us(copy.began) - paused_us, clock.time_us(copy.ended) - paused_us


def _total(spans: Iterable[Span]) -> float:
    """Return how long at least one of several spans lasted, µs; they come in order of ends."""
    total, last = 0.0, -np.inf
    for begin, end in spans:
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total
