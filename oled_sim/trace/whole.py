"""Writing a whole trace or nothing: beside what is there, then in its place.

For traces that take minutes and are worthless in part, such as imports. A recording, whose every
request is worth keeping, goes through :class:`oled_sim.trace.writer.TraceWriter` itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oled_sim.errors import TraceError, UsageError
from oled_sim.trace.files import sync_directory
from oled_sim.trace.manifest import MANIFEST, Manifest
from oled_sim.trace.replaced import give_back_files, move
from oled_sim.trace.schema import TABLES
from oled_sim.trace.writer import TraceWriter, refuse_occupied

STAGING = ".unfinished"
"""Folder within the trace's that holds the new one, so that moving it crosses no file system."""


@contextmanager
def whole_trace(
    path: Path, manifest: Manifest, *, overwrite: bool = False
) -> Iterator[TraceWriter]:
    """Yield the writer of a trace that is at ``path`` only once the block has ended well.

    Whatever ends the block early, Ctrl-C included, leaves ``path`` as it was: the trace that was
    there, or no folder at all. A killed process leaves the folder :data:`STAGING`, which the next
    call removes.

    Args:
        path: directory of the trace; made with its parents where absent.
        manifest: everything but the requests.
        overwrite: replace a trace that is there; files of the user stay.

    Raises:
        UsageError: ``path`` holds something and ``overwrite`` is not given, or it is no trace, or
            nothing can be made there.
        TraceError: the file system refuses.
    """
    staging = path / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    refuse_occupied(path, allowed=overwrite)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        _make_folder(staging, path)
        with TraceWriter(staging / "new", manifest) as writer:
            yield writer
        if writer.finished:
            _swap(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # not empty: the trace is there
                folder.rmdir()


def _make_folder(staging: Path, path: Path) -> None:
    try:
        staging.mkdir(parents=True)
    except OSError as error:  # the user has named `path`, not what is made below it
        raise UsageError(
            f"cannot make the trace {path} ({error.strerror}): name another directory"
        ) from None


def _swap(staging: Path, path: Path) -> None:
    """Move the old trace aside and the new one in; the manifest, which makes it one, last."""
    new, old = staging / "new", staging / "old"
    try:
        old.mkdir()
        move((MANIFEST, *TABLES), path, old)
        move((*TABLES, MANIFEST), new, path)
        sync_directory(path)
    except BaseException as error:
        move((*TABLES, MANIFEST), path, new)
        move((*TABLES, MANIFEST), old, path)
        if isinstance(error, OSError):
            raise TraceError(f"{path} cannot be written: {error.strerror}") from None
        raise
    give_back_files(old, path)
