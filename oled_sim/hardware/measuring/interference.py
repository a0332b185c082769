"""How much one lane slows down while others are busy.

The load of another lane is started before a measurement and must still be running after it; a
measurement that outlives its load does not count. Alone and beside a load, a lane is measured in
the same way, in turn, and in rounds between the tables: neighbours on a shared machine slow one
lane for seconds or minutes, and not the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from oled_sim.costs.profile import Beside, Interference, Quantiles
from oled_sim.errors import ProfileError
from oled_sim.hardware.measuring.experts import LaneJob, grouped_call
from oled_sim.hardware.measuring.links import expert_copies
from oled_sim.hardware.measuring.loads import JobLoad, Load, QueuedLoad, RepeatedLoad
from oled_sim.hardware.measuring.rig import Rig, tokens_on_cpu
from oled_sim.hardware.measuring.sweep import Sweep
from oled_sim.hardware.measuring.timing import Call, Clock, between_us, spread, spread_over

SETTLE_S = 0.0005
LONGER = (1.0, 1.4, 2.0, 2.8, 4.0)
"""How long loads are to last, in turn, over what should do, while they end too early. What is
queued ahead has a limit, so asking for ever more does not help where a neighbour kept the lane."""
ATTEMPTS = 4
"""How often a sample is taken at most for each one that is to count."""
RESIDENTS, COPIES, MISSES, TOKENS = 24, 8, 32, 2
"""Sizes of the samples, those of a decode event: experts, and tokens of each."""


@dataclass(frozen=True)
class Lane:
    """A lane's typical work: ``sample`` runs and times it once in µs; ``load`` keeps it busy."""

    sample: Callable[[], float]
    load: Load


class SlowDowns:
    """Measures the slow-down of each lane beside the others, at the sizes of a decode pass.

    Args:
        sweep: times what it takes. rig: the lanes.
        tries: samples of each lane beside each other one, and alone, in a round.
    """

    def __init__(self, sweep: Sweep, rig: Rig, tries: int) -> None:
        self._sweep, self._tries = sweep, tries
        with sweep.step("interference"):
            self._lanes = {
                "gpu": _gpu(sweep.clock, rig),
                "h2d": _h2d(sweep.clock, rig),
                "cpu": _cpu(sweep.clock, rig),
            }
        self._rounds: dict[tuple[str, str], list[list[float]]] = {}

    def run(self) -> None:
        """Measure all once."""
        with self._sweep.step("interference"):
            for i, name in enumerate(self._lanes):
                self._measure(name)
                self._sweep.on_progress("interference", i + 1, len(self._lanes))

    def _measure(self, name: str) -> None:
        for other, loads in loads_beside(self._lanes, name).items():
            found = _factors(self._sweep.clock, self._lanes[name], loads, self._tries)
            self._rounds.setdefault((name, other), []).append(found)

    def found(self) -> Interference:
        """Return what was found in all rounds.

        Raises:
            ProfileError: loads of a lane always ended first.
        """
        return Interference(**{name: self._beside(name) for name in self._lanes})

    def _beside(self, name: str) -> Beside:
        return Beside(
            **{
                other: slow_down(rounds, f"{name} beside {other}")
                for (lane, other), rounds in self._rounds.items()
                if lane == name
            }
        )


def loads_beside(lanes: dict[str, Lane], name: str) -> dict[str, list[Load]]:
    """Return the loads of each other lane, and of both."""
    others = {o: [lanes[o].load] for o in lanes if o != name}
    # Copies first: queueing them takes longest, and the GPU's queue is short.
    order = [o for o in ("h2d", "gpu", "cpu") if o != name]
    others["both"] = [lanes[o].load for o in order]
    return others


def _factors(clock: Clock, lane: Lane, loads: list[Load], tries: int) -> list[float]:
    """Return by how much a lane was slower beside loads than just before, without them."""
    alone_us = spread(_beside(clock, lane, [], 0.0, tries)).median
    return [us / alone_us for us in _beside(clock, lane, loads, alone_us, tries)]


def slow_down(rounds: list[list[float]], what: str) -> Quantiles:
    """Summarise the factors of several rounds; ``what`` slowed beside what, for messages.

    A round in which loads always ended first is left out.

    Raises:
        ProfileError: there is no other.
    """
    measured = [factors for factors in rounds if factors]
    if not measured:
        raise ProfileError(
            f"{what} could not be measured: what kept the others busy always ended first;"
            " measure again while nothing else runs on the machine"
        )
    return _at_least_one(spread_over(measured))


def _at_least_one(found: Quantiles) -> Quantiles:
    """Return slow-downs without what noise makes a gain."""
    names = ("median", "p10", "p90", "mean")
    return msgspec.structs.replace(found, **{n: max(1.0, getattr(found, n)) for n in names})


def _beside(
    clock: Clock, lane: Lane, loads: list[Load], alone_us: float, tries: int
) -> list[float]:
    """Time a lane under load in µs; a sample counts only if every load outlived it.

    There are none if a load always ended first.
    """
    samples: list[float] = []
    ended_first = 0
    for _ in range(ATTEMPTS * tries):
        if len(samples) == tries:
            break
        longer = LONGER[ended_first % len(LONGER)]
        for load in loads:
            load.start(longer * (3 * alone_us + 3_000))
        time.sleep(SETTLE_S)
        taken = lane.sample()
        if all(load.busy() for load in loads):
            samples.append(taken)
        else:
            ended_first += 1
        for load in loads:
            load.stop()
        clock.synchronize()
    return samples


def _gpu(clock: Clock, rig: Rig) -> Lane:
    """Sample: a decode event's residents. Load: all experts, so that launches stay ahead."""
    most = rig.axes.on_gpu.experts[-1]
    small, large = grouped_call(rig, min(RESIDENTS, most), TOKENS), grouped_call(rig, most, TOKENS)
    if not clock.cuda:
        return Lane(_host_sample(small), RepeatedLoad(large))
    large()  # what is compiled at the first call is no part of how long one takes
    once_us = spread(clock.device_times(large)).median
    stream = torch.cuda.current_stream(clock.device)
    return Lane(_event_sample(clock, small, stream), QueuedLoad(large, once_us, stream))


def _h2d(clock: Clock, rig: Rig) -> Lane:
    """Sample: eight experts behind a first one that hides the launch. Load: one by one."""
    copies, size = expert_copies(rig, clock), rig.cost.expert_bytes

    def one() -> None:
        copies.one(size)

    def eight() -> None:
        for _ in range(COPIES):
            copies.one(size)

    if copies.stream is None:
        return Lane(_host_sample(eight), RepeatedLoad(one))
    load = QueuedLoad(one, spread(copies.times(size)).median, copies.stream)
    return Lane(_event_sample(clock, eight, copies.stream, lead=one), load)


def _cpu(clock: Clock, rig: Rig) -> Lane:
    """Sample: a decode event's misses. Load: one job, of more experts where it must last."""
    most = rig.axes.on_cpu.experts[-1]
    usual = min(MISSES, most)
    job = LaneJob(rig, usual, TOKENS)

    def sample() -> float:
        job()
        return rig.lane.times.compute_us

    if not clock.cuda:
        return Lane(sample, RepeatedLoad(job))
    once_us = spread(clock.repeat(sample)).median

    def lasting(duration_us: float) -> LaneJob:
        wanted = math.ceil(usual * duration_us / once_us)
        experts = max(usual, min(wanted, most))
        per_expert = max(TOKENS, TOKENS * wanted // experts)
        fits = rig.cost.top_k * tokens_on_cpu(rig.axes, rig.cost) // experts
        return LaneJob(rig, experts, min(per_expert, fits))

    return Lane(sample, JobLoad(rig.lane, lasting))


def _event_sample(
    clock: Clock, call: Call, stream: torch.cuda.Stream, lead: Call | None = None
) -> Callable[[], float]:
    """Return a sampler of a call's time on a CUDA stream, after an untimed ``lead``."""

    def sample() -> float:
        with torch.cuda.stream(stream):
            if lead is not None:
                lead()
            first = clock.mark(stream)
            call()
            last = clock.mark(stream)
        stream.synchronize()
        return between_us(first, last)

    return sample


def _host_sample(call: Call) -> Callable[[], float]:
    """Return a sampler of a call's time on the host's clock, for calls that wait."""

    def sample() -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    return sample
