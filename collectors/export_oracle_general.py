"""Exporting accesses in libCacheSim's oracleGeneral format, for its many cache policies.

A record has 24 bytes, little-endian: uint32 time, uint64 object, uint32 size, int64 record number
of the object's next access, -1 if there is none (github.com/1a1a11a/libCacheSim,
``libCacheSim/traceReader/customizedReader/oracle/oracleGeneralBin.h``).

The format knows single accesses only. An event (a layer of a pass) becomes one access per distinct
expert, in the order of their last rows, which is the order of recency within an event; a cache
that serves them one by one may evict what the same event asks for next, which no engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import UsageError
from oled_sim.geometry import DEFAULT_GEOMETRY, find_geometry
from oled_sim.plugin_options import PluginOption, takes
from oled_sim.trace.reader import Trace
from oled_sim.trace.schema import RequestTrace

RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
NEVER = -1
_NEXT_AT = 16
"""Bytes of a record before ``next``."""

SIZES = ("one", "bytes")


def _sizes(text: str) -> str:
    if text not in SIZES:
        raise UsageError(f"--sizes is {text!r}: give {' or '.join(SIZES)}")
    return text


@takes(
    PluginOption(
        "--sizes",
        "one|bytes",
        "Size of an object: 1, or the expert's bytes [default: one].",
        _sizes,
    ),
    PluginOption(
        "--geometry",
        "NAME|FILE",
        "Whose experts' bytes, where the trace tells none [default: what it stands for].",
    ),
    examples=(
        "oled-sim export oracle-general nano-gsm8k --out nano.oracleGeneral.zst",
        "oled-sim export oracle-general nano-gsm8k --sizes bytes --out nano.oracleGeneral.bin",
    ),
)
def export_oracle_general(
    trace: Trace,
    file: IO[bytes],
    *,
    sizes: str = "one",
    geometry: str | None = None,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Mapping[str, int]:
    """Write one record per event and distinct expert; an :class:`oled_sim.exporting.Exporter`.

    ``time`` is the number of the pass, counted over all requests. The object of expert ``e`` in
    the layer of the model's own index ``l`` is ``l * experts + e``.

    Args:
        trace: what to export. file: empty and seekable.
        sizes: ``one``, or ``bytes``: those of the manifest, else of the geometry.
        geometry: name or file of a cost geometry; default the one that the trace stands for.
        on_progress: takes the share done. on_note: takes sentences.

    Returns:
        Numbers of ``accesses`` and of distinct ``objects``.

    Raises:
        UsageError: an expert of 4 GiB or more, or a geometry that is not known or not used.
    """
    size = _object_sizes(trace, sizes, geometry)
    layers, experts = np.asarray(trace.geometry.layers), trace.geometry.experts
    last = np.full((int(layers[-1]) + 1) * experts, NEVER, np.int64)  # record of the last access
    written, passes = 0, 0
    for done, number in enumerate(trace.requests, 1):
        request = trace.read(number, signals=())
        event, expert = accesses(request)
        layer = request.event_layer[event]
        records = np.zeros(len(event), RECORD)
        records["time"] = passes + request.event_pass[event]
        records["object"] = layers[layer].astype(np.int64) * experts + expert
        records["size"] = size[layer]
        earlier = _link(records, written, last)
        _patch(file, earlier)
        file.write(records.tobytes())
        written, passes = written + len(records), passes + request.passes
        on_progress(done / len(trace))
    return {"accesses": written, "objects": int(np.count_nonzero(last != NEVER))}


def accesses(request: RequestTrace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return event and expert of every access: events in order, experts by their last rows."""
    k = request.experts.shape[1]
    event = np.repeat(np.arange(request.events), np.diff(request.event_offset) * k)
    expert = request.experts.ravel().astype(np.int64)
    wide = int(expert.max()) + 1
    _, from_end = np.unique((event * wide + expert)[::-1], return_index=True)
    kept = np.sort(len(expert) - 1 - from_end)
    return event[kept], expert[kept]


def _object_sizes(trace: Trace, sizes: str, geometry: str | None) -> NDArray[np.int64]:
    """Return the size of an object per layer."""
    layers = len(trace.geometry.layers)
    told = trace.manifest.expert_bytes
    if geometry is not None and (sizes == "one" or told is not None):
        why = "but sizes are 1" if sizes == "one" else "which the trace tells itself"
        raise UsageError(f"--geometry {geometry} gives bytes of an expert, {why}: leave it out")
    if sizes == "one":
        return np.ones(layers, np.int64)
    if told is None:
        name = geometry or trace.manifest.stands_for
        if name is None:
            raise UsageError(
                f"{trace.label} tells neither its experts' bytes nor a model that it stands for:"
                f" name one with --geometry, such as {DEFAULT_GEOMETRY}"
            )
        told = (find_geometry(name).expert_bytes,) * layers
    if max(told) >= 1 << 32:
        raise UsageError(f"an expert of {max(told)} bytes: the format holds sizes below 4 GiB")
    return np.array(told, np.int64)


def _link(records: NDArray[Any], first: int, last: NDArray[np.int64]) -> dict[int, int]:
    """Fill in ``next`` within ``records``, which start at number ``first``.

    Returns:
        By number of an earlier record, its ``next``. ``last`` is brought up to date.
    """
    objects = records["object"].astype(np.int64)
    order = np.argsort(objects, kind="stable")
    ordered = objects[order]
    again = ordered[1:] == ordered[:-1]
    records["next"] = NEVER
    records["next"][order[:-1][again]] = first + order[1:][again]
    heads = np.append(True, ~again)
    tails = np.append(~again, True)
    known = last[ordered[heads]]
    met = known != NEVER
    earlier = zip(known[met].tolist(), (first + order[heads][met]).tolist(), strict=True)
    last[ordered[tails]] = first + order[tails]
    return dict(earlier)


def _patch(file: IO[bytes], following: Mapping[int, int]) -> None:
    """Write ``next`` into records that are in the file already: at most one per object."""
    end = file.seek(0, 2)
    for record, number in sorted(following.items()):
        file.seek(record * RECORD.itemsize + _NEXT_AT)
        file.write(number.to_bytes(8, "little", signed=True))
    file.seek(end)
