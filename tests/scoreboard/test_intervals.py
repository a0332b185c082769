"""Figures over requests: pairing, averaging, intervals."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.scoreboard.estimate import MissingSettingError, Panel, estimate


def rows(**by_policy):
    """Return rows of trace ``t`` with the TPOT of each policy per request."""
    return pd.DataFrame(
        {"trace": "t", "policy": policy, "request": i, "tpot_us": value}
        for policy, values in by_policy.items()
        for i, value in enumerate(values)
    )


def ratio(panel: Panel):
    return panel.mean("tpot_us", policy="lru") / panel.mean("tpot_us", policy="oled")


def of(table, statistic=ratio, **options):
    return estimate(table, ["policy"], ["tpot_us"], statistic, seed=0, **options)


def test_ratio_of_means():
    found = of(rows(lru=[2.0, 4.0], oled=[1.0, 1.0]))
    assert (found.value, found.requests) == (3.0, 2)
    assert (found.low, found.high) == (2.0, 4.0)  # both requests the one, or both the other


def test_requests_are_resampled_in_pairs():
    slow = np.array([1.0, 10.0, 100.0, 1000.0])
    found = of(rows(lru=2 * slow, oled=slow))
    assert found.low == pytest.approx(2.0) == found.high  # unpaired it would be wide


def test_one_request_has_no_interval():
    found = of(rows(lru=[2.0], oled=[1.0]))
    assert found.value == 2.0
    assert np.isnan([found.low, found.high]).all()


def test_traces_count_alike_whatever_their_requests():
    one = rows(oled=[1.0] * 9)
    other = rows(oled=[3.0]).assign(trace="u")
    found = of(pd.concat([one, other]), lambda panel: panel.mean("tpot_us"))
    assert found.value == 2.0


def test_a_request_without_a_figure_counts_for_nothing():
    found = of(rows(oled=[1.0, np.nan, 3.0]), lambda panel: panel.mean("tpot_us"))
    assert found.value == 2.0


def test_a_trace_without_a_figure_counts_for_nothing():
    without = rows(oled=[np.nan, np.nan]).assign(trace="u")
    table = pd.concat([rows(oled=[1.0, 3.0]), without])
    assert of(table, lambda panel: panel.mean("tpot_us")).value == 2.0
    assert np.isnan(of(without, lambda panel: panel.mean("tpot_us")).value)


def test_the_same_seed_gives_the_same_interval():
    table = rows(lru=[2.0, 4.0, 9.0], oled=[1.0, 1.0, 2.0])
    assert of(table) == of(table.sample(frac=1, random_state=1))


def test_a_request_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        of(pd.concat([rows(oled=[1.0]), rows(oled=[1.0])]))


def test_a_setting_that_is_not_there_is_an_error():
    with pytest.raises(MissingSettingError, match="ideal"):
        of(rows(oled=[1.0, 2.0]), lambda panel: panel.mean("tpot_us", policy="ideal"))


@given(st.lists(st.floats(1, 100), min_size=2, max_size=12))
def test_the_interval_holds_the_mean(values):
    found = of(rows(oled=values), lambda panel: panel.mean("tpot_us"), resamples=400)
    slack = 1e-9 * max(values)
    assert found.low - slack <= np.mean(values) <= found.high + slack
