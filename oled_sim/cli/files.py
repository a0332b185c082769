"""Files that a command is to write, looked at before anything takes time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from oled_sim.engine.output import NewFile, refuse_existing
from oled_sim.errors import UsageError
from oled_sim.places import kind_of

TABLE = (".parquet", ".csv")
PARQUET = (".parquet",)
FIGURE = (".png", ".svg")

# A name without a suffix promises nothing; a table in it is Parquet.
_MAY_BE_BARE = (TABLE, PARQUET)


def check_files(
    files: Mapping[str, Path | None], *, forms: Mapping[str, tuple[str, ...]], force: bool
) -> None:
    """Find out before the simulation whether its results can be written.

    Args:
        files: by option; None where it was not given.
        forms: by option, the suffixes that it can write; any if it is not among them.
        force: whether files may be overwritten.

    Raises:
        UsageError: a file exists or cannot be made there, two are one, or a suffix promises
            another format.
    """
    given = {option: path for option, path in files.items() if path is not None}
    for option, path in given.items():
        if option in forms:
            _check_suffix(option, path, forms[option])
        refuse_existing(path, force=force)
    if len({os.path.realpath(path) for path in given.values()}) < len(given):
        raise UsageError(f"{' and '.join(given)} name the same file: give each its own")


def _check_suffix(option: str, path: Path, forms: tuple[str, ...]) -> None:
    if path.suffix in forms or (not path.suffix and forms in _MAY_BE_BARE):
        return
    raise UsageError(
        f"what {option} writes is saved as {' or '.join(forms)}, not as {path.name}: give a name"
        f" that ends in {forms[0]}"
    )


def require_parent(path: Path) -> None:
    """Refuse a path whose folder is not there.

    Raises:
        UsageError: says so.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder: create it first")


def require_folder(path: Path) -> None:
    """Refuse a folder for results, there or not, that nothing can be written into.

    Raises:
        UsageError: something else is there, it may not be written to, or cannot be made.
    """
    _refuse_no_folder(path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NewFile(path).refused(error) from None
    finally:
        may_write = os.access(path, os.W_OK | os.X_OK)
        for folder in made:
            with suppress(OSError):  # not made, or another process has put something there
                folder.rmdir()
    if not may_write:
        raise UsageError(f"{path} may not be written to: give another folder")


def _refuse_no_folder(path: Path) -> None:
    if os.path.lexists(path) and not path.is_dir():
        raise UsageError(f"{path} is {kind_of(path)}: give a folder")


@contextmanager
def folder_for(folder: Path) -> Iterator[None]:
    """Make a folder for results; what fails inside leaves no empty one behind.

    Raises:
        UsageError: something else is there, or it cannot be made.
    """
    require_parent(folder)
    _refuse_no_folder(folder)
    was_there = folder.is_dir()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise NewFile(folder).refused(error) from None
    try:
        yield
    except BaseException:
        if not was_there:
            with suppress(OSError):  # not empty: what is finished stays
                folder.rmdir()
        raise
