"""Being stopped: SIGTERM, which batch systems and ``timeout`` send, ends a run as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import click

from oled_sim.errors import StoppedError

SIGNALLED = 128
"""What shells add to a signal's number to get the exit code of what it ended."""
REPEATED_S = 5.0
"""For how long after a SIGTERM others count as repetitions of it."""


class Stop:
    """Which signal stopped a command: Ctrl-C, unless another has come."""

    number: int = signal.SIGINT
    deaf_until_s: float = 0.0

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM."""
        return SIGNALLED + self.number


@contextmanager
def keeping(what: Callable[[], str]) -> Iterator[None]:
    """Let a stop inside end in a sentence that names the command and says what is kept of it.

    Args:
        what: asked once it has been stopped; what follows "replay stopped: ".

    Raises:
        StoppedError: with that sentence.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(f"{_command()} stopped: {what()}") from None


def _command() -> str:
    """Return the name of the command that runs, without that of the program."""
    context = click.get_current_context()
    return " ".join(context.command_path.split()[1:]) or str(context.invoked_subcommand)


@contextmanager
def sigterm_interrupts() -> Iterator[Stop]:
    """Let SIGTERM raise KeyboardInterrupt inside; yield what tells the two apart.

    Only where SIGTERM would end the process: who handles or ignores it goes on doing so.
    """
    stop = Stop()

    def interrupt(number: int, _: FrameType | None) -> None:
        # `timeout` and batch systems may send it to the process and again to its group: the second
        # must not disturb the cleanup. One that is sent later counts: code that catches everything
        # may have swallowed the first.
        now_s = time.monotonic()
        if now_s < stop.deaf_until_s:
            return
        stop.deaf_until_s = now_s + REPEATED_S
        stop.number = number
        raise KeyboardInterrupt

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield stop
    finally:
        if ours:  # what the interpreter does at its end is not to be disturbed either
            ended = stop.number == signal.SIGTERM
            signal.signal(signal.SIGTERM, signal.SIG_IGN if ended else signal.SIG_DFL)
