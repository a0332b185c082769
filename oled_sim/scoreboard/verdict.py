"""The rule that turns a figure of ours and the paper's into a verdict.

In this order:

1. *not testable here*: there is no figure of ours;
2. *by construction*: the figure was a target that our traces were fitted to, or follows from
   definitions alone;
3. *reproduced*: what the paper states lies in our 95 % interval, or our figure within 15 % of it;
4. *in direction*: our figure lies on the paper's side of no effect, our interval leaves no effect
   out, and our effect is at least a third of the paper's;
5. *not reproduced*.

A statement of smallness ("at most 15 %") is reproduced or not, never in direction: a larger figure
speaks against it. A statement without a number ("falls", "is lower") can be in direction at best,
since there is nothing to reproduce; for it the third of an effect does not apply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from oled_sim.scoreboard.estimate import Estimate

NEAR = 0.15
"""Part of the stated number that our figure may be off."""

LEAST_PART = 1 / 3
"""Part of the paper's effect that ours must reach to agree in direction."""


class Verdict(Enum):
    """What came of a claim."""

    BY_CONSTRUCTION = "by construction"
    REPRODUCED = "reproduced"
    IN_DIRECTION = "in direction"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True)
class Stated:
    """What the paper states of a figure, in the claim's unit.

    Attributes:
        low, high: the range it names, ends included; equal for a single number, infinite on an
            open side ("more than 65 %"). NaN both: no number, only a direction.
        no_effect: the figure if there were no effect, such as 1 for a ratio.
        rises: for a statement without number, whether the figure is above ``no_effect``.
        text: how the table writes it, if not as the numbers say.
    """

    low: float
    high: float
    no_effect: float
    rises: bool = True
    text: str = ""

    def __post_init__(self) -> None:
        if self.numeric and not self.low <= self.high:
            raise ValueError(f"a range from {self.low} to {self.high} is empty")

    @property
    def numeric(self) -> bool:
        """Whether there is a number to reproduce."""
        return not math.isnan(self.low)

    def nearest(self, value: float) -> float:
        """Return the stated number that is nearest to ``value``."""
        return min(max(value, self.low), self.high)


def exactly(value: float, *, no_effect: float, text: str = "") -> Stated:
    """Return the statement of one number."""
    return Stated(value, value, no_effect, text=text)


def between(low: float, high: float, *, no_effect: float) -> Stated:
    """Return the statement of a range that the figure lies in."""
    return Stated(low, high, no_effect)


def above(low: float, *, no_effect: float) -> Stated:
    """Return the statement that the figure is above a number."""
    return Stated(low, math.inf, no_effect)


def at_most(high: float) -> Stated:
    """Return the statement that the figure is no larger than a number."""
    return Stated(-math.inf, high, no_effect=-math.inf)


def direction(text: str, *, no_effect: float, rises: bool = True) -> Stated:
    """Return a statement without a number."""
    return Stated(math.nan, math.nan, no_effect, rises, text)


def judge(stated: Stated, ours: Estimate | None, *, constructed: bool = False) -> Verdict:
    """Return the verdict on a figure of ours.

    Args:
        stated: what the paper states.
        ours: our figure; None or NaN if there is none.
        constructed: whether it was a fitting target, or follows from definitions.
    """
    if ours is None or math.isnan(ours.value):
        return Verdict.NOT_TESTABLE
    if constructed:
        return Verdict.BY_CONSTRUCTION
    if stated.numeric and (_covers(ours, stated) or _is_near(ours.value, stated)):
        return Verdict.REPRODUCED
    if _agrees_in_direction(ours, stated):
        return Verdict.IN_DIRECTION
    return Verdict.NOT_REPRODUCED


def _covers(ours: Estimate, stated: Stated) -> bool:
    """Whether the interval and what is stated meet; without an interval they do not."""
    return ours.low <= stated.high and ours.high >= stated.low


def _is_near(value: float, stated: Stated) -> bool:
    target = stated.nearest(value)
    return abs(value - target) <= NEAR * abs(target)


def _agrees_in_direction(ours: Estimate, stated: Stated) -> bool:
    upward = _upward(stated, ours.value)
    excludes = ours.low > stated.no_effect if upward else ours.high < stated.no_effect
    if not stated.numeric:
        return excludes
    if math.isinf(stated.low) and stated.low < 0:
        return False
    theirs = stated.nearest(ours.value) - stated.no_effect
    return excludes and abs(ours.value - stated.no_effect) >= LEAST_PART * abs(theirs)


def _upward(stated: Stated, value: float) -> bool:
    """Whether the paper's figure lies above no effect."""
    return stated.nearest(value) > stated.no_effect if stated.numeric else stated.rises
