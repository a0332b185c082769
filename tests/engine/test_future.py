"""Next uses: exact over the whole run, and told at gates only, to those who declare it."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.engine.budget import Budget
from oled_sim.engine.future import Cursor
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.engine.source import MemoryTrace
from oled_sim.errors import PolicyError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import NEVER, Policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request

GEOMETRY = RoutingGeometry((1, 3), 6, 2)
ONE = RoutingGeometry((1,), 4, 1)


@dataclass
class Asks(Policy):
    """Notes every answer it gets; ``told`` is shared by all copies."""

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "future"})
    learns: ClassVar[bool] = False
    told: ClassVar[list] = []
    every: int = 1

    def score(self, layer, event):
        number = len(self.told)
        if number % self.every == 0:
            answer = [event.future.next_use(other) for other in range(2)]
            self.told.append((layer, set(event.experts.tolist()), answer))
        else:
            self.told.append((layer, set(event.experts.tolist()), None))
        return super().score(layer, event)


class AsksAndLearns(Asks):
    learns = True


def by_search(told, first, end):
    """Return, for event ``first``, the next use of every expert among the events before ``end``."""
    found = np.full((2, 6), NEVER)
    for v in range(end - 1, first, -1):
        layer, experts, _ = told[v]
        found[layer, list(experts)] = v
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    requests=st.integers(1, 5),
    batch=st.integers(1, 3),
    mode=st.sampled_from(["lockstep", "barrier", "refill"]),
    cold=st.booleans(),
    learns=st.booleans(),
    every=st.integers(1, 3),
)
def test_next_uses_are_those_of_the_run(seed, requests, batch, mode, cold, learns, every):
    rng = np.random.default_rng(seed)
    traces = [
        random_request(rng, GEOMETRY, request=i, passes=int(rng.integers(1, 5)), tokens=2,
                       ragged=bool(seed % 2))
        for i in range(requests)
    ]  # fmt: skip
    history = requests // 3 if learns else 0
    cold = cold and mode != "refill"
    rules = Rules(history=history, warmup=0, batch=batch, batch_mode=mode, cold=cold)
    policy = (AsksAndLearns if learns else Asks)(every=every)
    Asks.told.clear()
    lengths, splits = [], []

    def note(contender, record):
        lengths.append(len(record.course.event_layer))
        splits.append(record.group.split)

    contender = Contender("asks", policy, Budget(cache=2))
    simulate_all(MemoryTrace(GEOMETRY, traces), [contender], costs_by_hand(), rules, observe=note)
    ends = np.cumsum(lengths).tolist()
    assert len(policy.told) == ends[-1]
    begin = 0
    for i, end in enumerate(ends):
        # Numbers count from where the cache was empty last.
        last = cold or i == len(ends) - 1 or (splits[i] == "history" and splits[i + 1] != "history")
        if last:
            for v in range(begin, end):
                _, _, answer = policy.told[v]
                if answer is not None:
                    wanted = by_search(policy.told, v, end)
                    assert np.array_equal(answer, np.where(wanted < NEVER, wanted - begin, NEVER))
            begin = end


def test_on_paper():
    Asks.told.clear()
    geometry = RoutingGeometry((1, 2), 3, 1)
    Run(Asks(), geometry, request_by_hand(geometry, [[[[0]], [[1]]], [[[1]], [[1]]]]), 1)
    # Events 0..3: layer 0 activates 0, layer 1 activates 1, layer 0 activates 1, layer 1 again.
    n = NEVER
    assert [np.array(answer).tolist() for _, _, answer in Asks.told] == [
        [[n, 2, n], [n, 1, n]],
        [[n, 2, n], [n, 3, n]],
        [[n, n, n], [n, 3, n]],
        [[n, n, n], [n, n, n]],
    ]


def test_an_answer_is_a_copy():
    @dataclass
    class Scribbles(Asks):
        def score(self, layer, event):
            event.future.next_use(0)[:] = 0
            return super().score(layer, event)

    Asks.told.clear()
    Run(Scribbles(), GEOMETRY, random_request(np.random.default_rng(0), GEOMETRY, passes=2), 2)
    assert (Asks.told[-1][2][0] == NEVER).all()


def asking(hook, **members):
    """Return a policy that keeps the cursor of its first gate and asks again in ``hook``."""

    def dispatch(self, event):
        self.kept = event.future
        return Policy.dispatch(self, event)

    def ask(self, *arguments):
        if getattr(self, "kept", None) is not None:
            self.kept.next_use(0)
        return getattr(Policy, hook)(self, *arguments)

    names = {"needs": frozenset({"ids", "future"}), "allocation_period": 1}
    return type("Asking", (Policy,), names | {"dispatch": dispatch, hook: ask} | members)()


REQUEST = request_by_hand(ONE, [[[[0], [1]]], [[[2]]], [[[1]]]])


@pytest.mark.parametrize("hook", ["end_iteration", "allocate", "end_request", "revise"])
def test_no_answer_where_no_gate_is_open(hook):
    with pytest.raises(PolicyError, match=r"policy 'Asking' at .*where no gate is open"):
        Run(asking(hook), ONE, REQUEST, 2, confidence="end")


@pytest.mark.parametrize("hook", ["score", "prefetch"])
def test_every_hook_of_a_gate_may_ask(hook):
    Run(asking(hook), ONE, REQUEST, 2)


def test_no_answer_for_those_who_do_not_declare_it():
    undeclared = asking("score", needs=frozenset({"ids"}))
    with pytest.raises(PolicyError, match="policy 'Asking' at request 0, pass 0, layer 1: asks for"
                       " next uses without declaring 'future' in `needs`"):  # fmt: skip
        Run(undeclared, ONE, REQUEST, 2)


def test_a_cursor_that_was_never_opened_says_nothing():
    with pytest.raises(PolicyError, match="no gate"):
        Cursor(PolicyError).next_use(0)


def test_who_declares_nothing_gets_nothing_that_leads_to_the_future():
    @dataclass
    class Looks(Policy):
        seen: list = field(default_factory=list)

        def score(self, layer, event):
            found = [type(v).__name__ for v in vars(event.future).values()]
            assert found == ["method"], found  # what words the refusal
            return super().score(layer, event)

    Run(Looks(), ONE, REQUEST, 2)
