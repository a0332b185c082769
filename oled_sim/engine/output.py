"""Files that results are written to: never over another file unasked, never half."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from oled_sim.errors import FileError, UsageError

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors that no other name in the same place would mend."""


def refuse_existing(path: Path, *, force: bool, flag: str = "--force") -> None:
    """Refuse to overwrite a file unasked, and to write where nothing can be written.

    Args:
        path: of the file. force: whether it may be overwritten. flag: the option that allows it.

    Raises:
        UsageError: the file exists and ``force`` is false, its folder does not, or nothing can be
            made there.
    """
    try:
        _refuse_existing(path, force=force, flag=flag)
        _try_to_write(path)
    except OSError as error:
        raise NewFile(path).refused(error) from None


def _refuse_existing(path: Path, *, force: bool, flag: str) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give the name of a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no ordinary file: give the name of one")
    if path.exists() and not force:
        raise UsageError(f"{path} exists: give another name, or {flag} to overwrite it")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder: create it first")


def _try_to_write(path: Path) -> None:
    """Make and remove the temporary file that results will be written to."""
    temporary = NewFile(path).temporary
    temporary.touch()
    temporary.unlink()


class NewFile:
    """A file that appears under its name only once it is whole.

    Use as a context manager around writing to ``temporary``: leaving it without an error puts the
    file in place, if anything was written; with an error nothing is left.

    Attributes:
        path: where it will be.
        temporary: where it is written, in the same folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.part")

    def finish(self) -> None:
        """Do what is left to do before the file is put in place; for subclasses."""

    def refused(self, error: OSError) -> UsageError | FileError:
        """Return the sentence for what the file system refused.

        Another name mends it, unless the disk is full or fails.
        """
        # Libraries put the temporary file's name into their messages; nobody knows that name.
        why = os.strerror(error.errno) if error.errno else error.strerror or error
        if error.errno == errno.ENOENT and self.path.parent.is_dir():
            why = f"{self.path.parent} takes no new files"
        refusal = FileError if error.errno in OF_THE_DISK else UsageError
        return refusal(f"cannot write {self.path}: {why}")

    def __enter__(self) -> Self:
        with suppress(OSError):  # of a process of the same number that was killed
            self.temporary.unlink()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
            if kind is None and self.temporary.exists():
                self._put_in_place()
        except OSError as error:
            raise self.refused(error) from error
        finally:
            with suppress(OSError):
                self.temporary.unlink(missing_ok=True)

    def _put_in_place(self) -> None:
        with self.temporary.open("rb") as file:
            os.fsync(file.fileno())
        self.temporary.replace(self.path)
