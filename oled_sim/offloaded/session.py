"""Requests that generate one after the other, with their experts offloaded under one policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine import laws
from oled_sim.engine.batch import make_batch
from oled_sim.engine.metrics import GroupFigures, Ledger
from oled_sim.engine.rules import Group, split_requests
from oled_sim.engine.runner import Result, result_of
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.source import MemoryTrace
from oled_sim.engine.state import N_POOL_BYTES
from oled_sim.hardware.host_experts import HostExperts
from oled_sim.hardware.slot_map import SlotMap
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import Generation, PassRecord, generate
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.offloaded.attached import Attached
from oled_sim.offloaded.conducted import Conducted
from oled_sim.offloaded.layers import OffloadedLayers
from oled_sim.offloaded.loading import machine_for
from oled_sim.offloaded.plan import Plan
from oled_sim.offloaded.recording import Recording
from oled_sim.trace.schema import RequestTrace


@dataclass(frozen=True)
class LiveRequest:
    """A request that has been generated.

    Attributes:
        recording: what was done, predicted and routed. trace: the same as a trace.
        record: the engine's accounts, with times of the hardware.
        decide_us: float64 [I], time of each pass's decisions.
    """

    recording: Recording
    trace: RequestTrace
    record: GroupRecord
    decide_us: NDArray[np.float64]


class Session:
    """Runs requests of a plan on one machine; caches and policy live on from one to the next.

    Use as a context manager: threads end and page-locked memory is given back on exit.

    Args:
        model: its routed experts are not used, and may be absent.
        experts: those, in host memory.
        plan: what to run.

    Raises:
        CapacityError: the device has not enough memory.
        PolicyError: the policy breaks the contract.
    """

    def __init__(self, model: LLaDA2MoeModelLM, experts: HostExperts, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self._geometry = model.config.routing_geometry
        self.splits = split_requests(range(len(plan.prompts)), plan.rules)
        contender = plan.contender
        self.simulation = Simulation(
            contender.policy, self._geometry, plan.costs, contender.budget, plan.rules,
            name=contender.spec,
        )  # fmt: skip
        slots = self.simulation.slots + plan.rules.staging
        self.machine = machine_for(
            experts, slots, plan.most_tokens, model.config.routed_scaling_factor,
            workers=plan.workers,
        )  # fmt: skip
        try:
            layers, count = len(self._geometry.layers), self._geometry.experts
            places = SlotMap(layers, count, slots)
            self._layers = OffloadedLayers(
                self.machine, places, self.simulation, plan.most_tokens, plan.signals
            )
        except BaseException:
            self._stop()
            raise
        # Costs that no policy changes are not asked for here, so no pass is too long for them.
        self._costs = replace(plan.costs, extrapolate=True)
        self._source = MemoryTrace(self._geometry, [])
        self._ledger = Ledger(self._source, plan.rules.scope)
        self._figures: list[GroupFigures] = []
        self._resident_bytes = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._layers.close()
        self._stop()

    def _stop(self) -> None:
        """End the lanes; experts in host memory are the caller's."""
        self.machine.cpu.close()
        self.machine.copies.close()

    @property
    def copies(self) -> int:
        """Experts copied so far."""
        return self._layers.copies

    def warm_up(self) -> None:
        """Decode a block and forget it, so that kernels are loaded when time counts."""
        before = self.simulation.snapshot()
        length = self.plan.settings.block_length
        settings = replace(self.plan.settings, max_new_tokens=length)
        self._generate(Group("warmup", (0,)), settings, None, lambda record: None)
        self.simulation.restore(before)
        self._layers.start_over()

    def run(
        self,
        request: int,
        *,
        forced: Recording | None = None,
        on_pass: Callable[[PassRecord], None] = lambda record: None,
    ) -> LiveRequest:
        """Generate one request.

        Args:
            request: its number; requests run in order.
            forced: a run whose routes and acceptances are taken over.
            on_pass: called after every pass, off the clock.

        Raises:
            UsageError: see :func:`oled_sim.model.generate.generate`.
            PolicyError: the policy breaks the contract.
        """
        split = "warmup" if request in self.splits.warmup else "counted"
        group = Group(split, (request,))
        live = self._generate(group, self.plan.settings, forced, on_pass)
        self._count(live.record, live.recording.generation)
        return live

    def _generate(
        self,
        group: Group,
        settings: DecodeSettings,
        forced: Recording | None,
        on_pass: Callable[[PassRecord], None],
    ) -> LiveRequest:
        (request,) = group.requests
        prompt = self.plan.prompts[request]
        run = Conducted(self.model, self._layers, self.plan, request, settings, forced)
        unfolding = run.unfolding
        course = self.simulation.open_group(group, unfolding.course)
        self._layers.enter(unfolding, course)

        def after(record: PassRecord) -> None:
            run.after(record)
            on_pass(record)

        with Attached(self.model, self._layers, run if forced else None):
            (done,) = generate(
                self.model, [prompt], settings, after, streams=[request], conductor=run
            )
        trace = run.trace.build()
        batch = make_batch([trace], self._geometry, self._costs, self.plan.rules.confidence)
        record = self.simulation.close_group(group, batch, unfolding.measured(batch))
        recording = Recording(request, run.passes, done)
        return LiveRequest(recording, trace, record, np.array(self._layers.decide_us))

    def _count(self, record: GroupRecord, done: Generation) -> None:
        laws.check_cheap(record, self.simulation.state, self.plan.rules)
        laws.check_bytes(record, self.simulation.expert_bytes)
        if record.group.split == "counted":
            self._source.outputs[record.group.requests[0]] = len(done.tokens)
            self._figures.append(self._ledger.add(record, self.simulation.slots))
            most = int(record.course.counts[:, N_POOL_BYTES].max(initial=0))
            self._resident_bytes = max(self._resident_bytes, most)

    def result(self) -> Result:
        """Return the figures of the counted requests so far, with times of the hardware."""
        done = tuple(r.request for g in self._figures for r in g.requests)
        splits = replace(self.splits, counted=done)
        return result_of(
            self.plan.contender, self.simulation, splits, self._figures, self._resident_bytes
        )
