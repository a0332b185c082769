"""Grids of policies, capacities, link bandwidths and batch sizes over one trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oled_sim.contenders import contenders
from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, Result, simulate_all
from oled_sim.engine.source import Source
from oled_sim.policy import Policy


@dataclass(frozen=True)
class Grid:
    """What to run: every combination.

    ``policies``: by label. ``links_gb_s``: bandwidths, None the profile's. ``batches``: sizes.
    """

    policies: Mapping[str, Policy]
    budgets: Sequence[Budget]
    links_gb_s: Sequence[float | None] = (None,)
    batches: Sequence[int] = (1,)

    def contenders(self, experts: int) -> list[Contender]:
        """Return what runs with one batch size: by link, then budget, then policy."""
        return [
            replace(contender, link_gb_s=link)
            for link in self.links_gb_s
            for contender in contenders(self.policies, self.budgets, experts)
        ]


def sweep(
    source: Source,
    grid: Grid,
    costs: LaneCosts,
    rules: Rules | None = None,
    *,
    expert_bytes: NDArray[np.int64] | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Run a grid over a trace; with one batch size each request is read and prepared once.

    Args:
        source: the trace.
        grid: what to run.
        costs: lane costs of the cost geometry.
        rules: how requests are run; its batch size is the grid's.
        expert_bytes: int64 [L], if they differ from the cost geometry's.
        jobs: contenders that run at the same time; the results do not depend on it.
        progress: called with (runs of a request done, all of them).

    Returns:
        Results by batch size, link, budget and policy, in the order given.

    Raises:
        As :func:`~oled_sim.engine.runner.simulate`.
    """
    found: list[Result] = []
    for i, batch in enumerate(grid.batches):
        found += simulate_all(
            source,
            grid.contenders(source.geometry.experts),
            costs,
            replace(rules or Rules(), batch=batch),
            expert_bytes=expert_bytes,
            jobs=jobs,
            progress=progress and part_of(progress, i, len(grid.batches)),
        )
    return found


Progress = Callable[[int, int], None]


def part_of(progress: Progress, part: int, parts: int) -> Progress:
    """Return a callback for one of so many equal parts of the work."""
    return lambda done, total: progress(part * total + done, parts * total)
