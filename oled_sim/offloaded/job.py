"""A whole run: the resident model first, then the same prompts with experts offloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from oled_sim.collection import describe_run
from oled_sim.engine.runner import Result
from oled_sim.engine.source import MemoryTrace, Source, TraceSource
from oled_sim.errors import OledSimError
from oled_sim.hardware.host_experts import HostExperts
from oled_sim.hardware.place import Place
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import check_prompts
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.loading import checkpoint_path, load_model
from oled_sim.offloaded.agreement import Agreement, simulate_again
from oled_sim.offloaded.divergence import Divergence, first_divergence
from oled_sim.offloaded.loading import load_without_experts, release_experts
from oled_sim.offloaded.plan import Plan
from oled_sim.offloaded.recording import Recording, record_resident
from oled_sim.offloaded.session import LiveRequest, Session
from oled_sim.prompts import Prompt
from oled_sim.trace import open_trace
from oled_sim.trace.manifest import Manifest
from oled_sim.trace.schema import Kind
from oled_sim.trace.writer import TraceWriter

Progress = Callable[[str], None]
"""Called after every pass, with what is under way."""


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        model: as after ``--model``. place: where it runs.
        plan: policy, costs, rules, decoding, prompts as token ids.
        prompts: where those came from. source: what to call that.
        compare: run the resident model first, and compare.
        check_forced: run once more with routes and acceptances of the resident run.
        record: folder of the trace, or None. overwrite: replace one that is there.
        stands_for: published model that the trace stands for; by default by size.
        profile: as after ``--profile``, to say how the trace is simulated; None by default.
    """

    model: str
    place: Place
    plan: Plan
    prompts: Sequence[Prompt]
    source: str
    compare: bool = True
    check_forced: bool = False
    record: Path | None = None
    overwrite: bool = False
    stands_for: str | None = None
    profile: str | None = None

    @property
    def needs_resident(self) -> bool:
        """Whether the model has to run with all its experts on the device, too."""
        return self.compare or self.check_forced


@dataclass
class Outcome:
    """What a job came to.

    Attributes:
        result: figures of the counted requests, times of this machine without decisions.
        done: every request. divergences: the first of each that left the resident run's path.
        tokens_differing: output tokens of each request that differ from the resident run's.
        compared: whether there was a resident run.
        forced: per request, whether the forced run's tokens were those of the resident run.
        forced_divergences: the first of each in which they were not.
        agreement: the trace of the run, simulated; None if that failed.
        no_prediction: why it failed.
        expert_bytes: of one expert of this model. copied_bytes: of all copies.
    """

    result: Result
    done: list[LiveRequest]
    agreement: Agreement | None
    expert_bytes: int
    copied_bytes: int
    no_prediction: OledSimError | None = None
    compared: bool = False
    divergences: list[Divergence] = field(default_factory=list)
    tokens_differing: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    forced_divergences: list[Divergence] = field(default_factory=list)

    @property
    def decide_us(self) -> float:
        """Mean time of the decisions of a decode pass of the counted requests, µs."""
        times = [
            live.decide_us[live.trace.kind != Kind.PREFILL]
            for live in self.done
            if live.record.group.split == "counted"
        ]
        return float(np.concatenate(times).mean())


def run_job(job: Job, on_pass: Progress = lambda phase: None) -> Outcome:
    """Run a job.

    A simulation that fails after the run is part of the outcome: what was measured is not lost.

    Raises:
        ProfileError: the profile does not cover what prompts and new tokens may lead to.
        UsageError: a prompt does not fit the model.
        CapacityError: the device or the host has not enough memory.
        PolicyError: the policy breaks the contract.
        CheckpointError, TraceError: files are damaged.
    """
    plan = job.plan
    plan.require_costs()
    if job.needs_resident:
        model = load_model(job.model, job.place.device, job.place.dtype)
    else:
        model = load_without_experts(job.model, job.place)
    check_prompts(plan.prompts, plan.settings, model.config)
    resident = _run_resident(job, model, on_pass) if job.needs_resident else []
    source = model if job.needs_resident else checkpoint_path(job.model)
    with HostExperts.from_model(source, job.place) as experts:
        release_experts(model)
        done, session = _run_live(job, model, experts, on_pass)
        forced = _run_forced(job, model, experts, resident, on_pass) if job.check_forced else ()
        size = experts.cost.expert_bytes
    outcome = Outcome(session.result(), done, None, size, session.copies * size)
    try:
        source = _source(job, model, done)
        outcome.agreement = simulate_again(source, done, plan.contender, plan.costs, plan.rules)
    except OledSimError as error:
        outcome.no_prediction = error
    layers, settings = model.config.moe_layers, plan.settings
    if job.compare:
        outcome.compared = True
        outcome.divergences = _divergences(resident, done, layers, settings)
        outcome.tokens_differing = _differing(resident, done)
    outcome.forced = [n == 0 for n in _differing(resident, forced)]
    outcome.forced_divergences = _divergences(resident, forced, layers, settings)
    return outcome


def _run_resident(job: Job, model: LLaDA2MoeModelLM, on_pass: Progress) -> list[Recording]:
    plan = job.plan
    return [
        record_resident(model, n, prompt, plan.settings, lambda _: on_pass("resident"))
        for n, prompt in enumerate(plan.prompts)
    ]


def _run_live(
    job: Job, model: LLaDA2MoeModelLM, experts: HostExperts, on_pass: Progress
) -> tuple[list[LiveRequest], Session]:
    """Generate, and write each request once it is finished."""
    plan, done = job.plan, list[LiveRequest]()
    session = Session(model, experts, plan)
    writer = None
    if job.record is not None:
        writer = TraceWriter(job.record, _manifest(job, model), overwrite=job.overwrite)
    with session, _maybe(writer):
        session.warm_up()
        for n in range(len(plan.prompts)):
            live = session.run(n, on_pass=lambda _: on_pass("offloaded"))
            done.append(live)
            if writer is not None:
                _write(writer, live, job.prompts[n], len(plan.prompts[n]))
    return done, session


def _maybe(writer: TraceWriter | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if writer is None else writer


def _run_forced(
    job: Job,
    model: LLaDA2MoeModelLM,
    experts: HostExperts,
    resident: Sequence[Recording],
    on_pass: Progress,
) -> list[LiveRequest]:
    """Follow the resident run's routes and acceptances."""
    with Session(model, experts, job.plan) as session:
        return [
            session.run(n, forced=one, on_pass=lambda _: on_pass("forced"))
            for n, one in enumerate(resident)
        ]


def _manifest(job: Job, model: LLaDA2MoeModelLM) -> Manifest:
    return describe_run(
        Path(job.model).name, model, job.plan.settings, collector="generate",
        weights=checkpoint_path(job.model), source=job.source, stands_for=job.stands_for,
        signals=job.plan.signals,
    )  # fmt: skip


def _write(writer: TraceWriter, live: LiveRequest, prompt: Prompt, prompt_tokens: int) -> None:
    done = live.recording.generation
    writer.write_request(
        live.trace,
        prompt_tokens=prompt_tokens,
        output_tokens=len(done.tokens),
        finish_reason="eos" if done.ended else "length",
        prompt_row=prompt.row,
        prompt_sha256=prompt.sha256,
    )


def _source(job: Job, model: LLaDA2MoeModelLM, done: Sequence[LiveRequest]) -> Source:
    """Return the run as a trace: as it was read back from disk, if it was recorded."""
    if job.record is not None:
        return TraceSource(open_trace(job.record))
    return MemoryTrace(
        model.config.routing_geometry,
        [live.trace for live in done],
        signals=job.plan.signals,
        outputs={n: len(live.recording.generation.tokens) for n, live in enumerate(done)},
    )


def _divergences(
    resident: Sequence[Recording],
    done: Sequence[LiveRequest],
    layers: Sequence[int],
    settings: DecodeSettings,
) -> list[Divergence]:
    """Return the first divergence of every request that has one."""
    found = (
        first_divergence(mine, live.recording, layers, settings)
        for mine, live in zip(resident, done, strict=False)
    )
    return [one for one in found if one is not None]


def _differing(resident: Sequence[Recording], done: Sequence[LiveRequest]) -> list[int]:
    """Return how many output tokens of each request differ, missing ones included."""
    counts = []
    for mine, live in zip(resident, done, strict=False):
        a, b = mine.generation.tokens, live.recording.generation.tokens
        same = sum(x == y for x, y in zip(a, b, strict=False))
        counts.append(max(len(a), len(b)) - same)
    return counts
