"""All tables of a trace in one reading, and of several traces side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import pandas as pd

from oled_sim.analysis.activation import ActivationTally
from oled_sim.analysis.footprint import BLOCK_LENGTHS, BlockTally, FootprintTally
from oled_sim.analysis.locality import LocalityTally
from oled_sim.analysis.paper import beside_paper
from oled_sim.analysis.popularity import PopularityTally
from oled_sim.analysis.reuse import ReuseTally
from oled_sim.analysis.stability import StabilityTally
from oled_sim.analysis.tally import Tally, tabulate
from oled_sim.errors import UsageError
from oled_sim.geometry import GEOMETRIES, CostGeometry, RoutingGeometry
from oled_sim.trace.manifest import Manifest, RequestEntry
from oled_sim.trace.reader import Trace
from oled_sim.trace.schema import RequestTrace

NEEDED = ("gates", "cosines")
"""Optional signals that the analysis reads; the others stay on disk."""


_FACT_TYPES = {
    "stands_for": "string",
    "rule": "string",
    "block_length": "Int64",
    "threshold": "Float64",
}
"""Of facts that a manifest may leave out, whatever the other traces say."""


def analyze(
    requests: Iterable[RequestTrace],
    geometry: RoutingGeometry,
    *,
    signals: Collection[str],
    block_lengths: Sequence[int] = BLOCK_LENGTHS,
    cost: CostGeometry | None = None,
    cold: bool = False,
) -> dict[str, pd.DataFrame]:
    """Return every table of one trace, reading each request once.

    Args:
        requests: one at a time; memory is bounded by the largest.
        geometry: what they route over.
        signals: what the trace holds; tables that need ``confidence`` and ``token_state`` are
            left out without them.
        block_lengths: see :func:`~oled_sim.analysis.footprint.block_footprint`.
        cost: sizes for absolute FLOPs.
        cold: measure reuse within requests only.

    Returns:
        ``paper`` (:func:`~oled_sim.analysis.paper.beside_paper`), ``footprint``,
        ``block_footprint``, ``locality``, ``activation_ratio``, ``reuse_distance``, ``lru_hits``,
        ``popularity``, ``entropy``, and with confidence ``confidence_bins``, ``confidence_joint``,
        ``confidence_correlation``.
    """
    tallies: list[Tally] = [
        FootprintTally(geometry, cost),
        BlockTally(geometry, block_lengths),
        LocalityTally(geometry),
        ActivationTally(geometry),
        ReuseTally(geometry, cold=cold),
        PopularityTally(geometry),
    ]
    if {"confidence", "token_state"} <= set(signals):
        tallies.append(StabilityTally(geometry))
    tables = tabulate(requests, geometry, *tallies)
    return {"paper": beside_paper(tables), **tables}


def analyze_trace(
    trace: Trace,
    *,
    requests: Iterable[int] | None = None,
    cold: bool = False,
) -> dict[str, pd.DataFrame]:
    """Return every table of an open trace, see :func:`analyze`.

    Args:
        trace: its manifest says what is there; the block length it was decoded with is one of
            those in ``block_footprint``.
        requests: numbers of the requests to read, in order; None is all.
        cold: measure reuse within requests only.

    Raises:
        TraceError: a file is missing or damaged.
    """
    numbers = trace.requests if requests is None else requests
    decode = trace.manifest.decode
    lengths = BLOCK_LENGTHS if decode is None else (*BLOCK_LENGTHS, decode.block_length)
    return analyze(
        (trace.read(number, signals=NEEDED) for number in numbers),
        trace.geometry,
        signals=trace.signals,
        block_lengths=lengths,
        cost=GEOMETRIES.get(trace.manifest.stands_for or ""),
        cold=cold,
    )


def analyze_traces(
    traces: Mapping[str, Trace],
    *,
    requests: int | None = None,
    cold: bool = False,
    on_request: Callable[[], object] = lambda: None,
) -> dict[str, pd.DataFrame]:
    """Return every table of several traces side by side, see :func:`side_by_side`.

    Args:
        traces: open traces by the name they go by.
        requests: read this many of each; None is all.
        cold: measure reuse within requests only.
        on_request: called after each request, for a progress bar.

    Returns:
        The tables of :func:`analyze`, and ``traces``: one :func:`describe` of each.

    Raises:
        TraceError: a file is missing or damaged.
        UsageError: no trace is given.
    """

    def numbers(trace: Trace) -> Iterator[int]:
        for number in trace.requests[:requests]:
            yield number
            on_request()

    results = {
        name: (trace.manifest.origin, analyze_trace(trace, requests=numbers(trace), cold=cold))
        for name, trace in traces.items()
    }
    facts = [
        {
            "trace": name,
            "origin": trace.manifest.origin,
            **describe(trace.manifest, trace.manifest.requests[:requests]),
        }
        for name, trace in traces.items()
    ]
    return {"traces": pd.DataFrame(facts).astype(_FACT_TYPES), **side_by_side(results)}


def describe(
    manifest: Manifest, requests: Sequence[RequestEntry] | None = None
) -> dict[str, object]:
    """Return what identifies a trace in results: one row of the table ``traces``.

    ``requests`` are those that were read; None is all.
    """
    model, decode = manifest.model, manifest.decode
    entries = manifest.requests if requests is None else requests
    return {
        "model": model.name,
        "stands_for": manifest.stands_for,
        "layers": len(model.layers),
        "experts": model.experts,
        "top_k": model.top_k,
        "rule": None if decode is None else decode.rule,
        "block_length": None if decode is None else decode.block_length,
        "threshold": None if decode is None else decode.threshold,
        "requests": len(entries),
        "passes": sum(entry.passes for entry in entries),
        "signals": " ".join(manifest.signals),
        "checksum": manifest.checksum,
    }


def side_by_side(
    results: Mapping[str, tuple[str, Mapping[str, pd.DataFrame]]],
) -> dict[str, pd.DataFrame]:
    """Join the tables of several traces.

    Args:
        results: name of the trace: (its origin, its tables).

    Returns:
        Each table with two more columns in front, ``trace`` and ``origin`` (``real``,
        ``synthetic`` or ``imported``); a trace that lacks a table has no rows in it.

    Raises:
        UsageError: there is nothing to join.
    """
    if not results:
        raise UsageError("no trace to analyze: name at least one")
    names = dict.fromkeys(name for _, tables in results.values() for name in tables)
    return {
        name: pd.concat(
            [
                _marked(tables[name], trace, origin)
                for trace, (origin, tables) in results.items()
                if name in tables
            ],
            ignore_index=True,
        )
        for name in names
    }


def _marked(table: pd.DataFrame, trace: str, origin: str) -> pd.DataFrame:
    marks = pd.DataFrame({"trace": trace, "origin": origin}, index=table.index)
    return pd.concat([marks, table], axis=1)
