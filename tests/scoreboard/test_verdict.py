"""The verdict rule, case by case."""

import math

import pytest

from oled_sim.scoreboard.estimate import Estimate
from oled_sim.scoreboard.verdict import Verdict, above, at_most, between, direction, exactly, judge

NAN = math.nan


def ours(value, low=NAN, high=NAN):
    return Estimate(value, low, high, 5)


SPEEDUP = exactly(1.95, no_effect=1.0)


@pytest.mark.parametrize(
    ("stated", "figure", "expected"),
    [
        (SPEEDUP, ours(1.4, 1.2, 1.96), Verdict.REPRODUCED),  # the interval holds it
        (SPEEDUP, ours(1.95 * 0.86, 1.6, 1.7), Verdict.REPRODUCED),  # within 15 %
        (SPEEDUP, ours(1.95 * 1.14, 2.2, 2.3), Verdict.REPRODUCED),
        (SPEEDUP, ours(1.95 * 0.84, 1.6, 1.7), Verdict.IN_DIRECTION),
        (SPEEDUP, ours(1.32, 1.31, 1.33), Verdict.IN_DIRECTION),  # 0.32 of 0.95 is over a third
        (SPEEDUP, ours(1.31, 1.30, 1.32), Verdict.NOT_REPRODUCED),  # 0.31 is not
        (SPEEDUP, ours(1.5, 0.99, 1.9), Verdict.NOT_REPRODUCED),  # may be no effect
        (SPEEDUP, ours(0.5, 0.4, 0.6), Verdict.NOT_REPRODUCED),  # the other way
        (SPEEDUP, ours(9.0, 8.0, 10.0), Verdict.IN_DIRECTION),  # more than stated
        (SPEEDUP, ours(1.5), Verdict.NOT_REPRODUCED),  # no interval excludes nothing
        (SPEEDUP, ours(1.9), Verdict.REPRODUCED),  # but being near needs none
        (SPEEDUP, ours(NAN), Verdict.NOT_TESTABLE),
        (SPEEDUP, None, Verdict.NOT_TESTABLE),
        (between(0.85, 0.90, no_effect=0.0), ours(0.87), Verdict.REPRODUCED),
        (between(0.85, 0.90, no_effect=0.0), ours(0.73, 0.72, 0.74), Verdict.REPRODUCED),
        (between(0.85, 0.90, no_effect=0.0), ours(0.71, 0.70, 0.72), Verdict.IN_DIRECTION),
        (above(0.65, no_effect=0.0), ours(0.99, 0.98, 1.0), Verdict.REPRODUCED),
        (above(0.65, no_effect=0.0), ours(0.16, 0.15, 0.17), Verdict.NOT_REPRODUCED),
        (exactly(-54.0, no_effect=0.0), ours(-30.0, -31.0, -29.0), Verdict.IN_DIRECTION),
        (exactly(-54.0, no_effect=0.0), ours(30.0, 29.0, 31.0), Verdict.NOT_REPRODUCED),
        (at_most(15.0), ours(2.0, 1.0, 3.0), Verdict.REPRODUCED),
        (at_most(15.0), ours(17.0, 16.5, 18.0), Verdict.REPRODUCED),  # within 15 %
        (at_most(15.0), ours(60.0, 14.0, 90.0), Verdict.REPRODUCED),  # the interval reaches it
        (at_most(15.0), ours(60.0, 50.0, 70.0), Verdict.NOT_REPRODUCED),
        (direction("falls", no_effect=0.0, rises=False), ours(-1, -2, -0.5), Verdict.IN_DIRECTION),
        (direction("falls", no_effect=0.0, rises=False), ours(-1, -2, 0.5), Verdict.NOT_REPRODUCED),
        (direction("rises", no_effect=0.0), ours(1, 0.5, 2), Verdict.IN_DIRECTION),
    ],
)  # fmt: skip
def test_rule(stated, figure, expected):
    assert judge(stated, figure) is expected


def test_a_fitting_target_is_never_a_finding():
    assert judge(SPEEDUP, ours(1.95, 1.9, 2.0), constructed=True) is Verdict.BY_CONSTRUCTION
    assert judge(SPEEDUP, None, constructed=True) is Verdict.NOT_TESTABLE


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="empty"):
        between(2.0, 1.0, no_effect=0.0)
