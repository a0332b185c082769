"""Running experiments: what is missing is measured, on several processes if wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from oled_sim.experiment.base import Experiment, Point, Size
from oled_sim.experiment.inputs import SyntheticTrace
from oled_sim.experiment.store import Store
from oled_sim.workers import worker_processes

Progress = Callable[[int, int], None]

TOGETHER = 12
"""Most points that are measured in one go: what an interrupt can lose, per process."""


class Work(NamedTuple):
    """A call of a function with a folder and something to do there; ``size`` says how much."""

    function: Callable[[Path, Any], None]
    folder: Path
    what: Any
    size: int = 1


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
    ones are kept. Points of one group are measured in one go, up to a dozen of them. The same
    inputs give the same bytes, with any number of ``jobs``.

    Args:
        experiments: which. size: of their grids.
        folder: of the results; made if missing.
        jobs: processes.
        progress: called with (points and traces done, all of them).

    Raises:
        UsageError, TraceError, ProfileError, PolicyError: as simulations do, before anything is
            measured if a profile or trace is missing, or what is in the way is no result.
        CapacityError: a process was killed, mostly for want of memory.
    """
    store = Store(folder)
    grids = {e.name: e.grid(size) for e in experiments}
    for experiment in experiments:
        store.check(experiment)
    every = list(dict.fromkeys(p for grid in grids.values() for p in grid))
    _check_profiles(every, store)
    traces = store.inputs.missing([point.trace for point in every])
    store.inputs.check(traces)
    _perform([Work(_make, folder, trace) for trace in traces], jobs, progress)
    missing = store.missing(every)
    store.check_parts(missing)
    pieces = in_one_go(missing, jobs)
    _perform([Work(_measure, folder, piece, len(piece)) for piece in pieces], jobs, progress)
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


def in_one_go(points: Sequence[Point], jobs: int) -> list[list[Point]]:
    """Share points out: each piece is of one group, none so large that processes would wait."""
    groups: dict[Hashable, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group(), []).append(point)
    most = min(TOGETHER, max(1, len(points) // (4 * jobs)))
    return [group[i : i + most] for group in groups.values() for i in range(0, len(group), most)]


def _measure(folder: Path, points: Sequence[Point]) -> None:
    store = Store(folder)
    found = points[0].measure_group(points, store.inputs)
    for point, rows in zip(points, found, strict=True):
        store.keep(point, rows)


def _make(folder: Path, trace: SyntheticTrace) -> None:
    Store(folder).inputs.make(trace)


def _perform(
    work: Sequence[Work], jobs: int, progress: Progress = lambda done, total: None
) -> None:
    """Do independent pieces of work; the first error ends it, an interrupt keeps what is done."""
    total = sum(piece.size for piece in work)
    if min(jobs, len(work)) <= 1:
        done = 0
        for piece in work:
            progress(done, total)
            piece.function(piece.folder, piece.what)
            done += piece.size
        return
    with worker_processes(jobs, _use_one_thread) as pool:
        submitted = {pool.submit(w.function, w.folder, w.what): w.size for w in work}
        _wait_for(submitted, lambda done: progress(done, total))


def _wait_for(sizes: Mapping[Future[None], int], report: Callable[[int], None]) -> None:
    done = 0
    report(done)
    for future in as_completed(sizes):
        future.result()
        done += sizes[future]
        report(done)


def _use_one_thread() -> None:
    """Leave the cores to the other processes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
