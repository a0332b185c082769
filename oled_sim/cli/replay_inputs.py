"""What ``oled-sim replay`` is asked to run, read and checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oled_sim.cli.simulating import asked_for, costs_for, note_ample
from oled_sim.contenders import contenders, require_causal
from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.runner import Contender
from oled_sim.trace import Trace, open_trace


class Inputs(NamedTuple):
    """Traces by the name they were opened by, policies with their caches, what they decide by."""

    traces: dict[str, Trace]
    contenders: list[Contender]
    costs: LaneCosts


def read_inputs(
    sources: Sequence[str],
    policies: Sequence[str],
    caches: Sequence[str],
    model: tuple[str | None, str | None, bool],
) -> Inputs:
    """Read what was asked for; say on stderr if a cache is larger than a layer.

    Args:
        sources: traces. policies, caches: as after ``--policy`` and ``--cache``.
        model: cost geometry and profile by name, and whether that may be extrapolated.

    Raises:
        UsageError: the arguments make no sense, or a policy looks into the future.
        OledSimError: a trace or a profile cannot be read.
    """
    parsed, budgets = asked_for(policies, caches, ())
    require_causal(parsed)
    traces = {name: open_trace(name) for name in dict.fromkeys(sources)}
    first = next(iter(traces.values()))
    experts = first.geometry.experts
    note_ample(budgets, [experts])
    return Inputs(traces, contenders(parsed, budgets, experts), costs_for(first, *model))
