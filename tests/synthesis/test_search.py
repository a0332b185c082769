"""The search for parameters finds least squares that are known, and stays within bounds."""

import numpy as np

from oled_sim.synthesis.search import Search

BOUNDS = {"size": (0.01, 100.0), "share": (0.01, 0.99), "level": (-5.0, 5.0)}
TRUE = {"size": 7.0, "share": 0.8, "level": -1.5}


def misses(values):
    """Return misses of a curve through known parameters: zero at ``TRUE`` alone."""
    x = np.linspace(0, 1, 9)

    def curve(v):
        return v["size"] * np.exp(-x / v["share"]) + v["level"]

    return (curve(values) - curve(TRUE)) / 0.1


def test_known_parameters_are_found():
    found = Search(BOUNDS, misses).run({"size": 1.0, "share": 0.3, "level": 0.0}, 60)
    assert float(misses(found) @ misses(found)) < 0.5
    assert found == Search(BOUNDS, misses).run({"size": 1.0, "share": 0.3, "level": 0.0}, 60)


def test_bounds_hold():
    narrow = BOUNDS | {"size": (0.01, 3.0)}
    tried = []

    def watched(values):
        tried.append(values)
        return misses(values)

    found = Search(narrow, watched).run({"size": 1.0, "share": 0.3, "level": 0.0}, 20)
    for values in [*tried, found]:
        for name, (low, high) in narrow.items():
            assert low <= values[name] <= high
    assert found["size"] > 2.5  # it would like 7
