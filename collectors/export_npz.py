"""Exporting arrays of routed experts, which ``oled-sim import routed-experts`` reads.

Per request, under its five-digit number, ``routed_experts`` [tokens, layers, k] in the form of
vLLM's and SGLang's, ``routed_weights`` of the same shape, and per token (a position occurs once in
every pass that holds it) ``step``, ``position`` and the rest of :data:`oled_sim.collectors.
recorded.TOKEN_DTYPES`. -1 stands where a token has no route in a layer.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.exporting import exported_manifest, note_missing_signals
from oled_sim.plugin_options import takes
from oled_sim.trace.manifest import encode_manifest
from oled_sim.trace.reader import Trace
from oled_sim.trace.schema import RequestTrace

from .export_csv import PASS_COLUMNS, TOKEN_COLUMNS

_LEVEL = 1
"""Of deflate: token columns hardly vary, and routes hardly compress at any level."""

_EPOCH = (1980, 1, 1, 0, 0, 0)


@takes(examples=("oled-sim export npz nano-gsm8k --requests 4 --out routed.npz",))
def export_npz(
    trace: Trace,
    file: IO[bytes],
    *,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Mapping[str, int]:
    """Write the arrays; an :class:`oled_sim.exporting.Exporter`. Returns the number of ``tokens``.

    Rows of an event follow the tokens: an order of the source's own is lost, and said to be.
    """
    note_missing_signals(trace, on_note)
    manifest = exported_manifest(trace)
    tokens, moved = 0, False
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        _add(archive, "manifest", np.frombuffer(encode_manifest(manifest), np.uint8))
        _add(archive, "layers", np.asarray(trace.geometry.layers, np.int32))
        for done, number in enumerate(trace.requests, 1):
            request = trace.read(number, signals=manifest.signals)
            for name, values in _arrays(request, trace, manifest.signals):
                _add(archive, f"{number:05d}/{name}", values)
            tokens += len(request.position)
            moved |= _in_another_order(request)
            on_progress(done / len(trace))
    if moved:
        on_note("rows of an event are put in the order of their tokens; the source had another")
    return {"tokens": tokens}


def _arrays(
    request: RequestTrace, trace: Trace, signals: tuple[str, ...]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield name and array, one after the other: none need be in memory beside the next."""
    owner = np.repeat(np.arange(request.passes), np.diff(request.token_offset))
    shape = (len(owner), len(trace.geometry.layers), request.experts.shape[1])
    layer = np.repeat(request.event_layer, np.diff(request.event_offset))
    small = trace.geometry.experts <= np.iinfo(np.int16).max
    ids = np.full(shape, -1, np.int16 if small else np.int32)
    ids[request.row_token, layer] = request.experts
    yield "routed_experts", ids
    if request.gates is not None:
        gates = np.zeros(shape, np.float16)
        gates[request.row_token, layer] = request.gates
        yield "routed_weights", gates
    yield "step", owner
    yield "position", request.position
    for name in PASS_COLUMNS:
        yield name, getattr(request, name)[owner]
    for name in TOKEN_COLUMNS:
        if name != "confidence" or name in signals:
            yield name, getattr(request, name)


def _in_another_order(request: RequestTrace) -> bool:
    descends = np.diff(request.row_token) < 0
    descends[request.event_offset[1:-1] - 1] = False
    return bool(descends.any())


def _add(archive: zipfile.ZipFile, name: str, values: NDArray[Any]) -> None:
    member = zipfile.ZipInfo(f"{name}.npy", _EPOCH)  # no clock: same trace, same bytes
    member.compress_type = zipfile.ZIP_DEFLATED
    with archive.open(member, "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.ascontiguousarray(values), allow_pickle=False)
