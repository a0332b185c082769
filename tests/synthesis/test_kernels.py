"""The parts that routes are made of: tables, orders, gates, and the same numbers interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.synthesis import fast
from oled_sim.synthesis.noise import UNIFORM, WORD, move
from oled_sim.synthesis.parameters import Gates
from oled_sim.synthesis.random import streams
from oled_sim.synthesis.ranking import gate_table, give_out, rank, sorting_pairs

TESTS = Path(__file__).parent


@given(st.floats(-600, 600))
def test_exponentials_from_tables(x):
    assert fast.exp(x) == pytest.approx(np.exp(x), rel=1e-9)


@given(st.floats(1e-300, 1e300))
def test_logarithms_from_tables(x):
    assert fast.log(x, fast.new_word()) == pytest.approx(np.log(x), rel=1e-9, abs=1e-9)


def test_exponential_numbers_have_their_law():
    rng = streams(7, count=1)[0]
    drawn = np.array([fast.exponential(rng) for _ in range(40000)])
    assert drawn.min() > 0
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.999):
        assert (drawn > -np.log1p(-quantile)).mean() == pytest.approx(1 - quantile, abs=0.01)


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 12))
def test_comparisons_bring_the_largest_forward(seed, number, wanted):
    values = np.random.default_rng(seed).integers(0, 9, number)
    expected = np.sort(values)[::-1][:wanted]
    for high, low in sorting_pairs(number, wanted):
        values[high], values[low] = max(values[high], values[low]), min(values[high], values[low])
    assert values[:wanted].tolist() == expected.tolist()


@given(st.integers(0, 2**32), st.sampled_from([0.5, 3.0, 20.0]))
def test_gates_are_renormalised_sigmoids_in_order(seed, spread):
    draw = np.random.default_rng(seed)
    tokens, most, k = 5, 12, 8
    ids = np.array([draw.permutation(200)[:most] for _ in range(tokens)], np.int32).T.copy()
    score = draw.normal(0, spread, (most, tokens)).astype(np.float32)
    noise = draw.normal(0, 0.5, (most, tokens)).astype(np.float32)
    keys, weight = np.empty((most, tokens), np.int32), np.empty((k + 1, tokens), np.float32)
    experts, bits = np.empty((tokens, k), np.uint8), np.empty((tokens, k), np.uint16)
    gates = Gates(slope=0.7, offset=-0.5)
    rank(ids, score, noise, sorting_pairs(most, k), keys)
    give_out(ids, keys, gate_table(gates), weight, weight.view(np.int32),
             np.empty((2, k, tokens), np.int32), experts, bits, 0)  # fmt: skip
    order = np.argsort(-(score + noise).astype(np.float64), axis=0)[:k]
    chosen = np.take_along_axis((score + noise).astype(np.float64), order, 0)
    wanted = 1 / (1 + np.exp(-(0.7 * chosen - 0.5)))
    wanted /= wanted.sum(axis=0)
    assert np.array_equal(np.sort(experts), np.sort(np.take_along_axis(ids, order, 0).T))
    np.testing.assert_allclose(bits.view(np.float16), wanted.T, rtol=6e-3, atol=2e-7)
    assert (np.diff(bits.astype(np.int64)) <= 0).all()


def test_noise_stays_stationary():
    lanes = streams(3, count=1, lanes=16)[0]
    keep = np.full(16, 0.8, np.float32)
    step = np.full(16, 0.6 * UNIFORM, np.float32)
    noise, parts = np.zeros((12, 16), np.float32), np.zeros((WORD, 16), np.float32)
    seen = []
    for _ in range(3000):
        move(lanes, parts, noise, keep, step)
        seen.append(noise.copy())
    values = np.array(seen[100:])
    assert values.mean() == pytest.approx(0, abs=0.02)
    assert values.std() == pytest.approx(1, abs=0.02)  # 0.8² + 0.6² = 1
    flat = values.reshape(len(values), -1)
    assert np.corrcoef(flat[1:].ravel(), flat[:-1].ravel())[0, 1] == pytest.approx(0.8, abs=0.01)
    assert abs(np.corrcoef(flat.T)[0, 1:]).max() < 0.2  # tokens and candidates go their own ways


DIGEST = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from synthetic_recipes import small_recipe
from oled_sim.synthesis.request import make_request
made = make_request(small_recipe(output_tokens=20, signals=("full_gate",)), 1)
parts = (made.experts, made.gates, made.full_gate, made.confidence, made.state)
print(hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest())
"""


def test_interpreted_kernels_give_the_same_bytes():
    program = [sys.executable, "-c", DIGEST.format(tests=str(TESTS))]
    found = {
        subprocess.run(
            program,
            env=os.environ | {"NUMBA_DISABLE_JIT": flag},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for flag in ("0", "1")
    }
    assert len(found) == 1
