"""Processes that work for this one, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from oled_sim.errors import CapacityError

STOPS = (signal.SIGINT, signal.SIGTERM)
"""What terminals and batch systems send to a whole group of processes."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Workers(ProcessPoolExecutor):
    """A pool whose processes are started by a thread of its own, with stops blocked.

    A stop is raised in the main thread. In the middle of starting a process, it would leave one
    that waits for what it was to be told, which ends with a traceback; now the thread tells it
    first. Processes inherit what is blocked, so none is stopped before :func:`_begin` says how.

    Args:
        starter: the thread. jobs: how many processes. begin: called first in each, with ``about``.
    """

    def __init__(
        self, starter: ThreadPoolExecutor, jobs: int, begin: Callable[..., None], *about: Any
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        super().__init__(jobs, mp_context=spawn, initializer=begin, initargs=about)
        self._starter = starter

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have a function called by one of the processes, which is started if all are busy."""
        return self._starter.submit(super().submit, fn, *args, **kwargs).result()


@contextmanager
def worker_processes(jobs: int, prepare: Callable[[], None] | None = None) -> Iterator[Workers]:
    """Yield a pool of fresh processes; an error or a stop inside ends them at once.

    Ctrl-C in a terminal and batch systems signal the whole group of processes. Whether to stop is
    this process's to decide: were workers to end by themselves, it would see a broken pool.

    Args:
        jobs: how many processes.
        prepare: called first in each; a function of a module.

    Raises:
        CapacityError: one of them was killed.
    """
    with ThreadPoolExecutor(1, initializer=_block_stops) as starter:
        pool = Workers(starter, jobs, _begin, os.getpid(), prepare)
        try:
            yield pool
        except BaseException as error:
            # Waits for a process that is being started, and lets no other be.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            if not isinstance(error, BrokenProcessPool):
                raise
            raise CapacityError(
                "a process of --jobs was killed, mostly for want of memory: use fewer --jobs; what"
                " is finished is kept"
            ) from error
        pool.shutdown()


def _block_stops() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def _begin(parent: int, prepare: Callable[[], None] | None) -> None:
    def end_as_orphan(number: int, _: FrameType | None) -> None:
        if os.getppid() != parent:  # nobody else would end this process
            os._exit(128 + number)

    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, end_as_orphan)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if prepare is not None:
        prepare()
