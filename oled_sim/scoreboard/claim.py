"""A quantitative claim of the paper, and what we found about it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from oled_sim.scoreboard.estimate import Estimate, Statistic
from oled_sim.scoreboard.verdict import Stated, Verdict, judge

if TYPE_CHECKING:
    import pandas as pd

Evidence = Literal["synthetic", "real", "measured"]
"""What a figure of ours rests on: simulated on synthetic traces of the paper's size, simulated on
recorded traces of a small model with mini's routing geometry, or replayed on hardware."""

ORDER: tuple[Evidence, ...] = ("synthetic", "real", "measured")

UNTOLD = "No table of this run has the settings that it compares."

REPLAYS = "replays"
"""Name of the table of replayed points, among those of experiments."""


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        key: short name, unique.
        section: of the paper, with the figure.
        text: what is claimed.
        stated: the paper's number.
        unit: ``×``, ``%``, ``points``, ``ms`` or nothing.
        experiment: whose table it is read from; None if it cannot be tested here.
        statistic: our figure in that unit, from means over requests; raises
            ``MissingSettingError`` where a table lacks a setting.
        names, columns: what tells settings apart, and what means are taken of.
        rows: selects the rows of the table that count.
        constructed: evidence on which it was a fitting target, or follows from definitions.
        replayed: whether replays on hardware can tell it too.
        why: one sentence: where we differ, why; where it cannot be tested, what is missing.
    """

    key: str
    section: str
    text: str
    stated: Stated
    unit: str
    experiment: str | None
    statistic: Statistic
    names: tuple[str, ...] = ("model", "data_set", "policy", "cache")
    columns: tuple[str, ...] = ("tpot_us",)
    rows: Callable[[pd.DataFrame], pd.DataFrame] = lambda table: table
    constructed: Collection[Evidence] = ()
    replayed: bool = False
    why: str = ""


@dataclass(frozen=True)
class Reading:
    """A figure of ours for a claim. ``machine``: whose costs; empty where costs have no part."""

    evidence: Evidence
    machine: str
    estimate: Estimate
    verdict: Verdict


@dataclass(frozen=True)
class Judged:
    """A claim with everything that was found about it."""

    claim: Claim
    readings: tuple[Reading, ...]

    @property
    def why(self) -> str:
        """The claim's sentence; where its experiment says nothing, what is missing."""
        if self.claim.experiment is not None and not self.readings:
            return UNTOLD
        return self.claim.why

    def of(self, evidence: Evidence, machine: str) -> Reading | None:
        """Return the reading of some evidence under a machine's costs, or under none."""
        return next(
            (r for r in self.readings if r.evidence == evidence and r.machine in (machine, "")),
            None,
        )

    def verdict(self, machine: str) -> Verdict:
        """Return the verdict under a machine's costs.

        That of synthetic traces, which have the paper's size; where it was built into those, that
        of recorded ones; where nothing is simulated, that of replays.
        """
        found = [r for e in ORDER if (r := self.of(e, machine)) is not None]
        for reading in found:
            if reading.verdict is not Verdict.BY_CONSTRUCTION:
                return reading.verdict
        return found[0].verdict if found else Verdict.NOT_TESTABLE


def read(claim: Claim, evidence: Evidence, machine: str, estimate: Estimate) -> Reading:
    """Return a judged figure of ours."""
    constructed = evidence in claim.constructed
    return Reading(
        evidence, machine, estimate, judge(claim.stated, estimate, constructed=constructed)
    )
