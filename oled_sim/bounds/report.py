"""Policies beside what none of them can do better.

Bounds are policies too: those that declare one (``Policy.bound``) are run on the same trace, rules
and budgets. From the ones that bound hits come three rows: one pool per layer with equal shares,
the best fixed split of the same total (chosen with hindsight), and one pool for all layers. LRU
with its own best fixed split shows what fixed shares are worth without knowing the future.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim import plugins
from oled_sim.bounds.curves import Order, best_static_split, hits_by_slots
from oled_sim.bounds.fractional import most_hits_in_one_pool
from oled_sim.bounds.request_cost import least_work_us
from oled_sim.contenders import contenders
from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.batch import Batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.feeding import feed
from oled_sim.engine.metrics import ratio
from oled_sim.engine.rules import Group, Rules, split_requests
from oled_sim.engine.runner import Contender, Result, simulate_all
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.source import Source
from oled_sim.engine.state import N_ACTIVATED, N_HITS, PASS_TIMES
from oled_sim.errors import OledSimError, UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Policy
from oled_sim.policy_spec import load_policy, parse_policies
from oled_sim.trace.schema import RequestTrace

BEST_SPLIT, ONE_POOL = ", best split", ", one pool"
LRU = "LRU, best split"


class Work(NamedTuple):
    """What a run added up to: hits and |A| of the whole run, and lane times of counted requests."""

    hits: int = 0
    activations: int = 0
    copies_us: float = 0.0
    cpu_us: float = 0.0


class Row(NamedTuple):
    """A bound or a policy, run with one budget.

    ``kind``: ``residency``, ``hits``, ``split`` (a fixed split chosen with hindsight) or
    ``policy``. ``work``: of its whole run.
    """

    name: str
    kind: str
    result: Result
    work: Work

    @property
    def copies_us(self) -> float:
        """Time in which the copy engine worked, in all passes of counted requests."""
        return self.work.copies_us

    @property
    def cpu_us(self) -> float:
        """Time in which the CPU lane worked, likewise."""
        return self.work.cpu_us

    @property
    def work_us(self) -> float:
        """Work of both lanes."""
        return self.copies_us + self.cpu_us


class Gap(NamedTuple):
    """How far a policy is from a bound: hit rates of decode passes, and a ratio of TPOTs."""

    hit_rate: float
    tpot: float


class Comparison(NamedTuple):
    """Bounds and policies with one budget.

    ``least_work_us``: for a request alone, the least work of copies and CPU experts, given equal
    fixed shares; else None. ``most_hits_in_one_pool``: of the whole run, where experts differ in
    size and Belady's rule is a heuristic for one pool; else None.
    """

    budget: Budget
    bounds: tuple[Row, ...]
    policies: tuple[Row, ...]
    least_work_us: float | None = None
    most_hits_in_one_pool: int | None = None


@dataclass(frozen=True)
class OneRequest:
    """One request of a trace as a source."""

    source: Source
    request: int

    @property
    def geometry(self) -> RoutingGeometry:
        """What the trace routes over."""
        return self.source.geometry

    @property
    def requests(self) -> Sequence[int]:
        """The one request."""
        if self.request not in self.source.requests:
            known = self.source.requests
            raise UsageError(
                f"the trace has no request {self.request}: it has {min(known)} to {max(known)}"
            )
        return [self.request]

    @property
    def signals(self) -> Collection[str]:
        """Signals that the trace holds."""
        return self.source.signals

    def read(self, request: int) -> RequestTrace:
        """Read one request."""
        return self.source.read(request)

    def output_tokens(self, request: int) -> int:
        """Return the number of output tokens."""
        return self.source.output_tokens(request)

    def require(self, signals: Iterable[str], who: str) -> None:
        """Refuse, with a sentence, when a signal is missing."""
        self.source.require(signals, who)


def gap(policy: Row, bound: Row) -> Gap:
    """Return what a policy lacks in hit rate (negative: it has more), and its multiple in TPOT."""
    mine, best = policy.result.summary, bound.result.summary
    return Gap(best.hit_rate - mine.hit_rate, ratio(mine.tpot_us, best.tpot_us))


def installed_bounds() -> dict[str, Policy]:
    """Return every registered policy that is a bound, in all its variants, by specification.

    One that does not load is no bound; ``oled-sim policies`` says why.
    """
    specs = []
    for name in plugins.names(plugins.POLICIES):
        try:
            policy = load_policy(name)
        except OledSimError:
            continue
        if policy.bound != "no":
            specs += [name, *(f"{name}:{v}" for v, values in policy.variants.items() if values)]
    return parse_policies(specs) if specs else {}


class Bounds:
    """What is run on a trace to compare policies with bounds.

    Args:
        source: the trace. costs: of the cost geometry. rules: how requests are run; bounds but
            those of one pool run with one pool per layer whatever ``scope`` says.
        expert_bytes: int64 [L].
        bounds: policies that are bounds, by name.
    """

    def __init__(
        self,
        source: Source,
        costs: LaneCosts,
        rules: Rules,
        expert_bytes: NDArray[np.int64],
        bounds: Mapping[str, Policy],
    ) -> None:
        self.source, self.costs, self.rules = source, costs, rules
        self.expert_bytes = expert_bytes
        self.bounds = bounds

    def compare(
        self,
        policies: Mapping[str, Policy],
        budgets: Sequence[Budget],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Comparison]:
        """Run all bounds and policies with every budget.

        Args:
            policies: by label. References such as ``full`` are shown with every budget.
            budgets: each compared by itself. progress: as of :func:`simulate_all`.

        Raises:
            As :func:`oled_sim.engine.runner.simulate`.
        """
        splits = {order: self._best_splits(order, budgets) for order in ("soonest", "latest")}
        plans = [self._plan(budget, i, splits) for i, budget in enumerate(budgets)]
        asked = contenders(policies, budgets, self.source.geometry.experts)
        mine = [_Planned(c.spec, "policy", self.rules.scope, c) for c in asked]
        rows = self._run([p for plan in plans for p in plan] + mine, progress)
        theirs = rows[len(rows) - len(asked) :]
        found, begin = [], 0
        for budget, plan in zip(budgets, plans, strict=True):
            bounds, begin = rows[begin : begin + len(plan)], begin + len(plan)
            own = [row for row, c in zip(theirs, asked, strict=True)
                   if c.budget == budget or c.policy.residency != "budget"]  # fmt: skip
            least = self.least_work_us(budget) if isinstance(self.source, OneRequest) else None
            most = self.most_hits_in_one_pool(budget)
            found.append(Comparison(budget, tuple(bounds), tuple(own), least, most))
        return found

    def _plan(
        self, budget: Budget, i: int, splits: Mapping[str, Sequence[Budget]]
    ) -> list[_Planned]:
        """Return the bounds to run for one budget, in the order of the table."""

        def planned(name: str, kind: str, scope: str, policy: Policy, own: Budget) -> _Planned:
            return _Planned(name, kind, scope, Contender(name, policy, own))

        of = {kind: [(n, p) for n, p in self.bounds.items() if p.bound == kind]
              for kind in ("residency", "hits")}  # fmt: skip
        found = [planned(n, "residency", "layer", p, budget) for n, p in of["residency"]]
        for name, policy in of["hits"]:
            found += [
                planned(name + ONE_POOL, "hits", "global", policy, budget),
                planned(name + BEST_SPLIT, "split", "layer", policy, splits["soonest"][i]),
                planned(name, "hits", "layer", policy, budget),
            ]
        return [*found, planned(LRU, "split", "layer", Policy(), splits["latest"][i])]

    def _best_splits(self, order: Order, budgets: Sequence[Budget]) -> list[Budget]:
        """Return, for every budget, the fixed split that has the most hits in the whole run."""
        layers, experts = len(self.source.geometry.layers), self.source.geometry.experts
        hits = hits_by_slots(self._fed, layers, experts, order, cold=self.rules.cold)
        found = []
        for budget in budgets:
            size = min(
                budget.total_bytes(self.expert_bytes), experts * int(self.expert_bytes.sum())
            )
            slots = best_static_split(hits, self.expert_bytes, size)
            found.append(Budget(slots=tuple(slots.tolist())))
        return found

    def least_work_us(self, budget: Budget) -> float:
        """Return the least work that the misses of one request alone cause, in µs.

        Copies and CPU experts together, for equal fixed shares, from an empty cache; what fits
        entirely misses nothing. See :mod:`oled_sim.bounds.cost_flow`.
        """
        experts = self.source.geometry.experts
        if budget.total_bytes(self.expert_bytes) >= experts * int(self.expert_bytes.sum()):
            return 0.0
        (group, batch), *more = self._fed()
        if more or len(group.requests) > 1:
            raise UsageError("the least work of misses is worked out for one request alone")
        copy_us = np.array([self.costs.h2d_us(float(size)) for size in self.expert_bytes])
        slots = budget.shares(self.expert_bytes, experts)
        return float(least_work_us(batch, self.costs, copy_us, slots).sum())

    def most_hits_in_one_pool(self, budget: Budget) -> int | None:
        """Return a bound on the hits of the run in one pool; None where experts are of one size."""
        if len(set(self.expert_bytes.tolist())) == 1:
            return None
        experts, size = self.source.geometry.experts, budget.total_bytes(self.expert_bytes)
        return most_hits_in_one_pool(
            self._fed, self.expert_bytes, experts, size, cold=self.rules.cold
        )

    def _fed(self) -> Iterator[tuple[Group, Batch]]:
        splits = split_requests(self.source.requests, self.rules)
        return feed(self.source, splits, self.rules, self.costs, learns=False)

    def _run(
        self, planned: Sequence[_Planned], progress: Callable[[int, int], None] | None
    ) -> list[Row]:
        """Run everything, one pass over the trace per scope, and keep the order."""
        rows: dict[int, Row] = {}
        work = _Meter({id(p.contender): i for i, p in enumerate(planned)})
        for scope in ("layer", "global"):
            some = [i for i, p in enumerate(planned) if p.scope == scope]
            results = simulate_all(
                self.source,
                [planned[i].contender for i in some],
                self.costs,
                replace(self.rules, scope=scope),
                expert_bytes=self.expert_bytes,
                observe=work.note,
                progress=progress,
            )
            for i, result in zip(some, results, strict=True):
                rows[i] = Row(planned[i].name, planned[i].kind, result, work.of[i])
        return [rows[i] for i in range(len(planned))]


class _Meter:
    """Adds up the work of every contender, by its number."""

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self._numbers = numbers
        self.of = {i: Work() for i in numbers.values()}

    def note(self, contender: Contender, record: GroupRecord) -> None:
        split, i = record.group.split, self._numbers[id(contender)]
        if split == "history":
            return
        counts, before = record.course.counts, self.of[i]
        times = record.course.pass_times if split == "counted" else np.zeros((0, len(PASS_TIMES)))
        copies_us, cpu_us = (
            times[:, PASS_TIMES.index(f"{lane}_busy_us")].sum() for lane in ("h2d", "cpu")
        )
        self.of[i] = Work(
            before.hits + int(counts[:, N_HITS].sum()),
            before.activations + int(counts[:, N_ACTIVATED].sum()),
            before.copies_us + float(copies_us),
            before.cpu_us + float(cpu_us),
        )


class _Planned(NamedTuple):
    name: str
    kind: str
    scope: str
    contender: Contender
