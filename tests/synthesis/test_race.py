"""Candidates come in the order of exponential races, however they are put together."""

import numpy as np

from oled_sim.synthesis.race import new_bench, new_candidates, new_rates, prepare, race
from oled_sim.synthesis.random import streams

PREFERENCES = np.array([0.4, 0.3, 0.2, 0.1])
M = 2


def races(number: int, keep: float, share: float) -> np.ndarray:
    """Return the candidates [number, M] of tokens mixed from their own and a neighbour's."""
    rates, bench, block = new_rates(4), new_bench(M, 4), new_candidates(M, 2)
    rates.logs[:] = np.log(PREFERENCES)
    prepare(rates)
    rng = streams(1, count=1)[0]
    found = np.empty((number, M), np.int64)
    for n in range(number):
        for t in range(2):
            race(rng, block, t, 0.0, 0, 0.0, rates, 0.0, bench)
        race(rng, block, 1, keep, 0, share, rates, 0.0, bench)
        found[n] = block.ids[:, 1]
    return found


def assert_law(found: np.ndarray) -> None:
    # First arrival: P(e) = p_e. Second: sum over the first f of p_f p_e / (1 - p_f), here
    # for e = 0: 0.3·0.4/0.7 + 0.2·0.4/0.8 + 0.1·0.4/0.9 = 0.3159.
    first = np.bincount(found[:, 0], minlength=4) / len(found)
    second = np.bincount(found[:, 1], minlength=4) / len(found)
    p = PREFERENCES
    expected = [sum(p[f] * p[e] / (1 - p[f]) for f in range(4) if f != e) for e in range(4)]
    assert abs(expected[0] - 0.3159) < 1e-4
    assert np.abs(first - p).max() < 0.02
    assert np.abs(second - expected).max() < 0.02


def test_a_fresh_race_draws_without_replacement_by_preference():
    assert_law(races(6000, 0.0, 0.0))


def test_mixed_races_follow_the_same_law():
    # Thinning and superposition hold for whole races. Only M candidates are remembered, so the
    # law is exact for the first of them and nearly so for the last.
    found = races(6000, 0.3, 0.0)
    first = np.bincount(found[:, 0], minlength=4) / len(found)
    assert np.abs(first - PREFERENCES).max() < 0.02
    found = races(6000, 0.3, 0.4)
    first = np.bincount(found[:, 0], minlength=4) / len(found)
    assert np.abs(first - PREFERENCES).max() < 0.02
