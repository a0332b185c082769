"""Running experiments: what is missing is measured, on several processes if wanted."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from oled_sim.errors import CapacityError
from oled_sim.experiment.base import Experiment, Point, Size
from oled_sim.experiment.inputs import SyntheticTrace
from oled_sim.experiment.store import Store

Progress = Callable[[int, int], None]
Work = tuple[Callable[..., None], Path, Any]


class Finished(NamedTuple):
    """An experiment whose table is on disk. ``measured``: points that were not there before."""

    experiment: Experiment
    table: Path
    points: int
    measured: int


def run_experiments(
    experiments: Sequence[Experiment],
    size: Size,
    folder: Path,
    *,
    jobs: int = 1,
    progress: Progress = lambda done, total: None,
) -> list[Finished]:
    """Measure what is missing of several experiments, and write their tables.

    Points that are there and unchanged are not measured again; after an interrupt the finished
    ones are kept. The same inputs give the same bytes, with any number of ``jobs``.

    Args:
        experiments: which. size: of their grids.
        folder: of the results; made if missing.
        jobs: processes.
        progress: called with (points and traces done, all of them).

    Raises:
        UsageError, TraceError, ProfileError, PolicyError: as simulations do, before anything is
            measured if a profile or trace is missing, or a table in the way is no result.
        CapacityError: a process was killed, mostly for want of memory.
    """
    store = Store(folder)
    grids = {e.name: e.grid(size) for e in experiments}
    for experiment in experiments:
        store.check(experiment)
    every = list(dict.fromkeys(p for grid in grids.values() for p in grid))
    _check_profiles(every, store)
    traces = store.inputs.missing([point.trace for point in every])
    _perform([(_make, folder, trace) for trace in traces], jobs, progress)
    missing = store.missing(every)
    _perform([(_measure, folder, point) for point in missing], jobs, progress)
    found = []
    for experiment in experiments:
        grid = grids[experiment.name]
        table = store.finish(experiment, grid, size)
        new = len([p for p in grid if p in missing])
        found.append(Finished(experiment, table, len(grid), new))
    return found


def _check_profiles(points: Sequence[Point], store: Store) -> None:
    """Find out before anything takes time whether every profile is there."""
    from oled_sim.costs.store import load_profile

    for name in dict.fromkeys(point.profile_for(store.inputs) for point in points):
        if name is not None:
            load_profile(name)


def _measure(folder: Path, point: Point) -> None:
    store = Store(folder)
    store.keep(point, point.measure(store.inputs))


def _make(folder: Path, trace: SyntheticTrace) -> None:
    Store(folder).inputs.make(trace)


def _perform(
    work: Sequence[Work], jobs: int, progress: Progress = lambda done, total: None
) -> None:
    """Do independent pieces of work; the first error ends it, an interrupt keeps what is done."""
    if min(jobs, len(work)) <= 1:
        for done, (function, *arguments) in enumerate(work):
            progress(done, len(work))
            function(*arguments)
        return
    pool = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_ignore_interrupts
    )
    try:
        _wait_for([pool.submit(*piece) for piece in work], progress)
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise _explained(error) from error
    pool.shutdown()


def _wait_for(futures: Sequence[Future[None]], progress: Progress) -> None:
    progress(0, len(futures))
    for done, future in enumerate(as_completed(futures), 1):
        future.result()
        progress(done, len(futures))


def _explained(error: BaseException) -> BaseException:
    from concurrent.futures.process import BrokenProcessPool

    if isinstance(error, BrokenProcessPool):
        return CapacityError(
            "a process that measured was killed, mostly for want of memory: use fewer --jobs;"
            " points that are finished are kept"
        )
    return error


def _ignore_interrupts() -> None:
    """Leave an interrupt to the parent, which ends its children; one thread each is enough."""
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
