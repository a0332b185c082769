"""Processes that work for this one, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def worker_processes(
    jobs: int, prepare: Callable[[], None] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of fresh processes; an error or a stop inside ends them at once.

    Ctrl-C in a terminal and batch systems signal the whole group of processes. Whether to stop is
    this process's to decide: were workers to end by themselves, it would see a broken pool.

    Args:
        jobs: how many processes.
        prepare: called first in each; a function of a module.
    """
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), prepare),
    )
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()
        raise
    pool.shutdown()


def _begin(parent: int, prepare: Callable[[], None] | None) -> None:
    def end_as_orphan(number: int, _: FrameType | None) -> None:
        if os.getppid() != parent:  # nobody else would end this process
            os._exit(128 + number)

    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, end_as_orphan)
    if prepare is not None:
        prepare()
