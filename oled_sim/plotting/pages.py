"""Pages of experiments: a legend, a row of panels per setting, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oled_sim.experiment.relative import SETTING
from oled_sim.plotting.captions import provenance, setting_name
from oled_sim.plotting.style import page_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

LEGEND, CAPTION = 0.3, 0.32
"""Heights in inches."""


@dataclass
class Page:
    """A figure of a page's width with a row per setting: costs, real or synthetic, and model.

    Call within :func:`~oled_sim.plotting.style.styled`. ``columns``: panels per row. ``height``:
    of a row in inches.
    """

    table: pd.DataFrame
    columns: int
    height: float = 1.9

    def __post_init__(self) -> None:
        self._groups = list(self.table.groupby(list(SETTING), sort=False))
        rows = len(self._groups)
        heights = [LEGEND, *[self.height] * rows, CAPTION]
        self.figure: Figure = page_figure(sum(heights))
        parts = self.figure.subfigures(rows + 2, 1, squeeze=False, height_ratios=heights)[:, 0]
        self._legend: SubFigure = parts[0]
        self._rows: list[SubFigure] = list(parts[1:-1])
        parts[-1].text(0.5, 0.5, provenance(self.table), ha="center", va="center", fontsize=6)

    def rows(self) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame, list[Axes]]]:
        """Yield setting, its rows of the table, and its panels."""
        for part, (setting, rows) in zip(self._rows, self._groups, strict=True):
            part.suptitle(setting_name(*map(str, setting)), x=0.01, ha="left", fontsize=8)
            yield setting, rows, list(part.subplots(1, self.columns, squeeze=False)[0])

    def legend(self, axes: Axes, columns: int = 6) -> None:
        """Put the legend of a panel above all of them."""
        handles, labels = axes.get_legend_handles_labels()
        self._legend.legend(handles, labels, loc="center", ncols=min(columns, len(labels)))
