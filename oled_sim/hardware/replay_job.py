"""Many points of a replay in one process: what runs, on how large a machine, in which order."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from oled_sim.contenders import require_causal
from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.cut import CutSource
from oled_sim.engine.rules import Rules, split_requests
from oled_sim.engine.runner import Contender
from oled_sim.engine.source import TraceSource
from oled_sim.errors import UsageError
from oled_sim.hardware.identity import hardware, software
from oled_sim.hardware.lossless import LosslessCheck
from oled_sim.hardware.machine import Sizes, build_machine
from oled_sim.hardware.machine_identity import machine_identity
from oled_sim.hardware.place import Place
from oled_sim.hardware.replay import PointRun, slots_for
from oled_sim.hardware.speed_check import SpeedCheck
from oled_sim.plugins import content_sha256
from oled_sim.trace import Trace
from oled_sim.trace.schema import Kind
from oled_sim.validation import measured
from oled_sim.validation.repetitions import joined

WARM_UP_PASSES = 2
"""Decode passes that are run and forgotten before a point is measured."""


@dataclass(frozen=True)
class Job:
    """What to replay.

    Attributes:
        traces: by the name they were opened by.
        contenders: policies with their caches.
        costs: what policies decide by; its profile and cost geometry are noted with every point.
        rules: scope, staging, confidence, cold, history and warm-up of the run.
        requests: how many requests of each trace are measured.
        passes: decode passes of each, None for all.
        layers: MoE layers of the traces that run, from the first on, None for all.
        repetitions: of every point.
        place, workers, seed: of the machine. checkpoint: weights, None for random ones.
        verify_every: events between checks against full residency; 0 never.
        patience_s: for how long repetitions may wait for a machine that is slower than profiled.
        command: as it was typed.
    """

    traces: dict[str, Trace]
    contenders: Sequence[Contender]
    costs: LaneCosts
    rules: Rules
    requests: int
    passes: int | None
    layers: int | None
    repetitions: int
    place: Place
    workers: int
    seed: int
    checkpoint: Path | None
    verify_every: int
    patience_s: float
    command: str


class Task(NamedTuple):
    """One point to measure. ``done``: its repetitions that have been measured before, or None."""

    source: TraceSource
    contender: Contender
    about: measured.About
    done: measured.Point | None = None

    @property
    def repetitions_done(self) -> int:
        """How many repetitions have been measured before."""
        return 0 if self.done is None else self.done.about.repetitions

    @property
    def cut(self) -> CutSource:
        """What is measured of the trace."""
        cuts = {c.request: c.decode_passes for c in self.about.measured}
        return CutSource(self.source, cuts, self.about.layers)


def tasks_of(job: Job) -> list[Task]:
    """Return all points of a job, trace by trace.

    Raises:
        UsageError: a trace has too few requests, or a policy cannot run on hardware.
    """
    machine = measured.Machine(
        identity=machine_identity(job.place.device),
        hardware=hardware(job.place.device, job.workers),
    )
    tasks = []
    for name, trace in job.traces.items():
        if job.layers is not None and job.layers > len(trace.geometry.layers):
            raise UsageError(
                f"{name} has {len(trace.geometry.layers)} MoE layers: --layers can be no more"
            )
        splits = split_requests(trace.requests, job.rules)
        if len(splits.counted) < job.requests:
            raise UsageError(
                f"{name} has {len(splits.counted)} requests left to measure, not {job.requests}:"
                " lower --requests, or take a trace with more"
            )
        for contender in job.contenders:
            policy = contender.policy
            require_causal({contender.spec: policy})
            about = measured.About(
                policy=measured.PolicyUsed(
                    spec=contender.spec,
                    label=contender.spec,
                    parameters=dict(policy.describe()),
                    file_sha256=content_sha256(type(policy)),
                ),
                cache=_slots(contender),
                rules=measured.Rules(
                    scope=job.rules.scope,
                    staging=job.rules.staging,
                    cold=job.rules.cold,
                    confidence=job.rules.confidence,
                    extrapolate=job.costs.extrapolate,
                ),
                geometry=job.costs.profile.geometry,
                trace=measured.TraceUsed(name=name, sha256=trace.manifest.checksum),
                history=splits.history if policy.learns else (),
                warmup=tuple(measured.Cut(request=r) for r in splits.warmup),
                measured=tuple(
                    measured.Cut(request=r, decode_passes=job.passes)
                    for r in splits.counted[: job.requests]
                ),
                layers=job.layers,
                repetitions=job.repetitions,
                profile=measured.ProfileUsed(
                    name=job.costs.profile.name,
                    sha256=measured.profile_sha256(job.costs.profile),
                ),
                machine=machine,
                software=software(),
                command=job.command,
                date=datetime.date.today(),
            )
            tasks.append(Task(TraceSource(trace), contender, about))
    return tasks


def _slots(contender: Contender) -> int:
    if contender.budget.cache is None:
        raise UsageError("replay takes caches in slots per layer: give --cache")
    return contender.budget.cache


def sizes_of(tasks: Iterable[Task]) -> tuple[Sizes, list[int]]:
    """Return how large a machine serves all tasks, and the contexts of their decode passes.

    Raises:
        UsageError: traces differ in their layers.
    """
    layers, blocks, contexts = set[int](), set[int](), set[int]()
    slots, tokens, most = 0, 0, 0
    for task in tasks:
        cut, geometry = task.cut, task.cut.geometry
        layers.add(len(geometry.layers))
        slots = max(slots, slots_for(task.about, len(geometry.layers), geometry.experts))
        for request in cut.requests:
            trace = cut.read(request)
            lengths = np.diff(trace.token_offset)
            tokens = max(tokens, int(lengths.max()))
            most = max(most, int((trace.context + lengths).max()))
            blocks |= set(lengths[trace.kind != Kind.PREFILL].tolist())
            contexts |= set(trace.context[trace.kind != Kind.PREFILL].tolist())
    if len(layers) > 1:
        raise UsageError(
            "the traces differ in MoE layers, and one replay runs one model: replay them one by one"
        )
    sizes = Sizes(layers.pop(), slots, max(blocks), tokens, most)
    return sizes, sorted(contexts)


def require_fit(job: Job, tasks: Sequence[Task]) -> None:
    """Refuse a cost geometry that cannot carry the routing of the traces.

    Raises:
        UsageError: fewer experts or layers, or another k.
    """
    cost = job.costs.geometry
    for task in tasks:
        routing = task.cut.geometry
        wanted = (len(routing.layers), routing.experts, routing.top_k)
        has = (cost.moe_layers, cost.experts, cost.top_k)
        if wanted[0] > has[0] or wanted[1:] != has[1:]:
            raise UsageError(
                f"{task.about.trace.name} routes over {wanted[0]} layers of {wanted[1]} experts,"
                f" top-{wanted[2]}, and {cost.name} has {has[0]} of {has[1]}, top-{has[2]}:"
                " give a --geometry that fits"
            )


def run_tasks(
    job: Job,
    tasks: Sequence[Task],
    *,
    on_load: Callable[[int, int], None] | None = None,
    on_pass: Callable[[], None] | None = None,
) -> Iterator[measured.Point]:
    """Build the machine, and measure the tasks in turn, one repetition of each at a time.

    What disturbs a machine that others share lasts for minutes: it then meets one repetition of
    many points, of which the median is taken, and not all repetitions of one.

    Args:
        job: the settings. tasks: of :func:`tasks_of`.
        on_load: called with layers of experts in memory, and all of them.
        on_pass: called after every pass on the hardware.

    Yields:
        After every repetition its point, with all that were measured so far.

    Raises:
        CapacityError: the machine is too small.
    """
    sizes, contexts = sizes_of(tasks)
    cost = job.costs.geometry
    machine = build_machine(
        job.place, cost, sizes, workers=job.workers, seed=job.seed,
        checkpoint=job.checkpoint, progress=on_load,
    )  # fmt: skip
    with machine, torch.inference_mode():
        machine.get_ready(contexts)
        check = None
        if job.verify_every:
            check = LosslessCheck(machine, cost, sizes.most_tokens, job.verify_every, job.seed)
        speed = SpeedCheck(machine, cost, sizes.block, job.patience_s)

        @cache
        def run_of(which: int) -> PointRun:
            task = tasks[which]
            return PointRun(
                machine, task.source, task.contender.policy, job.costs, task.about,
                check=check, speed=speed, report=on_pass, warm_up_passes=WARM_UP_PASSES,
            )  # fmt: skip

        points = {which: task.done for which, task in enumerate(tasks)}
        for repetition in range(job.repetitions):
            for which, task in enumerate(tasks):
                if task.repetitions_done <= repetition:
                    measured_now = run_of(which).repeat(repetition)
                    points[which] = point = joined(points[which], measured_now)
                    yield point
