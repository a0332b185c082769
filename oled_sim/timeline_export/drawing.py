"""What of a run becomes which track, slice and counter.

Every run (one policy with one budget) is a process. Its threads, from the top: what is being done
(requests, in them passes, in them layers), and the three lanes. Counters follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.state import (
    DEMAND,
    EVENT_COUNTS,
    EVENT_TIMES,
    GAUGES,
    JOBS,
    LATE,
    PASS_COUNTS,
    PASS_TIMES,
    PREFETCH,
    T_END,
    T_START,
)
from oled_sim.timeline_export.packets import Arguments, Encoder, Process
from oled_sim.trace.schema import Kind

WORK_TRACK = "requests, passes, layers"
LANE_TRACKS = ("GPU", "H2D copy engine", "CPU workers")

GAUGE_TRACKS = {
    "staging_used": ("staging slots in use", "slots"),
    "demand_queued": ("demand transfers waiting", "transfers"),
    "prefetch_queued": ("prefetches waiting", "transfers"),
}
"""Name and unit of the counter of each entry of ``GAUGES``."""

JOB_NAMES = {"start": "embedding + dense layers", "dense": "attention + gate",
             "shared": "shared expert", "head": "LM head + sampling",
             "late": "late prefetch"}  # fmt: skip
"""Jobs that are shown under another name than their kind."""

COPIES = (DEMAND, LATE, PREFETCH)


class Tracks(NamedTuple):
    """Numbers of the tracks of a run. ``layers``: residents of each layer."""

    work: int
    lanes: tuple[int, ...]
    gauges: tuple[int, ...]
    residents: int
    layers: tuple[int, ...]


class RunDrawing:
    """Draws one run, group by group, from time 0 on.

    Args:
        encoder: where packets go.
        name: what the process is called.
        about: what every request's slice says of the run.
        layers: the model's own indices of the MoE layers.
        expert_bytes: int64 [L], bytes of one expert per layer.
    """

    def __init__(
        self,
        encoder: Encoder,
        name: str,
        about: Arguments,
        layers: tuple[int, ...],
        expert_bytes: NDArray[np.int64],
    ) -> None:
        self._encoder = encoder
        self._layers = layers
        self._expert_bytes = expert_bytes
        self._about = about
        self._tracks = self._make_tracks(encoder.process(name))
        self._clock: Clock | None = None
        self._last_sample: dict[int, tuple[int, int]] = {}

    def draw(self, record: GroupRecord) -> None:
        """Draw a group of requests; the run must have kept its log."""
        begin_us, end_us = record.course.pass_times[0, 0], record.course.pass_times[-1, 1]
        self._clock = Clock(begin_us, 0) if self._clock is None else self._clock.until(begin_us)
        self._draw_work(record, self._clock)
        self._draw_lanes(record, self._clock)
        self._draw_counters(record, self._clock)
        self._clock.last_us = end_us

    def _make_tracks(self, process: Process) -> Tracks:
        encoder = self._encoder
        work = encoder.thread(process, WORK_TRACK, 1)
        lanes = tuple(encoder.thread(process, name, 2 + i) for i, name in enumerate(LANE_TRACKS))
        gauges = tuple(encoder.counter(process.track, *GAUGE_TRACKS[name]) for name in GAUGES)
        residents = encoder.counter(process.track, "residents", "experts")
        by_layer = encoder.group(process, "residents by layer")
        layers = tuple(
            encoder.counter(by_layer, f"residents of layer {layer}", "experts", i)
            for i, layer in enumerate(self._layers)
        )
        return Tracks(work, lanes, gauges, residents, layers)

    def _draw_work(self, record: GroupRecord, clock: Clock) -> None:
        course, batch = record.course, record.batch
        track, encoder = self._tracks.work, self._encoder
        begin, end = (clock.ns(course.pass_times[:, i]) for i in (0, 1))
        name, requests = _requests(record.group.requests)
        encoder.begin(track, begin[0], name, "request", {**requests, **self._about})
        for p in range(batch.passes):
            kind = Kind(batch.kind[p]).name.lower()
            name = f"{kind} {batch.start + p}"
            encoder.begin(track, begin[p], name, kind, _pass_arguments(record, p))
            self._draw_layers(record, p, clock)
            encoder.end(track, end[p])
        encoder.end(track, end[-1])

    def _draw_layers(self, record: GroupRecord, p: int, clock: Clock) -> None:
        course = record.course
        here = slice(course.pass_event[p], course.pass_event[p + 1])
        begin, end = (clock.ns(course.times[here, i]) for i in (T_START, T_END))
        counts = course.counts[here].tolist()
        lane_times = _whole_ns(course.times[here, T_END + 1 :]).tolist()
        for i, layer in enumerate(course.event_layer[here].tolist()):
            name = f"layer {self._layers[layer]}"
            arguments = {"pass": record.batch.start + p, "layer": self._layers[layer]}
            arguments |= zip(EVENT_COUNTS, counts[i], strict=True)
            arguments |= zip(EVENT_TIMES[T_END + 1 :], lane_times[i], strict=True)
            self._encoder.begin(self._tracks.work, begin[i], name, "layer", arguments)
            self._encoder.end(self._tracks.work, end[i])

    def _draw_lanes(self, record: GroupRecord, clock: Clock) -> None:
        assert record.log is not None, "the run kept no log"
        begin, end = clock.ns(record.log[:, 6]), clock.ns(record.log[:, 7])
        rows = record.log.astype(np.int64)[:, [0, 1, 2, 3, 4, 5, 8]].tolist()
        for i, (lane, kind, layer, expert, experts, tokens, p) in enumerate(rows):
            track = self._tracks.lanes[lane]
            p += record.batch.start
            arguments = self._job_arguments(layer, expert, experts, tokens, p, kind in COPIES)
            name = self._job_name(kind, layer, expert)
            self._encoder.begin(track, begin[i], name, JOBS[kind], arguments)
            self._encoder.end(track, end[i])

    def _job_name(self, kind: int, layer: int, expert: int) -> str:
        """Return what a job is called.

        Of a transfer, the expert comes first: with a whole layer in view, the interface has room
        for about four letters. A letter leads, as a number cut short looks like another number.
        Numbers do not count when the interface picks a colour.
        """
        name = JOB_NAMES.get(JOBS[kind], JOBS[kind])
        if kind == PREFETCH:
            return f"E{expert} {name} for layer {self._layers[layer]}"
        return f"E{expert} {name}" if kind in COPIES else name

    def _job_arguments(
        self, layer: int, expert: int, experts: int, tokens: int, p: int, copied: bool
    ) -> Arguments:
        """Return what is known of a job; what does not apply to its kind is left out."""
        found = {"pass": p}
        if layer >= 0:
            found["layer"] = self._layers[layer]
        if expert >= 0:
            found["expert"] = expert
        elif experts:
            found["experts"] = experts
        if tokens:
            found["tokens"] = tokens
        if copied:
            found["bytes"] = int(self._expert_bytes[layer])
        return found

    def _draw_counters(self, record: GroupRecord, clock: Clock) -> None:
        assert record.log is not None and record.gauges is not None, "the run kept no log"
        # Row i of the gauges held until job i ended; the last row holds from then on.
        begin_us = record.course.pass_times[:1, 0]
        time = clock.ns(np.concatenate([begin_us, record.log[:, 7]]))
        residents = record.gauges[:, len(GAUGES) :]
        columns = zip(
            (*self._tracks.gauges, self._tracks.residents, *self._tracks.layers),
            (*record.gauges[:, : len(GAUGES)].T, residents.sum(axis=1), *residents.T),
            strict=True,
        )
        for track, values in columns:
            for sample in changes(time, values):
                if sample != self._last_sample.get(track):  # groups share a moment
                    self._encoder.count(track, *sample)
                self._last_sample[track] = sample


class Clock:
    """Turns the run's clock into nanoseconds since the first drawn moment.

    Rounding keeps the order of any two moments, so slices that do not overlap never will.
    ``--cold`` sets the run's clock back; drawing then goes on where it was.
    """

    def __init__(self, begin_us: float, begin_ns: int) -> None:
        self._begin_us, self._begin_ns = begin_us, begin_ns
        self.last_us = begin_us

    def until(self, begin_us: float) -> Clock:
        """Return the clock of a group that begins at ``begin_us``."""
        if begin_us >= self.last_us:
            return self
        return Clock(begin_us, self.ns(np.array([self.last_us]))[0])

    def ns(self, time_us: NDArray[np.float64]) -> list[int]:
        """Return integer nanoseconds; what began before the first drawn moment begins with it."""
        since_us = np.maximum(time_us - self._begin_us, 0.0)
        return (np.rint(since_us * 1000.0).astype(np.int64) + self._begin_ns).tolist()


def changes(time_ns: list[int], values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (time, value) where a counter changes: its last value of each moment.

    The first moment and the last one are always among them.

    Args:
        time_ns: [n], never falling.
        values: int64 [n], what holds from each time on.
    """
    time = np.array(time_ns)
    last_of_moment = np.append(np.diff(time) != 0, True)
    time, values = time[last_of_moment], values[last_of_moment]
    kept = np.append(True, np.diff(values) != 0)
    kept[-1] = True
    yield from zip(time[kept].tolist(), values[kept].tolist(), strict=True)


def _whole_ns(times_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return times, still in µs, rounded as those of the slices are."""
    return np.round(times_us, 3)


def _requests(requests: tuple[int, ...]) -> tuple[str, Arguments]:
    """Return what the slice of a group is called, and an argument that lists its requests."""
    if len(requests) == 1:
        return f"request {requests[0]}", {"request": requests[0]}
    listed = ", ".join(map(str, requests))
    return f"requests {requests[0]}–{requests[-1]}", {"requests": listed}


def _pass_arguments(record: GroupRecord, p: int) -> Arguments:
    course, batch = record.course, record.batch
    present = [(member.trace, i) for member, i in batch.present[p]]
    found: dict[str, int | float | str] = {
        "pass": batch.start + p,
        "kind": Kind(batch.kind[p]).name.lower(),
        "requests": ", ".join(str(t.request) for t, _ in present),
        "block": int(batch.block[p]),
        "tokens": sum(t.tokens(i) for t, i in present),
        "kept_tokens": int(batch.context_tokens[p]),
        "accepted": sum(int(t.accepted_count[i]) for t, i in present),
    }
    found |= zip(PASS_COUNTS, course.pass_counts[p].tolist(), strict=True)
    found |= zip(PASS_TIMES[2:], _whole_ns(course.pass_times[p, 2:]).tolist(), strict=True)
    return found
