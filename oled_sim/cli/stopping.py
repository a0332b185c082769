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


class Interrupt(KeyboardInterrupt):
    """A signal came.

    A class of its own: where a KeyboardInterrupt itself has left code that is made from text, as
    dataclasses are, CPython ends the process with -2 whatever its exit code is, caught or not.
    """


class Stop:
    """Which signal stopped a command: Ctrl-C, unless another has come.

    Attributes:
        number: of the signal.
        over: whether the command has ended, so that nothing is left to be stopped by SIGTERM.
        deaf_until_s: until when SIGTERM is taken for a repetition of the one before.
    """

    number: int = signal.SIGINT
    over: bool = False
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
    """Return the name of the command that runs, the program's before it has been looked up."""
    context = click.get_current_context()
    name = " ".join(context.command_path.split()[1:])
    return name or context.invoked_subcommand or context.command_path


@contextmanager
def signals_interrupt(*, process_ends: bool = False) -> Iterator[Stop]:
    """Let Ctrl-C and SIGTERM raise :class:`Interrupt` inside; yield what tells the two apart.

    Only where they would interrupt or end the process: who handles or ignores one goes on doing
    so. Between the start of the interpreter and here they do end it, with -2 or -15: nothing has
    begun.

    Args:
        process_ends: whether nothing but the interpreter's end comes afterwards. After SIGTERM the
            exit code then is the command's, whenever it comes.
    """
    stop = Stop()

    def terminated(number: int, _: FrameType | None) -> None:
        # `timeout` and batch systems may send it to the process and again to its group: the second
        # must not disturb the cleanup. One that is sent later counts: code that catches everything
        # may have swallowed the first.
        now_s = time.monotonic()
        if stop.over or now_s < stop.deaf_until_s:
            return
        stop.deaf_until_s = now_s + REPEATED_S
        stop.number = number
        raise Interrupt

    def interrupted(*_: object) -> None:
        raise Interrupt

    with _handled(signal.SIGINT, interrupted), _handled(signal.SIGTERM, terminated) as ours:
        try:
            yield stop
        finally:
            stop.over = True
            # What the interpreter does at its end is not to be disturbed either.
            if ours and (process_ends or stop.number == signal.SIGTERM):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)


USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""What handles signals where nobody has said otherwise."""


@contextmanager
def _handled(
    number: signal.Signals, handler: Callable[[int, FrameType | None], None]
) -> Iterator[bool]:
    """Handle a signal inside, if it is handled as usual; yield whether it is.

    Another handler that is set inside stays.
    """
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(number) is USUAL[number]
    if ours:
        signal.signal(number, handler)
    try:
        yield ours
    finally:
        if ours and signal.getsignal(number) is handler:
            signal.signal(number, USUAL[number])
