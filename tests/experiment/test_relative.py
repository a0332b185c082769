"""Ratios to a policy, by hand."""

import pandas as pd
import pytest

from oled_sim.experiment.relative import relative


def rows(policy, times, cache=40):
    return [
        {"policy": policy, "cache": cache, "trace": "t", "request": i, "tpot_us": time}
        for i, time in enumerate(times)
    ]


def test_means_are_divided_within_their_group():
    table = pd.DataFrame(
        rows("lru", [4.0, 8.0]) + rows("ideal", [2.0, 2.0]) + rows("lru", [3.0, 3.0], 100)
        + rows("ideal", [1.0, 3.0], 100)
    )  # fmt: skip
    found = relative(table, "ideal", ["cache"]).set_index(["cache", "policy"])
    assert found["ratio"].to_dict() == {
        (40, "lru"): 3.0, (40, "ideal"): 1.0, (100, "lru"): 1.5, (100, "ideal"): 1.0
    }  # fmt: skip
    assert found.loc[(40, "lru"), "low"] == 2.0  # both draws the first request
    assert found.loc[(40, "lru"), "high"] == 4.0
    assert found.loc[(40, "lru"), "requests"] == 2


def test_requests_are_paired_by_number_not_by_place():
    table = pd.DataFrame(rows("lru", [4.0, 8.0]) + rows("ideal", [2.0, 4.0])[::-1])
    found = relative(table, "ideal", ["cache"]).set_index("policy").loc["lru"]
    assert (found["ratio"], found["low"], found["high"]) == (2.0, 2.0, 2.0)


def test_a_missing_reference_is_an_error():
    with pytest.raises(KeyError):
        relative(pd.DataFrame(rows("lru", [1.0])), "ideal", ["cache"])
