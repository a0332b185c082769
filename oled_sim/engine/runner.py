"""Whole runs: several policies and budgets over one trace, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine import laws
from oled_sim.engine.batch import Batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.feeding import feed
from oled_sim.engine.future import Beyond, Horizon
from oled_sim.engine.metrics import GroupFigures, Ledger, RequestFigures, Summary, summarize
from oled_sim.engine.rules import Group, Rules, Splits, split_requests
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.source import Source
from oled_sim.engine.state import N_POOL_BYTES
from oled_sim.geometry import CostGeometry
from oled_sim.policy import Policy


@dataclass(frozen=True)
class Contender:
    """One policy with one budget.

    ``spec``: what to call the policy in results. ``link_gb_s``: bandwidth of the host-to-GPU link,
    10⁹ bytes per second, if not the profile's.
    """

    spec: str
    policy: Policy
    budget: Budget
    link_gb_s: float | None = None


@dataclass(frozen=True)
class Result:
    """What one policy with one budget came to.

    Attributes:
        spec: the policy's name. parameters: all of them, as used.
        budget: as asked for. slots: in all layers together.
        link_gb_s: bandwidth of the link, 10⁹ bytes per second.
        causal: whether the policy saw only what is known at the time.
        clairvoyant: whether it declares ``future``.
        initial_residents: experts loaded free before the first request.
        splits: requests by what they were for.
        requests: figures of the counted ones. summary: means and totals.
        unused_prefetches: prefetched experts still resident and unused at the end.
        notes: what the policy has to say about its run, a sentence each.
    """

    spec: str
    parameters: dict[str, Any]
    budget: Budget
    slots: int
    link_gb_s: float
    rules: Rules
    causal: bool
    clairvoyant: bool
    initial_residents: int
    splits: Splits
    requests: tuple[RequestFigures, ...]
    summary: Summary
    unused_prefetches: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without what is the same for all results of a run."""
        found = asdict(self)
        del found["rules"], found["splits"]
        found["batch"] = self.rules.batch
        found["cache"] = self.budget.cache
        found["cache_bytes"] = self.budget.size_bytes
        del found["budget"]
        return found


Observer = Callable[[Contender, GroupRecord], None]
"""Called with what was measured in every group, counted or not."""


@dataclass
class _Runner:
    """One contender on its way through the trace."""

    contender: Contender
    simulation: Simulation
    ledger: Ledger
    figures: list[GroupFigures] = field(default_factory=list)
    in_history: bool = False
    resident_bytes: int = 0
    open: GroupRecord | None = None

    @property
    def learns(self) -> bool:
        return self.simulation.policy.learns

    def run(self, group: Group, batch: Batch, beyond: Beyond) -> list[GroupRecord]:
        """Run a group; return the records that are complete now."""
        simulation = self.simulation
        if self.in_history and group.split != "history":
            simulation.end_history()
        self.in_history = group.split == "history"
        record = simulation.run_group(group, batch, beyond)
        # Something of a stretch becomes known only in the next one.
        complete = [r for r in (self.open,) if r is not None]
        self.open = record if group.unfinished else None
        complete += [record] if self.open is None else []
        for known in complete:
            self._take(known)
        return complete

    def _take(self, record: GroupRecord) -> None:
        simulation = self.simulation
        laws.check_cheap(record, simulation.state, simulation.rules)
        if record.group.split == "counted":
            self.figures.append(self.ledger.add(record, simulation.slots))
            most = record.course.counts[:, N_POOL_BYTES].max(initial=0)
            self.resident_bytes = max(self.resident_bytes, int(most))


def simulate(
    source: Source,
    policy: Policy,
    costs: LaneCosts,
    budget: Budget | int,
    rules: Rules | None = None,
    *,
    spec: str | None = None,
) -> Result:
    """Run one policy with one budget over a trace.

    Args:
        source: the trace.
        policy: the policy; it is copied, so it can be run again.
        costs: lane costs of the cost geometry.
        budget: a :class:`Budget`, or slots per layer.
        rules: how requests are run.
        spec: what to call the policy.

    Raises:
        TraceError: a signal that the policy needs is missing.
        UsageError: no request is left to count.
        PolicyError: the policy breaks the contract.
        ProfileError: a count lies outside the profiled range.
    """
    budget = Budget(cache=budget) if isinstance(budget, int) else budget
    contender = Contender(spec or type(policy).__name__, policy, budget)
    return simulate_all(source, [contender], costs, rules)[0]


def simulate_all(
    source: Source,
    contenders: Sequence[Contender],
    costs: LaneCosts,
    rules: Rules | None = None,
    *,
    expert_bytes: NDArray[np.int64] | None = None,
    observe: Observer | None = None,
    keep_log: bool | Callable[[Group], bool] = False,
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 1,
) -> list[Result]:
    """Run several contenders side by side, reading and preparing every request once.

    Memory holds one batch of requests, whatever the length of the trace. A clairvoyant policy that
    asks for next uses adds a first pass over the trace, and one number per group and expert.

    Args:
        source: the trace.
        contenders: policies with their budgets.
        costs: lane costs of the cost geometry.
        rules: how requests are run.
        expert_bytes: int64 [L], if they differ from the cost geometry's.
        observe: called after every group, for event tables and timelines.
        keep_log: record every job of every lane for ``observe``, in all groups or in those it
            is true of.
        progress: called with (runs of a request done, all of them).
        jobs: contenders that run at the same time, each in a thread. Only compiled code runs side
            by side: policies that offer a kernel gain most. The results are the same.

    Raises:
        As :func:`simulate`.
    """
    rules = rules or Rules()
    splits = split_requests(source.requests, rules)
    for contender in contenders:
        source.require(contender.policy.needs, f"policy {contender.spec!r}")
    # What a batch costs whatever the policy does not depend on the link.
    at_link = {
        link: costs if link is None else costs.with_bandwidth(link)
        for link in dict.fromkeys(c.link_gb_s for c in contenders)
    }
    runners = [
        _Runner(
            c,
            Simulation(
                c.policy,
                source.geometry,
                at_link[c.link_gb_s],
                c.budget,
                rules,
                expert_bytes=expert_bytes,
                name=c.spec,
                keep_log=keep_log,
            ),
            Ledger(source, rules.scope),
        )
        for c in contenders
    ]
    total = sum(len(part) for r in runners for _, part in splits.parts(learns=r.learns))
    learns = any(runner.learns for runner in runners)

    def fed() -> Iterator[tuple[Group, Batch]]:
        return feed(source, splits, rules, costs, learns=learns)

    layers, experts = len(source.geometry.layers), source.geometry.experts
    horizon = Horizon(fed, layers, experts, cold=rules.cold)
    report = progress or (lambda done, total: None)
    done = 0
    with _side_by_side(jobs) as each:
        for group, batch in fed():
            present = [r for r in runners if group.split != "history" or r.learns]
            run = partial(_Runner.run, group=group, batch=batch, beyond=horizon.beyond(group))
            for runner, records in zip(present, each(run, present), strict=True):
                if observe is not None:
                    for record in records:
                        observe(runner.contender, record)
                done += len(group.ends)
                report(done, total)
    return [_result(runner, splits) for runner in runners]


@contextmanager
def _side_by_side(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield what applies a function to many things, ``jobs`` at a time; results keep the order."""
    if jobs == 1:
        yield map
        return
    with ThreadPoolExecutor(jobs) as pool:
        yield pool.map


def _result(runner: _Runner, splits: Splits) -> Result:
    return result_of(
        runner.contender, runner.simulation, splits, runner.figures, runner.resident_bytes
    )


def result_of(
    contender: Contender,
    simulation: Simulation,
    splits: Splits,
    figures: Sequence[GroupFigures],
    resident_bytes: int,
) -> Result:
    """Put together what a run came to.

    Args:
        contender, simulation: what ran, at its end.
        splits: requests by what they were for.
        figures: of the counted groups, in order.
        resident_bytes: the most that was resident.
    """
    clairvoyant = "future" in simulation.policy.needs
    kept = max(g.kept_tokens for g in figures)
    ended = [r for g in figures for r in g.requests]
    return Result(
        spec=contender.spec,
        parameters=dict(simulation.policy.describe()),
        budget=contender.budget,
        slots=simulation.slots,
        link_gb_s=simulation.costs.link_bandwidth_gb_s,
        rules=simulation.rules,
        causal=simulation.rules.causal and not clairvoyant,
        clairvoyant=clairvoyant,
        initial_residents=simulation.initial_residents,
        splits=splits,
        requests=tuple(sorted(ended, key=lambda r: splits.counted.index(r.request))),
        summary=summarize(
            figures,
            peak_gpu_bytes=peak_gpu_bytes(simulation, kept),
            peak_resident_bytes=resident_bytes,
            host_bytes=int(simulation.expert_bytes.sum()) * simulation.geometry.experts,
        ),
        unused_prefetches=simulation.leftover_prefetches,
        notes=simulation.hooks.notes(),
    )


def simulated_geometry(simulation: Simulation) -> CostGeometry:
    """Return the cost geometry with as many MoE layers as the trace routes over."""
    cost = simulation.costs.geometry
    return replace(cost, layers=cost.dense_layers + len(simulation.geometry.layers))


def peak_gpu_bytes(simulation: Simulation, kept_tokens: int) -> int:
    """Return the GPU memory that a run takes.

    Everything but the routed experts, the expert budget (never more than all experts), the
    staging slots, and keys and values of ``kept_tokens`` tokens.
    """
    cost = simulated_geometry(simulation)
    everything = int(simulation.expert_bytes.sum()) * simulation.geometry.experts
    experts = min(simulation.total_bytes, everything)
    staging = simulation.rules.staging * int(simulation.expert_bytes.max())
    return cost.resident_bytes + experts + staging + kept_tokens * cost.kv_bytes_per_token
