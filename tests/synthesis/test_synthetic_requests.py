"""Synthetic requests obey the trace format and the course of block diffusion."""

from dataclasses import replace

import numpy as np
import pytest
from how_many import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic_recipes import small_data, small_recipe

from oled_sim.synthesis.generate import manifest_of
from oled_sim.synthesis.parameters import Confidence, Routing
from oled_sim.synthesis.request import make_request, prompt_tokens
from oled_sim.synthesis.statistics import routing_statistics
from oled_sim.trace.schema import Kind, TokenState
from oled_sim.trace.validate import check_request

SIGNALS = ("full_gate", "embedding")


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    layers=st.integers(1, 3),
    experts=st.sampled_from([8, 24, 200]),
    top_k=st.integers(1, 8),
    sharp=st.sampled_from([0.05, 1.0, 6.0]),
    carry=st.sampled_from([0.01, 0.5, 0.95]),
    edits=st.booleans(),
    output=st.integers(1, 50),
)
def test_requests_obey_every_rule_of_the_format(
    seed, layers, experts, top_k, sharp, carry, edits, output
):
    # One favourite among few experts takes all tokens: such rows are refused as dummies, rightly.
    assume(top_k > 1 or sharp < 6.0)
    routing = Routing(popularity=sharp, carry=carry, boundary_carry=carry, neighbour_masked=carry)
    data = small_data(routing=routing, confidence=Confidence(edit_rate=0.2))
    recipe = small_recipe(
        layers, experts, top_k,
        data=data, seed=seed, edits=edits, output_tokens=output, signals=SIGNALS,
    )  # fmt: skip
    check_request(make_request(recipe, 3), manifest_of(recipe), "here")


def test_a_request_follows_block_diffusion():
    recipe = small_recipe(output_tokens=100)
    request, length = make_request(recipe, 0), recipe.data.block_length
    prompt = prompt_tokens(recipe, 0)
    assert request.kind[0] == Kind.PREFILL
    assert request.tokens(0) == (prompt // length + 1) * length
    blocks = -(-(prompt + 100) // length) - prompt // length
    assert (request.kind == Kind.COMMIT).sum() == blocks
    assert request.kind[-1] == Kind.COMMIT
    # Every generated position is accepted once, and each denoise pass accepts one at least.
    assert request.accepted.sum() == (prompt // length + blocks) * length - prompt
    assert (request.accepted_count[request.kind == Kind.DENOISE] >= 1).all()
    assert not (request.accepted_count[request.kind == Kind.COMMIT]).any()
    sure = request.confidence[request.accepted == (request.state == TokenState.MASKED)]
    assert not np.isnan(sure[len(sure) // 2 :]).any()


def test_masks_above_the_threshold_are_accepted_and_the_best_one_always():
    request = make_request(small_recipe(output_tokens=100), 1)
    for i in range(request.passes):
        rows = slice(request.token_offset[i], request.token_offset[i + 1])
        masked = request.state[rows] == TokenState.MASKED
        if not masked.any():
            continue
        sure, accepted = request.confidence[rows][masked], request.accepted[rows][masked]
        assert accepted[np.argmax(sure)]
        assert (accepted[sure > 0.701]).all()
        others = np.delete(accepted, np.argmax(sure))
        assert not others[np.delete(sure, np.argmax(sure)) < 0.699].any()


def test_editing_only_where_the_rule_allows_it():
    data = small_data(confidence=Confidence(edit_rate=0.1))
    plain = make_request(small_recipe(data=data), 0)
    edited = make_request(small_recipe(data=data, edits=True), 0)
    assert not plain.edited.any()
    assert edited.edited.any()
    assert (edited.state[edited.edited] == TokenState.DECODED).all()
    commits = np.repeat(edited.kind == Kind.COMMIT, np.diff(edited.token_offset))
    assert not edited.edited[commits].any()  # the pass that changes nothing is the commit


def test_the_same_seed_gives_the_same_request_whatever_came_before():
    recipe = small_recipe()
    first = make_request(recipe, 5)
    make_request(recipe, 2)
    again = make_request(recipe, 5)
    other = make_request(replace(recipe, seed=1), 5)
    assert np.array_equal(first.experts, again.experts)
    assert np.array_equal(first.gates, again.gates)
    assert not np.array_equal(first.experts[:50], other.experts[:50])


def test_relations_change_stability_and_not_the_course():
    still = small_data(
        routing=Routing(drift=0.0)
    )  # else sure passes move more, as they accept more
    recipe = small_recipe(experts=64, top_k=8, output_tokens=300, data=still)
    found = {}
    for coupling in ("none", "positive"):
        made = [make_request(replace(recipe, coupling=coupling), r) for r in range(3)]
        found[coupling] = routing_statistics(made, recipe.geometry), made
    none, positive = found["none"][0], found["positive"][0]
    for state in ("masked", "accepted", "decoded"):
        assert abs(none[f"correlation_{state}"]) < 0.1
        assert positive[f"correlation_{state}"] > none[f"correlation_{state}"] + 0.25
    for a, b in zip(found["none"][1], found["positive"][1], strict=True):
        assert np.array_equal(a.confidence, b.confidence, equal_nan=True)
        assert np.array_equal(a.accepted, b.accepted)


@pytest.mark.parametrize(
    ("change", "statistic", "rises"),
    [
        ({"popularity": 3.0}, "top_tenth", True),
        ({"popularity": 3.0}, "activated", False),
        ({"jitter_masked": 2.0}, "kept_masked", False),
        ({"jitter_word": 2.0}, "kept_decoded", False),
        ({"drift": 0.3}, "kept_masked_far", False),
        ({"carry": 0.9}, "kept_accepted", True),
        ({"boundary_carry": 0.9}, "boundary_overlap", True),
        ({"neighbour_masked": 0.01}, "alike_masks_1", False),
        ({"layer_spread": 0.8}, "activated_layer_spread", True),
    ],
)
def test_parameters_do_what_their_names_say(change, statistic, rises):
    def measured(routing: Routing) -> float:
        data = small_data(routing=routing, block_length=16)
        recipe = small_recipe(4, 64, 8, data=data, output_tokens=128)
        made = [make_request(recipe, r) for r in range(2)]
        return routing_statistics(made, recipe.geometry)[statistic]

    before, after = measured(Routing()), measured(Routing(**change))
    assert after > before + 0.02 if rises else after < before - 0.02
