"""The contract tests fail for policies that break the contract, and only for those."""

import sys
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from oled_sim.policies._kernels import decide_lru, split_data
from oled_sim.policies.lfu import LFU
from oled_sim.policy import Compiled, Lane, Policy, Prefetch, param
from oled_sim.testing.contract import PolicyContract


@dataclass
class Sound(Policy):
    """Uses every hook, and keeps the contract."""

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "gates", "confidence"})
    learns: ClassVar[bool] = True
    variants: ClassVar[dict] = {"slow": {"decay": 0.9}}

    decay: float = param(0.5, "what is left of old mass after one event")

    def place(self, setting):
        self._layers = len(setting.routing.layers)
        self.clear()
        residents = np.zeros((self._layers, self.experts), dtype=bool)
        residents[:, : setting.budget // self._layers] = True
        return residents

    def clear(self):
        self._mass = np.zeros((self._layers, self.experts))
        self._confident = 0.0

    def begin_request(self, info):
        return [Prefetch(0, 3, 1.0)]

    @property
    def allocation_period(self):
        return 3

    def allocate(self, history):
        weight = np.nan_to_num(history.activation_ratio)
        return None if weight.sum() == 0 else history.budget * weight / weight.sum()

    def prefetch(self, event):
        layer = (event.layer + 1) % self._layers
        best = np.argsort(-self._mass[layer], kind="stable")[:2]
        return [Prefetch(layer, int(expert), 1.0) for expert in best]

    def dispatch(self, event):
        lanes = super().dispatch(event)
        lanes[event.missed & (event.tokens == 1)] = Lane.CPU
        return lanes

    def score(self, layer, event):
        if event is not None:
            self._mass[layer] *= self.decay
            self._mass[layer, event.experts] += event.gate_mass * (1 + self._confident)
        return self._mass[layer]

    def rescore(self, resident):
        return self._mass

    def end_iteration(self, end):
        known = end.confidence[~np.isnan(end.confidence)]
        self._confident = float(known.mean()) if len(known) else 0.0


@dataclass
class Seer(Policy):
    """Sets the first activated experts resident, and says so."""

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "future"})

    def reside(self, event):
        return event.experts[: event.capacity]


@dataclass
class Undeclared(Seer):
    """As Seer, but does not say so."""

    needs: ClassVar[frozenset[str]] = frozenset({"ids"})


@dataclass
class NaN(Sound):
    """Divides zero by zero."""

    def score(self, layer, event):
        with np.errstate(invalid="ignore"):
            return np.zeros(self.experts) / 0


@dataclass
class WrongShape(Sound):
    """Scores the activated experts alone."""

    def score(self, layer, event):
        return np.zeros(len(event.experts))


@dataclass
class WrongLanes(Sound):
    """One lane too many."""

    def dispatch(self, event):
        return np.append(super().dispatch(event), Lane.GPU)


@dataclass
class ImpossibleLane(Sound):
    """Takes everything for resident."""

    def dispatch(self, event):
        return np.full(len(event.experts), Lane.GPU)


@dataclass
class Overspent(Sound):
    """Gives every layer the whole budget."""

    def allocate(self, history):
        return np.full(len(history.capacity), float(history.budget))


@dataclass
class Raises(Sound):
    """Raises in one case only: no slot."""

    def dispatch(self, event):
        event.tokens // event.capacity if event.capacity else 1 // 0
        return super().dispatch(event)


@dataclass
class Vandal(Sound):
    """Sorts an array that is not its own."""

    def dispatch(self, event):
        event.tokens.sort()
        return super().dispatch(event)


@dataclass
class Spy(Sound):
    """Finds the rest of the trace in the engine's own frames."""

    def score(self, layer, event):
        frame = sys._getframe()
        while "batch" not in frame.f_locals:
            frame = frame.f_back
        batch, scores = frame.f_locals["batch"], np.zeros(self.experts)
        for v in np.flatnonzero(batch.event_layer == layer)[::-1]:
            if event is not None and batch.event_pass[v] > event.pass_index:
                active = slice(*batch.course.offset[v : v + 2])
                scores[batch.experts[active]] = -v
        return scores


@dataclass
class Moody(Sound):
    """Draws from a generator without a seed."""

    def score(self, layer, event):
        return np.random.default_rng().random(self.experts)


@dataclass
class Shared(Sound):
    """Keeps its counters in the class."""

    counts: ClassVar[list] = []

    def score(self, layer, event):
        self.counts.append(layer)
        return np.roll(np.arange(self.experts, dtype=float), len(self.counts) % 97)


@dataclass
class Remembers(Sound):
    """Forgets nothing between cold requests."""

    def clear(self):
        if not hasattr(self, "_mass"):
            super().clear()


@dataclass
class Unlisted(Sound):
    """Reads gates without saying so."""

    needs: ClassVar[frozenset[str]] = frozenset({"ids"})

    def dispatch(self, event):
        event.gates.sum()
        return super().dispatch(event)


@dataclass
class NumbersFromZero(Sound):
    """Takes a layer's number for its index."""

    def prefetch(self, event):
        return [Prefetch(event.layer + 1, 0, 1.0)]


@dataclass
class NoEvent(Sound):
    """Does not expect a prefetched expert's arrival."""

    def score(self, layer, event):
        self._mass[layer, event.experts] += 1
        return self._mass[layer]


@dataclass
class Fixed(Sound):
    """Takes the capacity of the start for that of every event."""

    def place(self, setting):
        self._capacity = setting.capacity
        return super().place(setting)

    def dispatch(self, event):
        assert event.capacity == self._capacity[event.layer] or event.capacity > 10
        return super().dispatch(event)

    allocation_period = 0


@dataclass
class SameLayers(Sound):
    """Expects every layer in every pass."""

    def dispatch(self, event):
        assert event.layer == 0 or self._last == event.layer - 1
        self._last = event.layer
        return super().dispatch(event)


@dataclass
class OneRequest(Sound):
    """Expects the tokens of an event to be of one request."""

    def dispatch(self, event):
        assert len(np.unique(event.owner)) == 1
        return super().dispatch(event)


@dataclass
class Unhelpful(Sound):
    """Has a parameter that it does not explain."""

    secret: int = 3


@dataclass
class Untyped(Sound):
    """Has a parameter that no text can give."""

    table: np.ndarray = field(default_factory=lambda: np.zeros(3), metadata={"help": "a table"})


@dataclass
class Misnamed(Sound):
    """Has a parameter whose name means something else in a file."""

    label: str = param("a", "a label")


@dataclass
class WrongVariant(Sound):
    """Has a variant of a parameter that does not exist."""

    variants: ClassVar[dict] = {"slow": {"dekay": 0.9}}


@dataclass
class NoSignal(Sound):
    """Needs what no trace holds."""

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "gates", "weather"})


@dataclass
class HoldsFile(Sound):
    """Holds what cannot be copied."""

    def __post_init__(self):
        self._file = sys.stdout.buffer


@dataclass
class OtherKernel(LFU):
    """Offers the kernel of another policy."""

    def compiled(self):
        return Compiled(decide_lru, split_data(self._setting, self.dispatch_by))


@dataclass
class ClaimsStack(LFU):
    """Says a larger cache holds what a smaller one holds, but its scores depend on who misses."""

    stack = True

    def score(self, layer, event):
        counts = super().score(layer, event).copy()
        counts[event.experts[event.missed]] = 0.0
        return counts


@dataclass
class NoDocstring(Sound):
    pass


def failing(policy, *, causal=True):
    """Return the contract tests that fail for a policy."""

    class Case(PolicyContract):
        def make(self):
            return policy()

    Case.causal = causal
    names = [name for name in dir(Case) if name.startswith("test_")]
    assert len(names) > 15
    found = set()
    for name in names:
        try:
            getattr(Case(), name)()
        except Exception:
            found.add(name.removeprefix("test_"))
    return found


def test_sound_policies_pass():
    assert failing(Sound) == set()
    assert failing(Seer, causal=False) == set()
    assert failing(Policy) == set()
    assert failing(LFU) == set()


def test_a_clairvoyant_must_be_called_one():
    assert failing(Seer) >= {"results_say_whether_it_is_causal"}
    assert failing(Sound, causal=False) == {"results_say_whether_it_is_causal"}


EVERY_RUN = {
    "laws_hold_at_every_capacity",
    "laws_hold_under_every_rule",
    "laws_hold_on_ragged_traces",
    "laws_hold_for_one_request_and_for_many",
    "laws_hold_while_capacities_change",
    "same_input_same_bytes",
}


@pytest.mark.parametrize(
    "policy", [NaN, WrongShape, WrongLanes, ImpossibleLane, Vandal, Undeclared]
)
def test_a_broken_answer_fails_every_run(policy):
    assert failing(policy) >= EVERY_RUN


@pytest.mark.parametrize(
    ("policy", "tests"),
    [
        # The moving budget replaces the policy's own allocation.
        (Overspent, EVERY_RUN - {"laws_hold_while_capacities_change"}),
        (NumbersFromZero, EVERY_RUN),
        (NoEvent, EVERY_RUN),
    ],
)
def test_a_mistake_of_most_runs_fails_most(policy, tests):
    assert failing(policy) >= tests


@pytest.mark.parametrize(
    ("policy", "tests"),
    [
        (
            Raises,
            {"laws_hold_at_every_capacity", "full_residency_is_never_worse_than_no_cache"},
        ),
        (Spy, {"decides_without_the_future"}),
        (
            Moody,
            {
                "same_input_same_bytes",
                "a_run_leaves_the_policy_as_it_was",
                "cold_runs_forget_everything_but_history",
                "decides_without_the_future",
            },
        ),
        (
            Shared,
            {
                "same_input_same_bytes",
                "a_run_leaves_the_policy_as_it_was",
                "cold_runs_forget_everything_but_history",
                "decides_without_the_future",
            },
        ),
        (Remembers, {"cold_runs_forget_everything_but_history"}),
        (Unlisted, EVERY_RUN | {"runs_on_a_trace_with_no_more_than_it_needs"}),
        (Fixed, {"laws_hold_while_capacities_change"}),
        (SameLayers, {"laws_hold_on_ragged_traces"}),
        (ClaimsStack, {"a_larger_cache_holds_what_a_smaller_one_holds_if_it_says_so"}),
        (OtherKernel, {"its_kernel_decides_as_its_hooks_do"}),
        (Unhelpful, {"is_a_documented_dataclass"}),
        (NoDocstring, {"is_a_documented_dataclass"}),
        (Untyped, {"parameters_can_be_given_by_users"}),
        (Misnamed, {"parameters_can_be_given_by_users"}),
        (WrongVariant, {"variants_name_known_parameters"}),
        (NoSignal, {"needs_are_signals", "a_run_leaves_the_policy_as_it_was"}),
    ],
)
def test_each_mistake_fails_the_tests_that_are_about_it(policy, tests):
    found = failing(policy)
    assert found >= tests
    assert not found & EVERY_RUN - tests


def test_mistakes_about_batches_and_copies_fail():
    assert "laws_hold_for_one_request_and_for_many" in failing(OneRequest)
    assert "can_be_copied_and_sent_to_another_process" in failing(HoldsFile)
