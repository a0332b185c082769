"""Standard output and error that take nothing more: a full disk, a reader that went away."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def as_far_as_taken() -> Iterator[None]:
    """Say something on stderr, if that takes anything: an exit code stands without it, too."""
    try:
        yield
    except OSError:
        abandon(sys.stderr)


def flush_stdout() -> None:
    """Write what is still in the buffer: what fails at the interpreter's end goes unnoticed."""
    if sys.stdout is not None:  # closed from the start
        sys.stdout.flush()


def refusal_of_stdout() -> OSError | None:
    """Return why stdout takes nothing more, None if it does: one line, empty.

    To be asked where something could not be written, and the error does not say what to.
    """
    try:
        print(flush=True)
    except OSError as error:
        return error
    return None


def abandon(stream: TextIO) -> None:
    """Send what a stream has not taken nowhere: a second failure at the end would be noise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
