"""Progress of work whose share is known: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

PATIENCE_S = 2.0
"""Work shorter than this shows nothing."""

LINE_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""


@contextmanager
def share_progress(
    label: str, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[float], None]]:
    """Yield a callback that takes the share of the work done, 0 to 1, and shows it on stderr."""
    from rich.console import Console  # not for --help
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(stderr=True)
    began = clock()
    if not console.is_terminal:
        yield _lines(label, began, clock)
        return
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(escape(label), total=1.0, visible=False)

        def show(done: float) -> None:
            late = clock() - began >= PATIENCE_S
            bar.update(task, completed=done, visible=late, refresh=late)

        yield show


def _lines(label: str, began: float, clock: Callable[[], float]) -> Callable[[float], None]:
    said = began

    def say(done: float) -> None:
        nonlocal said
        if clock() - said >= LINE_EVERY_S and done < 1:
            said = clock()
            click.echo(f"{label}: {100 * done:.0f} %", err=True)

    return say
