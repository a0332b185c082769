"""Runs of figures that have several parts: (a), (b), and so on, in one table."""

from __future__ import annotations

from dataclasses import dataclass

from oled_sim.experiment import RunPoint


@dataclass(frozen=True)
class PartPoint(RunPoint):
    """A run that says which ``part`` of its figure it belongs to."""

    part: str = ""
