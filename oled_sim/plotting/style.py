"""One look for every figure, and files that depend on nothing but the figure."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.style
from matplotlib.figure import Figure

from oled_sim.errors import UsageError
from oled_sim.trace.files import write_atomic

if TYPE_CHECKING:
    import pandas as pd

STYLE = "oled_sim.plotting.oled_sim"
"""The style file, by the name that ``matplotlib.style.use`` takes."""

PAGE_WIDTH = 7.0
"""Width of a figure over both columns of a page, in inches."""

# What matplotlib would write into files on its own: dates and its version.
_METADATA = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the look of oled-sim while this lasts."""
    with matplotlib.style.context(STYLE, after_reset=True):
        yield


def page_figure(height: float = 2.4) -> Figure:
    """Return an empty figure of a page's width; ``height`` in inches. Call within ``styled``."""
    return Figure(figsize=(PAGE_WIDTH, height))


def save(figure: Figure, path: Path, *, colours: int | None = None) -> None:
    """Write ``figure`` as PNG or SVG, by the suffix of ``path``; equal figures give equal bytes.

    ``colours``: as in :func:`image_bytes`.

    Raises:
        UsageError: another suffix.
        TraceError: the file cannot be written.
    """
    write_atomic(path, image_bytes(figure, path.suffix.lstrip("."), colours=colours))


def image_bytes(figure: Figure, form: str, *, colours: int | None = None) -> bytes:
    """Return ``figure`` as ``png`` or ``svg``, without dates or versions.

    Args:
        figure, form: what, and as what.
        colours: the most that a PNG may have, up to 256, with which a heat map looks the same in
            a third of the bytes. None is all of them.

    Raises:
        UsageError: another form.
    """
    if form not in _METADATA:
        raise UsageError(f"figures are saved as {' or '.join(_METADATA)}, not as {form or 'that'}")
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=form, metadata=_METADATA[form])
    return _with_colours(buffer, colours) if colours and form == "png" else buffer.getvalue()


def _with_colours(png: io.BytesIO, colours: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.open(png).convert("RGB").quantize(
        # By the span of the colours, not by how often each occurs: most of a figure is white.
        colours, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE,
    )  # fmt: skip
    image.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def by_trace(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the label and the rows of each trace: its name, and whether it is real."""
    for (trace, origin), rows in table.groupby(["trace", "origin"], sort=False):
        yield f"{trace} ({origin})", rows
