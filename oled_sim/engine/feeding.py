"""Requests read in order and put together to batches, as the rules of a run say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.batch import Batch, batch_of, make_batch
from oled_sim.engine.members import Member
from oled_sim.engine.rules import Group, Rules, Splits
from oled_sim.engine.source import Source
from oled_sim.trace.schema import RequestTrace


def feed(
    source: Source, splits: Splits, rules: Rules, costs: LaneCosts, *, learns: bool
) -> Iterator[tuple[Group, Batch]]:
    """Yield what runs together, made ready; memory holds the requests of one batch.

    Args:
        source: the trace.
        splits: its requests by what they are for.
        rules: batch size, batch mode, confidence.
        costs: lane costs, for everything that no policy changes.
        learns: whether the history split is run.
    """
    for split, requests in splits.parts(learns=learns):
        if rules.batch_mode == "refill":
            yield from _refilled(source, split, requests, rules, costs)
            continue
        for i in range(0, len(requests), rules.batch):
            group = Group(split, requests[i : i + rules.batch])
            traces = [source.read(request) for request in group.requests]
            yield (
                group,
                make_batch(traces, source.geometry, costs, rules.confidence, mode=rules.batch_mode),
            )


class _Running(NamedTuple):
    """A request that is present, and how many of its passes have run."""

    trace: RequestTrace
    done: int

    @property
    def left(self) -> int:
        return self.trace.passes - self.done


def _refilled(
    source: Source, split: str, requests: tuple[int, ...], rules: Rules, costs: LaneCosts
) -> Iterator[tuple[Group, Batch]]:
    """Yield the stretches of one batch whose finished requests are replaced by the next ones."""
    coming, running, start = list(requests), list[_Running](), 0
    while coming or running:
        begun = tuple(r.trace.request for r in running)
        if not begun:
            start = 0
        new, coming = coming[: rules.batch - len(running)], coming[rules.batch - len(running) :]
        running += [_Running(source.read(request), 0) for request in new]
        # Until the first one ends; the last requests run on without replacement.
        passes = (min if coming else max)(r.left for r in running)
        group = Group(
            split,
            tuple(r.trace.request for r in running),
            begun,
            tuple(r.trace.request for r in running if r.left > passes),
        )
        members = [_stretch(r, min(passes, r.left)) for r in running]
        yield group, batch_of(members, source.geometry, costs, rules.confidence, start=start)
        running = [_Running(r.trace, r.done + passes) for r in running if r.left > passes]
        start += passes


def _stretch(running: _Running, passes: int) -> Member:
    return Member(running.trace, running.done, running.done + passes, np.arange(passes))
