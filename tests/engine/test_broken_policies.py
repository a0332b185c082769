"""A policy that breaks the contract fails loudly, and the sentence says who and where."""

import numpy as np
import pytest

from oled_sim.errors import PolicyError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Lane, Policy, Prefetch
from oled_sim.testing.by_hand import Run, request_by_hand

TWO = RoutingGeometry((3, 7), 8, 1)
TRACE = request_by_hand(TWO, [[[[0], [1]], [[0]]]] * 3, request=5)


def broken(hook, answer, **attributes):
    """Return a policy whose ``hook`` returns what ``answer`` makes of its arguments."""
    members = {hook: lambda self, *arguments: answer(*arguments), "allocation_period": 1}
    return type("Broken", (Policy,), members | attributes)()


def nan_at(index):
    scores = np.zeros(8)
    scores[index] = np.nan
    return scores


def crash(*_):
    raise KeyError("oops")


CASES = {
    "exception": (broken("score", crash), r"score\(\) raised KeyError: 'oops'"),
    "exception in place": (broken("place", crash), r"place\(\) raised KeyError"),
    "NaN": (broken("score", lambda *_: nan_at(6)), r"score\(\) returned NaN for expert 6"),
    "wrong score shape": (broken("score", lambda *_: np.zeros(7)), r"float64 \[7\] instead of"),
    "scores are words": (broken("score", lambda *_: ["a"] * 8), "instead of numbers"),
    "wrong lane shape": (broken("dispatch", lambda e: np.zeros(1, int)), "instead of integers"),
    "lanes are floats": (broken("dispatch", lambda e: np.ones(len(e.experts))), "float64"),
    "no lane": (broken("dispatch", lambda e: np.full(len(e.experts), 3)), "no lane for expert 0"),
    "GPU for a miss": (
        broken("dispatch", lambda e: np.full(len(e.experts), Lane.GPU)),
        "expert 0 to the GPU, but it is not resident",
    ),
    "transfer of a resident": (
        broken(
            "dispatch",
            lambda e: np.full(len(e.experts), Lane.TRANSFER),
            place=lambda self, setting: np.eye(2, 8, 1, dtype=bool),
        ),
        "transfers expert 1, but it is resident",
    ),
    "capacities do not sum": (
        broken("allocate", lambda h: h.capacity + 1),
        r"6 slots in all, but the budget is 4",
    ),
    "negative capacity": (broken("allocate", lambda h: np.array([-1.0, 5.0])), "negative or NaN"),
    "capacities of wrong shape": (broken("allocate", lambda h: np.ones(3)), r"\[3\] instead of"),
    "future not declared": (broken("reside", lambda e: e.experts), "without declaring 'future'"),
    "passes foreseen undeclared": (broken("foresee", lambda e: None), "without declaring 'future'"),
    "more slots than the budget": (
        broken("foresee", lambda e: np.array([3, 2]), needs=frozenset({"ids", "future"})),
        r"foresee\(\) returned 5 slots, more than the budget holds",
    ),
    "more slots than experts": (
        broken("foresee", lambda e: np.array([9, -1]), needs=frozenset({"ids", "future"})),
        r"foresee\(\) returned slots outside 0\.\.8",
    ),
    "slots of wrong shape": (
        broken("foresee", lambda e: np.array([4]), needs=frozenset({"ids", "future"})),
        r"foresee\(\) returned int64 \[1\] instead of integers \[2\]",
    ),
    "too many residents": (
        broken("reside", lambda e: np.arange(3), needs=frozenset({"ids", "future"})),
        "3 experts for 2 slots",
    ),
    "no such resident": (
        broken("reside", lambda e: np.array([8]), needs=frozenset({"ids", "future"})),
        "not in 0..7",
    ),
    "prefetch of no layer": (
        broken("prefetch", lambda e: [Prefetch(2, 0, 1.0)]),
        r"impossible prefetch \[2.0, 0.0, 1.0\]",
    ),
    "prefetch is no list of triples": (broken("prefetch", lambda e: [(0, 1)]), "instead of"),
    "place overfills a layer": (
        broken("place", lambda s: np.ones((2, 8), bool)),
        "place.. fills 8 of 2 slots of layer 3",
    ),
    "place of wrong shape": (broken("place", lambda s: np.ones(8, bool)), "instead of bool"),
}


@pytest.mark.parametrize("case", CASES)
def test_sentence(case):
    policy, words = CASES[case]
    with pytest.raises(PolicyError, match=words) as caught:
        Run(policy, TWO, TRACE, 2)
    assert "policy 'Broken'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("dispatch", "request 5, pass 0, layer 3"),
        ("end_iteration", "request 5, pass 0:"),
        ("end_request", "request 5:"),
        ("place", "the start of the run"),
    ],
)
def test_it_says_where(hook, where):
    with pytest.raises(PolicyError, match=where):
        Run(broken(hook, crash), TWO, TRACE, 2)


def test_later_layer_and_pass_are_named():
    def fail_late(layer, event):
        if event.pass_index == 2 and layer == 1:
            raise RuntimeError("late")
        return np.zeros(8)

    with pytest.raises(PolicyError, match="request 5, pass 2, layer 7: score"):
        Run(broken("score", fail_late), TWO, TRACE, 2)


def test_a_policy_cannot_change_what_it_is_shown():
    def vandalise(event):
        event.resident[0] = True

    with pytest.raises(PolicyError, match="read-only"):
        Run(broken("dispatch", vandalise), TWO, TRACE, 2)
    needs = frozenset({"ids", "gates", "confidence"})
    for name in ("experts", "tokens", "routes", "gates", "confidence", "last_use"):

        def vandalise_array(event, name=name):
            getattr(event, name)[...] = 0

        with pytest.raises(PolicyError, match="read-only"):
            Run(broken("dispatch", vandalise_array, needs=needs), TWO, TRACE, 2)


def test_what_a_policy_sees_leads_to_nothing_else():
    # A view's base is the whole array: later events, or the state of other layers.
    names = ("experts", "tokens", "routes", "gates", "confidence", "resident", "last_use", "owner")

    def pry(event):
        assert all(getattr(event, name).base is None for name in names)
        return event.missed.astype(int)

    needs = frozenset({"ids", "gates", "confidence"})
    Run(broken("dispatch", pry, needs=needs), TWO, TRACE, 2)

    def pry_at_the_end(end):
        assert all(array.base is None for array in end[3:])

    Run(broken("end_iteration", pry_at_the_end), TWO, TRACE, 2)


def test_rescore_is_checked_under_global_scope():
    policy = broken("rescore", lambda resident: np.zeros((2, 7)))
    with pytest.raises(PolicyError, match=r"rescore\(\) returned float64 \[2, 7\]"):
        Run(policy, TWO, TRACE, 2, scope="global")
    Run(policy, TWO, TRACE, 2)  # not asked under layer scope


def test_rescore_ranks_all_layers():
    # Two slots for both layers. Ageing scores make the experts of layer 3 the worst.
    policy = broken("rescore", lambda resident: np.array([[0.0] * 8, [1.0] * 8]))
    trace = request_by_hand(TWO, [[[[0]], [[0]]], [[[1]], [[2]]]])
    # Pass 0: 0 of layer 3 and 0 of layer 7. Pass 1: 1 of layer 3 equals 0 of its layer in score and
    # is more recent; then 2 of layer 7, worth more, drives it out.
    assert Run(policy, TWO, trace, 1, scope="global").seen[-1] == [[], [0, 2]]


UNDECLARED = {
    "confidence": lambda event: event.confidence.mean(),
    "state": lambda event: event.state.max(),
    "gates": lambda event: event.gates.sum(),
    "full_gate": lambda event: event.full_gate.sum(),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_signal_that_is_not_declared_is_not_seen(name):
    with pytest.raises(PolicyError, match=r"'Broken' at request 5.* NoneType|'NoneType'"):
        Run(broken("score", lambda layer, event: UNDECLARED[name](event)), TWO, TRACE, 2)


def test_what_a_policy_does_to_sizes_is_its_own_business():
    def shrink_experts(setting):
        setting.expert_bytes.flags.writeable = True
        setting.expert_bytes[:] = 1
        setting.timer.lanes.copy_us[:] = 0.0

    honest = Run(Policy(), TWO, TRACE, 2)
    cheat = Run(broken("place", shrink_experts), TWO, TRACE, 2)
    assert cheat.record.course.times.tolist() == honest.record.course.times.tolist()
    assert cheat.simulation.expert_bytes.tolist() == honest.simulation.expert_bytes.tolist()


@pytest.mark.parametrize("said", [5, "a sentence", [1], {"a": 1}])
def test_notes_that_are_no_sentences(said):
    policy = broken("notes", lambda: said)
    simulation = Run(policy, TWO, TRACE, 2).simulation
    with pytest.raises(PolicyError, match=r"notes\(\) returned .* instead of a list of sentences"):
        simulation.hooks.notes()


def test_nearly_a_hook_is_pointed_out():
    policy = broken("scores", lambda layer, event: np.zeros(8))
    simulation = Run(policy, TWO, TRACE, 2).simulation
    assert simulation.hooks.notes() == ("scores() is no hook: did you mean score()?",)
