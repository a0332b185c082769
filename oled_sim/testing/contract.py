"""The contract every policy must keep, as a test class to derive from.

A third party's policy is tested like a built-in one. In a test file of its own package::

    from mine import Mine
    from oled_sim.testing.contract import PolicyContract

    class TestMine(PolicyContract):
        def make(self):
            return Mine(decay=0.5)

pytest then runs everything below on ``Mine``: on small random traces, with the engine's own
checks of every answer and the laws of the simulation (:mod:`oled_sim.engine.laws`) behind it.
Nothing here needs pytest, so the methods can also be called by hand.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oled_sim.bounds.policy_curves import policy_curve
from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine import laws
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.runner import Result, simulate
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.source import MemoryTrace
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import LayerHistory, Policy, parameters
from oled_sim.policy_file import OWN_KEYS
from oled_sim.policy_spec import kind_of
from oled_sim.testing.by_hand import Run, costs_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.trace.schema import SIGNALS, RequestTrace

GEOMETRY = RoutingGeometry((1, 2, 4), 10, 2)
KNOWN_LATER = ("followed", "reused")
"""Columns of an event that the next event of its layer fills in."""


class PolicyContract:
    """Derive from it, and say how to make the policy.

    Attributes:
        causal: whether the policy sees only what is known at the time; False for one that needs
            ``future``.
        geometry: what the traces route over. Layers are not numbered from 0, and there are fewer
            experts than any model has, so that nothing can be taken for granted.
        cache: slots per layer where a test does not say how many.
    """

    causal = True
    geometry = GEOMETRY
    cache = 4

    def make(self) -> Policy:
        """Return a new policy with the parameters under test."""
        raise NotImplementedError

    def costs(self) -> LaneCosts:
        """Return lane costs in which no lane is always the slowest."""
        return costs_by_hand(slowdown=1.2, cpu_per_token_us=5.0, gpu_per_token_us=0.5)

    def requests(
        self,
        seed: int,
        *,
        count: int = 2,
        passes: int = 12,
        signals: Collection[str] = SIGNALS,
        ragged: bool = False,
    ) -> list[RequestTrace]:
        """Return random requests; the first passes of a longer one are those of a shorter one."""
        chosen = tuple(sorted(signals))
        return [_request(self.geometry, seed, i, passes, chosen, ragged) for i in range(count)]

    def run(
        self,
        cache: int = 4,
        *,
        policy: Policy | None = None,
        traces: Sequence[RequestTrace] | None = None,
        keep_log: bool = True,
        **rules: Any,
    ) -> list[GroupRecord]:
        """Run random requests, check every law, and return what was measured.

        Args:
            cache: slots per layer.
            policy: a new one by default.
            traces: requests; four random ones by default, the first two of them history.
            keep_log: check also the laws about every job of every lane; a policy's own kernel is
                used only without.
            rules: fields of :class:`~oled_sim.engine.rules.Rules`.
        """
        settings = Rules(**{"batch": 2, **rules})
        policy, costs, budget = policy or self.make(), self.costs(), Budget(cache=cache)
        simulation = Simulation(policy, self.geometry, costs, budget, settings, keep_log=keep_log)
        given = self.requests(0, count=4) if traces is None else list(traces)
        records = []
        for i in range(0, len(given), settings.batch):
            some = given[i : i + settings.batch]
            split = "history" if i + settings.batch <= len(given) // 2 else "counted"
            batch = make_batch(some, self.geometry, costs, settings.confidence)
            group = Group(split, tuple(t.request for t in some))
            records.append(simulation.run_group(group, batch))
            check = laws.check_all if keep_log else laws.check_cheap
            check(records[-1], simulation.state, settings)
        return records

    def simulate(self, cache: int = 4, policy: Policy | None = None, **rules: Any) -> Result:
        """Run the whole way that the command line takes."""
        source = MemoryTrace(self.geometry, self.requests(3, count=4, passes=10), SIGNALS)
        return simulate(source, policy or self.make(), self.costs(), cache, Rules(**rules))

    # What a policy is.

    def test_is_a_documented_dataclass(self) -> None:
        """A policy is a dataclass; its docstring and every parameter's help say what they mean."""
        policy = type(self.make())
        assert issubclass(policy, Policy) and is_dataclass(policy)
        assert policy.__doc__ and not policy.__doc__.startswith(f"{policy.__name__}("), (
            "the class needs a docstring: the paper, what was ambiguous, what was chosen"
        )
        for name, field in parameters(policy).items():
            assert field.metadata.get("help"), f"parameter {name!r} needs help: use param()"

    def test_needs_are_signals(self) -> None:
        """What it needs or wants are signals that a trace can hold, or the future."""
        policy = type(self.make())
        unknown = (policy.needs | policy.wants) - {*SIGNALS, "future"}
        assert not unknown, f"no trace holds {unknown}: signals are {', '.join(SIGNALS)}, future"

    def test_parameters_can_be_given_by_users(self) -> None:
        """Every parameter has a type that text or TOML can be turned into, and a name of its own.

        ``name`` and ``label`` have a meaning in TOML files.
        """
        policy = self.make()
        values = policy.describe()
        assert not values.keys() & set(OWN_KEYS), f"parameters cannot be called {OWN_KEYS}"
        for name, field in parameters(policy).items():
            kind = kind_of(type(policy), field)
            assert msgspec.convert(values[name], kind) == values[name], f"{name!r} is no {kind}"

    def test_variants_name_known_parameters(self) -> None:
        """Every variant sets parameters that exist."""
        policy = type(self.make())
        known = set(parameters(policy))
        for variant, values in policy.variants.items():
            assert set(values) <= known, f"variant {variant!r} sets {set(values) - known}"

    def test_can_be_copied_and_sent_to_another_process(self) -> None:
        """The engine copies policies, and sweeps pickle them."""
        policy = self.make()
        assert copy.deepcopy(policy).describe() == policy.describe()
        assert pickle.loads(pickle.dumps(policy)).describe() == policy.describe()

    # What it does, whatever it is asked to do.

    def test_laws_hold_at_every_capacity(self) -> None:
        """From no slot to more slots than experts, fewer and more than an event activates."""
        experts = self.geometry.experts
        for cache in sorted({0, 1, 2, experts // 2, experts - 1, experts, experts + 2}):
            self.run(cache)

    def test_laws_hold_under_every_rule(self) -> None:
        """One pool, one staging slot, cold starts, every confidence mode."""
        cases: list[dict[str, Any]] = [
            {"scope": "global"},
            {"staging": 1},
            {"cold": True},
            {"confidence": "end"},
            {"confidence": "current"},
        ]
        for rules in cases:
            self.run(**rules)

    def test_laws_hold_for_one_request_and_for_many(self) -> None:
        """Requests one by one, and four in lock step, one of which ends early."""
        self.run(batch=1)
        uneven = self.requests(0, count=3) + self.requests(0, count=4, passes=5)[3:]
        for scope in ("layer", "global"):
            self.run(batch=4, traces=uneven, scope=scope)

    def test_laws_hold_in_every_batch_mode(self) -> None:
        """Requests that wait for each other's blocks, and that move up when others end."""
        uneven = self.requests(0, count=3) + self.requests(0, count=4, passes=5)[3:]
        source = MemoryTrace(self.geometry, uneven, SIGNALS)
        for mode in ("barrier", "refill"):
            rules = Rules(batch=2, batch_mode=mode, history=1)
            simulate(source, self.make(), self.costs(), self.cache, rules)

    def test_laws_hold_on_ragged_traces(self) -> None:
        """Layers are missing from some passes, and tokens from some layers."""
        for scope in ("layer", "global"):
            self.run(traces=self.requests(1, count=4, ragged=True), scope=scope)

    def test_laws_hold_while_capacities_change(self) -> None:
        """Layers shrink and grow after every pass, whatever the policy allocates itself."""
        records = self.run(policy=_with_moving_budget(self.make()))
        capacity = np.concatenate([laws.columns(record)["capacity"] for record in records])
        assert len(set(capacity.tolist())) > 1 or len(self.geometry.layers) == 1

    def test_runs_on_a_trace_with_no_more_than_it_needs(self) -> None:
        """What it reads it declares: other signals may be missing."""
        needs = type(self.make()).needs - {"future"}
        self.run(traces=self.requests(2, count=2, signals=needs | {"ids"}))

    def test_its_kernel_decides_as_its_hooks_do(self) -> None:
        """What ``compiled`` offers gives the same bytes as ``dispatch`` and ``score``."""
        if "compiled" not in vars(type(self.make())):
            return  # nothing offered; what a base class offers is not taken
        cases: list[dict[str, Any]] = [
            {},
            {"scope": "global"},
            {"confidence": "end", "cold": True, "batch": 1},
        ]
        for rules in cases:
            for cache in (0, 2, self.geometry.experts // 2):
                hooks, kernel = (
                    self.run(cache, policy=policy, keep_log=False, **rules)
                    for policy in (_of_subclass(self.make(), {}), self.make())
                )
                for a, b in zip(hooks, kernel, strict=True):
                    assert a.course.counts.tobytes() == b.course.counts.tobytes()
                    assert a.course.times.tobytes() == b.course.times.tobytes()

    def test_a_larger_cache_holds_what_a_smaller_one_holds_if_it_says_so(self) -> None:
        """A ``stack`` policy has in every run the hits that one pass finds for all cache sizes."""
        if not self.make().stack:
            return
        source = MemoryTrace(self.geometry, self.requests(3, count=4, passes=10), SIGNALS)
        cases: list[dict[str, Any]] = [{}, {"scope": "global"}, {"cold": True}, {"batch": 2}]
        for rules in cases:
            curve = policy_curve(source, self.make(), self.costs(), Rules(**rules))
            runs = [self.simulate(cache, **rules) for cache in range(self.geometry.experts + 1)]
            hits = [sum(r.hits for r in run.requests) for run in runs]
            if rules.get("batch", 1) == 1:
                assert hits == curve.hits.tolist(), f"under {rules} it is no stack policy"
            rates = [run.summary.hit_rate for run in runs]
            assert rates == curve.hit_rate.tolist(), f"under {rules} it is no stack policy"

    # What may not decide.

    def test_same_input_same_bytes(self) -> None:
        """A run is a function of its inputs."""
        for first, second in zip(self.run(), self.run(), strict=True):
            assert first.course.counts.tobytes() == second.course.counts.tobytes()
            assert first.course.times.tobytes() == second.course.times.tobytes()

    def test_a_run_leaves_the_policy_as_it_was(self) -> None:
        """The engine works on a copy, so one policy serves many runs."""
        policy = self.make()
        first, second = (self.simulate(policy=policy).summary for _ in range(2))
        assert repr(first) == repr(second)  # NaN differs from itself

    def test_cold_runs_forget_everything_but_history(self) -> None:
        """Under --cold the same request costs the same whenever it comes."""
        simulation = Simulation(
            self.make(), self.geometry, self.costs(), Budget(cache=3), Rules(batch=2, cold=True)
        )
        batch = make_batch(self.requests(7), self.geometry, self.costs())
        group = Group("counted", (0, 1))
        first, second = (simulation.run_group(group, batch).course.counts for _ in range(2))
        assert first.tobytes() == second.tobytes(), "clear() leaves something behind"

    def test_decides_without_the_future(self) -> None:
        """Whatever comes later, and whether anything comes, everything before is the same.

        A policy that needs ``future`` is excused.
        """
        if not self.causal:
            return
        passes = 7
        for rules in ({}, {"scope": "global"}, {"confidence": "end"}):
            short = self.until(passes, self.requests(5, passes=passes), **rules)
            long = self.until(passes, self.requests(5, passes=12), **rules)
            assert short == long, f"under {rules} a decision depends on passes that come later"

    def until(self, passes: int, traces: Sequence[RequestTrace], **rules: Any) -> list[Any]:
        """Return all that a run of ``traces`` shows of its first passes."""
        run = Run(
            self.make(), self.geometry, traces, 4, costs=self.costs(), batch=len(traces), **rules
        )
        course = run.record.course
        events = course.pass_event[passes]
        columns = laws.columns(run.record)
        counts = {n: c[:events].tolist() for n, c in columns.items() if n not in KNOWN_LATER}
        return [run.seen[:passes], counts, course.times[:events].tolist()]

    # What results say.

    def test_results_say_whether_it_is_causal(self) -> None:
        """Results of a policy that sees the future are marked."""
        assert self.simulate().causal is self.causal
        assert self.simulate(confidence="current").causal is False

    def test_full_residency_is_never_worse_than_no_cache(self) -> None:
        """Everything resident is at least as fast as nothing resident."""
        full, empty = self.simulate(self.geometry.experts), self.simulate(0)
        assert full.summary.hit_rate == 1.0 and empty.summary.hit_rate == 0.0
        assert full.summary.tpot_us <= empty.summary.tpot_us


@functools.lru_cache(maxsize=256)
def _request(
    geometry: RoutingGeometry,
    seed: int,
    number: int,
    passes: int,
    signals: tuple[str, ...],
    ragged: bool,
) -> RequestTrace:
    """Return a random request: made once, because nobody can write into it."""
    return random_request(
        np.random.default_rng([seed, number]),
        geometry,
        request=number,
        passes=passes,
        tokens=4,
        signals=signals,
        ragged=ragged,
    )


def _with_moving_budget(policy: Policy) -> Policy:
    """Return a policy that decides as ``policy`` does, but whose layers shrink and grow."""

    def allocate(self: Any, history: LayerHistory) -> NDArray[np.float64]:
        layers = len(history.capacity)
        weight = np.arange(layers) + 1.0 * (layers == 1)
        self.turn += 1
        return np.roll(history.budget * weight / weight.sum(), self.turn)

    return _of_subclass(policy, {"turn": 0, "allocation_period": 1, "allocate": allocate})


def _of_subclass(policy: Policy, members: dict[str, Any]) -> Policy:
    """Return a policy with the same parameters, of a subclass with further ``members``."""
    kind = type(type(policy).__name__, (type(policy),), members)
    return kind(**{f.name: getattr(policy, f.name) for f in fields(policy) if f.init})
