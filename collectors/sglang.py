"""Importing dumps of SGLang's expert-distribution recorder (per-token mode) of a diffusion LLM.

What becomes what is described in docs/collecting.md. A dump holds no request ids, no gate weights
and no confidence; requests are told apart by positions and tokens, acceptance by comparing what
consecutive passes of a request were given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oled_sim.errors import TraceError
from oled_sim.geometry import RoutingGeometry
from oled_sim.importing import check_out
from oled_sim.trace.builder import RequestBuilder
from oled_sim.trace.manifest import Decode, Manifest, Model, Prompts, Runtime, package_versions
from oled_sim.trace.schema import RequestTrace
from oled_sim.trace.validate import check_request
from oled_sim.trace.whole import whole_trace

from .canvas import Canvas, CanvasRules, Seen
from .sglang_dump import Dump
from .sglang_requests import Found, Grouper

MASK_ID, EOS_ID = 156895, 156892
"""Of the published LLaDA2 checkpoints; a dump names neither."""

SIGNALS = ("ids", "token_state")


def import_sglang_dump(
    source: Path,
    out: Path,
    *,
    stands_for: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write the trace of a dump; an :class:`oled_sim.importing.Importer`."""
    check_out(out, overwrite=overwrite)
    dump = Dump(source)
    grouper = Grouper(MASK_ID, EOS_ID)
    for record in range(len(dump)):
        grouper.add(dump.chunks(record))
        on_progress(0.3 * (record + 1) / len(dump))
    requests, block_length = _whole(grouper, source)
    manifest = _manifest(dump, source, block_length, stands_for)
    for number, request in enumerate(requests):
        check_request(_build(dump, request, number, manifest)[0], manifest, str(source))
        on_progress(0.3 + 0.3 * (number + 1) / len(requests))
    for note in _notes(dump, grouper, requests):
        on_note(note)
    with whole_trace(out, manifest, overwrite=overwrite) as writer:
        for number, request in enumerate(requests):
            trace, counts = _build(dump, request, number, manifest)
            writer.write_request(trace, **counts)
            on_progress(0.6 + 0.4 * (number + 1) / len(requests))
    return writer.manifest


def _whole(grouper: Grouper, source: Path) -> tuple[list[Found], int]:
    """Return requests with passes that were seen to end, and the block length."""
    lengths = {len(c.ids) for r in grouper.requests for c in r.chunks if MASK_ID in c.ids}
    if not lengths:
        raise TraceError(
            f"{source}: no pass holds the mask token {MASK_ID}: it is no recording of LLaDA2"
        )
    if len(lengths) > 1:
        raise TraceError(f"{source}: passes with masks differ in length: {sorted(lengths)}")
    for request in grouper.requests:
        while request.chunks and MASK_ID in request.last.ids:
            request.chunks.pop()  # what the last pass accepted was never shown
    kept = [r for r in grouper.requests if any(MASK_ID in c.ids for c in r.chunks)]
    if not kept:
        raise TraceError(f"{source}: no request was recorded to the end of a block")
    return kept, lengths.pop()


def _build(
    dump: Dump, found: Found, number: int, manifest: Manifest
) -> tuple[RequestTrace, dict[str, Any]]:
    """Return one request, and what the writer wants to know besides."""
    assert manifest.decode is not None  # made below
    first = next(c for c in found.chunks if MASK_ID in c.ids)
    prompt = first.first + int(np.argmax(first.ids == MASK_ID))
    builder = RequestBuilder(manifest.geometry, number)
    canvas = Canvas(builder, CanvasRules(prompt, MASK_ID, manifest.decode.block_length))
    for chunk in found.chunks:
        canvas.add(
            Seen(chunk.ids, chunk.first, chunk.first, np.zeros(0), {"experts": dump.routes(chunk)})
        )
    canvas.finish()
    generated = canvas.generated(1 << 30, EOS_ID)
    return builder.build(), {
        "prompt_tokens": prompt,
        "output_tokens": len(generated),
        "finish_reason": "eos" if EOS_ID in generated else "length",
    }


def _manifest(dump: Dump, source: Path, block_length: int, stands_for: str | None) -> Manifest:
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    geometry = RoutingGeometry(dump.layers, dump.experts, dump.top_k)
    ours = {k: v for k, v in package_versions().items() if k == "oled-sim"}
    return Manifest(
        model=Model(
            name="LLaDA2 (SGLang)",
            layers=geometry.layers,
            experts=geometry.experts,
            top_k=geometry.top_k,
        ),
        origin="imported",
        signals=SIGNALS,
        stands_for=stands_for,
        decode=Decode(rule="2.0", block_length=block_length),
        runtime=Runtime(name="SGLang", device="unknown", packages=ours),
        prompts=Prompts(),
        notes=f"imported from {source.name} (SHA-256 {digest})",
    )


def _notes(dump: Dump, grouper: Grouper, kept: list[Found]) -> list[str]:
    """Return a sentence about everything that is not as it was or not there."""
    notes = ["the trace has no gates and no confidence: the recorder does not write them"]
    if dump.skipped:
        notes.append(f"{dump.skipped} records of draft models are left out")
    if lost := len(grouper.requests) - len(kept):
        notes.append(f"{lost} requests that were not recorded to the end of a block are left out")
    if late := sum(r.chunks[0].first > 0 for r in kept):
        notes.append(
            f"{late} requests start behind a cached prefix, whose prefill is in no pass: record"
            " with --disable-radix-cache"
        )
    if grouper.doubtful:
        notes.append(
            f"{grouper.doubtful} times the tokens of requests in step did not tell them apart, but"
            " their order in the batch: record fewer requests at a time to be sure"
        )
    return notes
