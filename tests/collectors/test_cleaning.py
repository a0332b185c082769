"""Which tokens belong to a profiling batch: against a plain search, with short batches."""

from pathlib import Path

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.collectors import cleaning
from oled_sim.collectors.recorded import Recorded

LEAST = 3


@pytest.fixture(autouse=True)
def short_batches(monkeypatch):
    monkeypatch.setattr(cleaning, "DUMMY_ROWS", LEAST)
    monkeypatch.setattr(cleaning, "DUMMY_ROWS_WITHOUT_GATES", LEAST)


def recorded(tokens, layers, routes):
    """Build a request of one pass; ``routes`` by (token, layer), in the order given."""
    held = list(routes)
    return Recorded(
        number=0,
        step=np.zeros(tokens, np.int64),
        position=np.arange(tokens),
        token=np.array([token for token, _ in held]),
        layer=np.array([layer for _, layer in held], np.int32),
        experts=np.array([[routes[key], 9] for key in held]),
        gates=None,
        place=np.arange(len(held)),
        source=Path("x"),
        where=lambda place, layer: f"row {place}",
    )


def search(tokens, layers, routes, may_start):
    """Try every stretch of tokens that begins where one may, in every layer."""
    dummy = {layer: set() for layer in range(layers)}
    for layer in range(layers):
        held = [t for t in range(tokens) if (t, layer) in routes]
        for i, first in enumerate(held):
            same = [t for t in held[i:] if routes[t, layer] == routes[first, layer]]
            run = [t for t, wanted in zip(same, held[i:], strict=False) if t == wanted]
            if may_start[first] and len(run) >= LEAST:
                dummy[layer] |= set(run)
    of = [[layer for layer in range(layers) if (t, layer) in routes] for t in range(tokens)]
    return [bool(of[t]) and all(t in dummy[layer] for layer in of[t]) for t in range(tokens)]


@settings(max_examples=examples(150))
@given(st.data(), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_as_a_plain_search_finds_them(data, tokens, layers, anywhere):
    cells = [(t, layer) for t in range(tokens) for layer in range(layers)]
    wanted = data.draw(st.lists(st.sampled_from(cells), min_size=1, unique=True))
    cells = [cell for cell in cells if cell not in wanted[len(cells) * 2 // 3 :]]
    cells = data.draw(st.permutations(cells))
    routes = {cell: data.draw(st.integers(1, 2)) for cell in cells}
    starts = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    may_start = np.array(starts) if anywhere else None
    request = recorded(tokens, layers, routes)
    every = np.ones(len(routes), np.bool_)
    found = cleaning.dummy_tokens(request, every, may_start)
    first = [token == 0 for token in range(tokens)]
    assert found.tolist() == search(tokens, layers, routes, starts if anywhere else first)


def test_a_token_may_be_a_dummy_by_the_layers_that_hold_it():
    routes = {(0, 0): 1, (1, 0): 1, (2, 0): 2, (0, 1): 1, (1, 1): 1, (3, 1): 1}
    found = cleaning.dummy_tokens(recorded(4, 2, routes), np.ones(6, np.bool_), None)
    assert found.tolist() == [False, False, False, True]


def test_padding_between_them_does_not_count():
    routes = {(t, 0): 1 for t in range(4)}
    request = recorded(4, 1, routes)
    wanted = np.array([True, True, False, True])
    assert cleaning.dummy_tokens(request, wanted, None).tolist() == [True, True, False, True]
