"""Importers: plug-ins that turn the recording of another tool into a trace.

An importer is a callable in the entry-point group :data:`oled_sim.plugins.IMPORTERS`, one per
source format. ``oled-sim import`` finds it by name. What it takes beyond the arguments of
:class:`Importer` it declares with :func:`oled_sim.plugin_options.takes`; every such option becomes
an option of ``oled-sim import FORMAT`` and arrives as a keyword argument if it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from oled_sim.errors import UsageError
from oled_sim.plugin_options import PluginOption, number
from oled_sim.trace.manifest import Manifest

AS_BLOCKS = PluginOption(
    "--as-blocks",
    "N",
    "Put the passes of an autoregressive recording together to blocks of N tokens.",
    number("--as-blocks", 2),
)
"""For importers that hand their requests through :func:`oled_sim.trace.reblock.reblock`."""


class Importer(Protocol):
    """Converts one file.

    Memory must be bounded by one request, and nothing may be written before the whole file has
    been found to be well-formed.
    """

    def __call__(
        self,
        source: Path,
        out: Path,
        *,
        stands_for: str | None = None,
        overwrite: bool = False,
        on_progress: Callable[[float], None] = lambda _: None,
        on_note: Callable[[str], None] = lambda _: None,
    ) -> Manifest:
        """Write the trace directory ``out`` and return its manifest.

        Args:
            source: the recording.
            out: directory of the trace.
            stands_for: cost geometry that results use by default; None if there is none.
            overwrite: replace a trace that is there.
            on_progress: called with the share of the work done, 0 to 1.
            on_note: called with a sentence about rows or signals that were left out.

        Raises:
            TraceError: the recording is malformed; names file and line.
            UsageError: ``out`` holds something and ``overwrite`` is not given.
        """
        ...


def check_out(out: Path, *, overwrite: bool, flag: str = "overwrite=True") -> None:
    """Refuse a directory that the trace could not go to, before a long file is read.

    ``flag``: what the caller gives to have a trace replaced, for the message.

    Raises:
        UsageError: ``out`` is a file, or holds something and ``overwrite`` is not given.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: name a directory for the trace")
    if not overwrite and out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: choose another directory, or give {flag}")


def counted(number: int, one: str, many: str = "") -> str:
    """Return ``1 request`` or ``2 requests``, for a sentence; ``many`` where no s makes it so."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
