"""A point that counts how often it is measured, in a file; importable by other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oled_sim.experiment import Experiment, Inputs, Point, Rows
from oled_sim.plotting.style import page_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Counted(Point):
    """``log``: a file that gets a line per measurement. ``fails``: raises instead of measuring."""

    number: int
    log: str
    fails: bool = False

    def to_dict(self):
        return {"point": "Counted", "trace": str(self.trace), "number": self.number}

    def labels(self):
        return {"trace": str(self.trace), "number": self.number}

    def measure(self, inputs: Inputs) -> Rows:
        if self.fails:
            raise KeyboardInterrupt
        with Path(self.log).open("a") as file:
            file.write(f"{self.number}\n")
        return [{"request": r, "square": self.number**2} for r in range(2)]


def plot(table: pd.DataFrame) -> Figure:
    with styled():
        figure = page_figure()
        figure.subplots().plot(table["number"], table["square"])
    return figure


def counting(log: Path, numbers=(3, 1, 2), *, failing=(), name="counting") -> Experiment:
    return Experiment(
        name,
        "squares",
        "none",
        lambda size: [Counted("nano-gsm8k", n, str(log), n in failing) for n in numbers],
        plot,
    )
