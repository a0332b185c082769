"""Correlations and orders, worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.validation.ranking import Contest, kendall, pearson, rank, ranks, spearman

NAN = float("nan")
values = st.lists(st.integers(0, 6), min_size=2, max_size=9)


class TestRanks:
    def test_from_one_in_order(self):
        assert ranks([30, 10, 20]).tolist() == [3, 1, 2]

    def test_ties_share_the_mean_rank(self):
        assert ranks([5, 7, 5, 9, 5]).tolist() == [2, 4, 2, 5, 2]

    @given(values)
    def test_sum_is_that_of_whole_ranks(self, x):
        assert ranks(x).sum() == len(x) * (len(x) + 1) / 2


class TestCorrelations:
    def test_pearson_by_hand(self):
        # Deviations (-1, 0, 1) and (-1, 1, 0): 1 / √(2 · 2).
        assert pearson([1, 2, 3], [0, 2, 1]) == pytest.approx(0.5)

    def test_spearman_looks_at_order_alone(self):
        assert spearman([1, 2, 3], [10, 100, 1e6]) == 1
        assert pearson([1, 2, 3], [10, 100, 1e6]) < 0.9
        assert spearman([1, 2, 3], [3, 2, 1]) == -1

    def test_kendall_by_hand(self):
        # Of six pairs one is the other way round: (5 - 1) / 6.
        assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)

    def test_kendall_with_a_tie_by_hand(self):
        # τ-b: two pairs agree, one is tied on one side: 2 / √(3 · 2).
        assert kendall([1, 2, 3], [1, 1, 2]) == pytest.approx(2 / np.sqrt(6))

    @pytest.mark.parametrize("of", [pearson, spearman, kendall])
    def test_nothing_without_variation(self, of):
        assert np.isnan(of([1, 1, 1], [1, 2, 3])) and np.isnan(of([1], [1]))

    @given(values, st.randoms(use_true_random=False))
    def test_bounds_symmetry_and_identity(self, x, random):
        y = random.sample(x, len(x))
        for of in (pearson, spearman, kendall):
            assert of(x, y) == pytest.approx(of(y, x), nan_ok=True)
            if len(set(x)) > 1:
                assert -1 - 1e-12 <= of(x, y) <= 1 + 1e-12
                assert of(x, x) == pytest.approx(1)
                assert of(x, [-v for v in x]) == pytest.approx(-1)


class TestRank:
    def test_policies_that_hardware_cannot_tell_apart_do_not_count(self):
        found = rank(
            "here",
            [
                Contest("a", predicted_us=120, measured_us=100, spread_us=4),
                Contest("b", predicted_us=110, measured_us=103, spread_us=1),  # within a's spread
                Contest("c", predicted_us=115, measured_us=130, spread_us=1),
            ],
        )
        # a-b are 3 apart with a spread of 4; a-c and b-c are separated, and only a-c is swapped.
        assert (found.pairs, found.separated, found.unknown) == (3, 2, 0)
        (swapped,) = found.swapped
        assert swapped.startswith("a is faster than c on hardware (0.1 and 0.13 ms)")
        assert [c.policy for c in found.contests] == ["a", "b", "c"]
        assert found.kendall == pytest.approx(-1 / 3)

    def test_a_gap_as_large_as_the_spread_does_not_separate(self):
        found = rank("", [Contest("a", 2, 100, 3), Contest("b", 1, 103, 2)])
        assert (found.separated, found.swapped) == (0, ())

    def test_equal_predictions_of_separated_policies_are_a_miss(self):
        found = rank("", [Contest("a", 5, 100, 1), Contest("b", 5, 103, 1)])
        assert (found.separated, len(found.swapped)) == (1, 1)

    def test_an_unknown_spread_tells_nothing(self):
        found = rank("", [Contest("a", 2, 100, NAN), Contest("b", 1, 200, 1)])
        assert (found.pairs, found.separated, found.unknown) == (1, 0, 1)

    def test_the_same_order_is_no_miss(self):
        found = rank("", [Contest(str(i), 10.0 * i, 9.0 * i, 0.1) for i in range(1, 5)])
        assert (found.pairs, found.separated, found.swapped) == (6, 6, ())
        assert (found.spearman, found.kendall) == (pytest.approx(1), pytest.approx(1))
