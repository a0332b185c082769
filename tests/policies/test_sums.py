"""Sums and selections of kernels against numpy's, bit for bit."""

import numpy as np
import pytest

from oled_sim.policies._sums import fill_largest, pairwise_sum


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 63, 127, 128, 129, 136, 255, 256, 1000, 4864])
def test_sums_are_those_of_numpy(n):
    rng = np.random.default_rng(n)
    for _ in range(20):
        values = rng.random(n) * 10.0 ** rng.integers(-8, 8, n)
        assert pairwise_sum(values) == values.sum()


def test_sums_of_rows_are_those_of_numpy():
    values = np.random.default_rng(0).random((19, 256))
    assert pairwise_sum(values.ravel()) == np.add.reduce(values, axis=None)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_the_largest_come_first_and_equals_by_index(n):
    rng = np.random.default_rng(n)
    for _ in range(20):
        values = rng.integers(0, 5, 12).astype(float)
        chosen = np.full(n, -1)
        fill_largest(values, chosen)
        assert chosen.tolist() == np.argsort(-values, kind="stable")[:n].tolist()
