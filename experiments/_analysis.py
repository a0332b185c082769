"""Points that look into a trace instead of simulating one: figures 4, 7 and 10."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oled_sim.analysis.report import analyze_trace
from oled_sim.experiment import Inputs, Point, Rows, Size, SyntheticTrace, TraceName
from oled_sim.experiment.base import name_of
from oled_sim.trace import Trace

from ._grids import DATA_SETS, MODELS, synthetic

REQUESTS = "requests"
"""Name of the table with a row per request: the quantities that the paper prints."""


@dataclass(frozen=True)
class AnalysisPoint(Point):
    """Tables of ``oled-sim analyze`` of one trace.

    Attributes:
        tables: those of the whole trace, by name.
        quantities: those per request, by their key in ``oled_sim.analysis.paper``.
    """

    tables: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ()

    def labels(self) -> dict[str, Any]:
        """Return the name of the trace; the tables are told apart by ``table``."""
        return {"trace": name_of(self.trace)}

    def measure(self, inputs: Inputs) -> Rows:
        """Return the rows of all tables.

        Columns: ``table``, ``origin``, ``model`` (the trace's own), ``group`` (traces that figures
        draw together, of several data sets), those of the table itself; in the table ``requests``
        also ``request`` and one column per quantity, NaN where a request cannot tell.
        """
        trace = inputs.open(self.trace)
        manifest = trace.manifest
        group = _group(self.trace, manifest.model.name)
        about = {"origin": manifest.origin, "model": manifest.model.name, "group": group}
        rows = [*self._whole(trace), *self._by_request(trace)]
        return [about | row for row in rows]

    def _whole(self, trace: Trace) -> Iterator[dict[str, Any]]:
        found = analyze_trace(trace) if self.tables else {}
        for name in self.tables:
            if name in found:  # confidence may not have been recorded
                yield from ({"table": name, **row} for row in found[name].to_dict("records"))

    def _by_request(self, trace: Trace) -> Iterator[dict[str, Any]]:
        for number in trace.requests if self.quantities else ():
            printed = analyze_trace(trace, requests=[number])["paper"]
            values = dict(zip(printed["key"], printed["value"], strict=True))
            quantities = {key: float(values[key]) for key in self.quantities}
            yield {"table": REQUESTS, "request": int(number), **quantities}


def traces(size: Size, *, more: tuple[TraceName, ...] = ()) -> list[TraceName]:
    """Return the traces that figures of locality look into: bundled, and synthetic ones."""
    found: list[TraceName] = [*(f"mini-{name}" for name in DATA_SETS), *more]
    if size == "full":
        found += [synthetic(model, name) for model in MODELS for name in DATA_SETS]
    return found


def _group(trace: TraceName, model: str) -> str:
    if not isinstance(trace, SyntheticTrace):
        return model
    relation = "" if trace.coupling == "measured" else f", relation {trace.coupling}"
    return trace.model + relation
