"""The trace of a run, simulated: did the simulator decide the same, and how long would it take?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, Result, simulate_all
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.source import Source
from oled_sim.engine.state import PASS_COUNTS
from oled_sim.offloaded.session import LiveRequest
from oled_sim.validation.decisions import Decisions, compare_tables
from oled_sim.validation.predicted import Prediction
from oled_sim.validation.rows import event_rows, pass_rows


class Agreement(NamedTuple):
    """``predicted``: figures of the simulation. ``decisions``: both compared, event by event."""

    predicted: Result
    decisions: Decisions


def simulate_again(
    source: Source,
    done: Sequence[LiveRequest],
    contender: Contender,
    costs: LaneCosts,
    rules: Rules,
) -> Agreement:
    """Simulate the trace of a run, and compare.

    Args:
        source: the trace, all requests of the run in order.
        done: the run.
        contender, costs, rules: as the run had them.

    Raises:
        As :func:`oled_sim.engine.runner.simulate`.
    """
    seen: list[GroupRecord] = []
    (predicted,) = simulate_all(
        source, [contender], costs, rules, observe=lambda _, record: seen.append(record)
    )
    layers = source.geometry.layers
    prediction = Prediction(
        passes=pa.concat_tables([pass_rows(record) for record in seen]),
        events=pa.concat_tables([event_rows(record, layers) for record in seen]),
        tokens={request: source.output_tokens(request) for request in source.requests},
        prefetched=any(_prefetches(record) for record in seen),
    )
    passes = [pass_rows(live.record, decide_us=live.decide_us) for live in done]
    events = [event_rows(live.record, layers) for live in done]
    decisions = compare_tables(pa.concat_tables(passes), pa.concat_tables(events), prediction)
    return Agreement(predicted, decisions)


def _prefetches(record: GroupRecord) -> bool:
    return bool(record.course.pass_counts[:, PASS_COUNTS.index("prefetched")].any())
