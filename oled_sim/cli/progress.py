"""How far a simulation is, on stderr: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from oled_sim.engine.compiled import offers
from oled_sim.engine.events import proceed
from oled_sim.engine.jit import is_compiled
from oled_sim.engine.timeline import open_gate
from oled_sim.policy import Policy

QUIET_S = 10.0
"""Seconds without a line where there is no terminal: short runs say nothing."""

STEP_PERCENT = 10


@contextmanager
def progress(
    kernels: Iterable[Any], doing: str = "Simulating"
) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that takes (parts done, all parts); say first if kernels are compiled.

    Args:
        kernels: the large ones that will be called, see :func:`kernels_of`.
        doing: what takes so long, as the beginning of a line.
    """
    say_if_compiling(kernels)
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(doing).update
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def say_if_compiling(kernels: Iterable[Any]) -> None:
    """Say on stderr that the first call of these kernels takes a while, if it does."""
    if not all(map(is_compiled, kernels)):
        click.echo("Compiling kernels once, about half a minute", err=True)


def kernels_of(policies: Iterable[Policy]) -> set[Any]:
    """Return what has to be compiled to simulate policies.

    Those that decide in a kernel do without the engine's own loop, but not without ``open_gate``.
    """
    return {open_gate if offers(policy) else proceed for policy in policies}


class Lines:
    """Progress in plain lines: one per tenth of the work, and none in quick succession.

    Args:
        doing: how a line begins.
        clock: seconds of a monotone clock.
    """

    def __init__(
        self, doing: str = "Simulating", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._doing = doing
        self._clock = clock
        self._said_at = clock()
        self._said = 0

    def update(self, done: int, total: int) -> None:
        """Take note of the parts done, and print a line if it is time for one."""
        percent = 100 * done // max(total, 1)
        due = self._clock() - self._said_at >= QUIET_S
        if due and self._said + STEP_PERCENT <= percent < 100:
            self._said, self._said_at = percent, self._clock()
            click.echo(f"{self._doing}: {percent} %", err=True)
