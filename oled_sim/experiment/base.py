"""What an experiment is: a grid of points as plain data, and a figure."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oled_sim.errors import UsageError
from oled_sim.experiment.inputs import Inputs, SyntheticTrace, TraceName
from oled_sim.experiment.sources import ANALYSES, digest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Size = Literal["quick", "full"]
"""``quick``: bundled traces, under a minute on two cores. ``full``: what the figures are about."""

Rows = Sequence[Mapping[str, Any]]
"""Rows of a table; values are numbers, texts, booleans or None."""


@dataclass(frozen=True)
class Point(ABC):
    """One unit of work: the smallest thing that is measured, stored and skipped.

    Subclasses are frozen dataclasses whose fields are plain data: the fields, the contents of the
    trace and of the profile, and the sources decide whether a point is measured anew.

    Attributes:
        trace: bundled name, folder, or a synthetic trace that is made when it is missing.
    """

    trace: TraceName

    @abstractmethod
    def measure(self, inputs: Inputs) -> Rows:
        """Return rows with what was measured; :meth:`labels` are added to each.

        Args:
            inputs: opens traces, and makes synthetic ones.
        """

    def group(self) -> Hashable:
        """Return what this point has in common with those that are measured in one go with it."""
        return self  # by itself

    @classmethod
    def measure_group(cls, points: Sequence[Any], inputs: Inputs) -> list[Rows]:
        """Return the rows of each of some points of one group, as ``measure`` gives them."""
        return [point.measure(inputs) for point in points]

    def labels(self) -> dict[str, Any]:
        """Return the columns that say which point a row is of."""
        about = {"trace": name_of(self.trace), "data_set": data_set_of(self.trace)}
        return {**asdict(self), **about}

    def profile_for(self, inputs: Inputs) -> str | None:
        """Return the name or file of the profile that costs come from, None if there is none."""
        return None

    def code(self) -> str:
        """Return a digest of the core's code that decides what is measured."""
        return digest(ANALYSES)

    @property
    def source(self) -> Path:
        """The file that defines the point's class; its contents decide too."""
        return Path(inspect.getfile(type(self)))

    def to_dict(self) -> dict[str, Any]:
        """Return the class and all fields as plain data."""
        return {"point": type(self).__qualname__, **asdict(self)}


def name_of(trace: TraceName) -> str:
    """Return what tables call a trace."""
    return trace.name if isinstance(trace, SyntheticTrace) else Path(trace).name


def data_set_of(trace: TraceName) -> str:
    """Return the data set of a trace; of a recorded one what follows its model's name."""
    if isinstance(trace, SyntheticTrace):
        return trace.data_set
    parts = Path(trace).name.split("-")
    return parts[1] if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the paper.

    Attributes:
        name: as on the command line, such as ``fig12``; names the files.
        title: what it shows, in a line. section: of the paper.
        points: the grid of a size, in the order of the table.
        plot: from the tidy table to a figure.
    """

    name: str
    title: str
    section: str
    points: Callable[[Size], Sequence[Point]]
    plot: Callable[[pd.DataFrame], Figure]

    def grid(self, size: Size) -> list[Point]:
        """Return the points of a size.

        Raises:
            UsageError: there is none, or one twice.
        """
        points = list(self.points(size))
        if not points:
            raise UsageError(f"experiment {self.name} has no points of size {size!r}")
        if len(set(points)) < len(points):
            twice = next(p for p in points if points.count(p) > 1)
            raise UsageError(f"experiment {self.name} has a point twice: {twice.to_dict()}")
        return points
