"""Which trace a plan rests on: the user's, a bundled one, or a synthetic one made for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oled_sim.errors import UsageError
from oled_sim.geometry import CostGeometry
from oled_sim.trace import Trace, open_trace

BUNDLED = {"llada2.0-mini": "mini-gsm8k"}
"""The trace that ships for a model, recorded from one with its routing."""

DATA_SET, REQUESTS, OUTPUT_TOKENS, TRACE_SEED = "gsm8k", 8, 256, 0
"""What a synthetic trace is made with; the same bytes each time."""

OPTIONAL = ("full_gate", "embedding")


@contextmanager
def trace_for(model: CostGeometry, given: str | None, signals: frozenset[str]) -> Iterator[Trace]:
    """Yield the trace to plan with; one that is made for it is gone afterwards.

    Args:
        model: what is planned.
        given: the user's trace, or None.
        signals: what policies use.

    Raises:
        UsageError: there is none for such a model, or it routes over other experts.
        TraceError: it cannot be read.
    """
    if given is not None or model.name in BUNDLED:
        trace = open_trace(given if given is not None else BUNDLED[model.name])
        _require_routing(trace, model)
        yield trace
        return
    with tempfile.TemporaryDirectory(prefix="oled-sim-plan-") as folder:
        yield _synthetic(model, signals, Path(folder))


def _require_routing(trace: Trace, model: CostGeometry) -> None:
    routing = trace.geometry
    found = len(routing.layers), routing.experts, routing.top_k
    wanted = model.moe_layers, model.experts, model.top_k
    if found != wanted:
        raise UsageError(
            f"trace {trace.path.name} routes over {_routing(found)}, but {model.name} has"
            f" {_routing(wanted)}: a plan needs a trace with the model's own routing"
        )


def _routing(of: tuple[int, int, int]) -> str:
    return f"{of[0]} MoE layers × {of[1]} experts, top-{of[2]}"


def _synthetic(model: CostGeometry, signals: frozenset[str], folder: Path) -> Trace:
    from oled_sim.synthesis.generate import MODELS, make_recipe, write_synthetic
    from oled_sim.synthesis.parameters import load_data_set

    if model.name not in MODELS:
        raise UsageError(
            f"no trace is at hand for {model.name}: record one with `oled-sim collect --model`, and"
            " give it with --trace"
        )
    recipe = make_recipe(
        load_data_set(DATA_SET),
        model.name,
        output_tokens=OUTPUT_TOKENS,
        seed=TRACE_SEED,
        signals=tuple(s for s in OPTIONAL if s in signals),
    )
    path = folder / f"synthetic-{model.name}-{DATA_SET}"
    write_synthetic(path, recipe, REQUESTS)
    return open_trace(str(path))
