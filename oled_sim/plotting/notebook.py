"""Figures in notebooks: small, the same everywhere, and without pyplot's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oled_sim.plotting.style import image_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 256


@dataclass(frozen=True)
class Shown:
    """A figure that a notebook displays as PNG when it is the last value of a cell."""

    figure: Figure = field(repr=False)

    def _repr_png_(self) -> bytes:
        return image_bytes(self.figure, "png", colours=COLOURS)


def shown(figure: Figure) -> Shown:
    """Return a figure as something that a notebook displays."""
    return Shown(figure)
