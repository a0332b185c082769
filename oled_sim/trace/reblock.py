"""Passes of an autoregressive trace put together to blocks of consecutive tokens.

An autoregressive model decodes one token per pass, so a pass activates k experts per layer. With
``length`` tokens per pass it activates the union of theirs, which is how a diffusion model's
footprint grows with its block. docs/importing.md says what such a trace can and cannot show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError, UsageError
from oled_sim.trace.manifest import Decode, Manifest
from oled_sim.trace.reader import Trace
from oled_sim.trace.schema import Kind, RequestTrace
from oled_sim.trace.whole import whole_trace

BLOCK_SIGNALS = ("ids", "gates", "confidence", "token_state")
"""Signals of a token or of a route. The others are means over a pass, which is another one now."""

MOST_TOKENS = (1 << 31) - 1
"""Of a block: positions have 32 bits."""


def reblock(trace: RequestTrace, length: int) -> RequestTrace:
    """Return the request with one pass per block of up to ``length`` consecutive tokens.

    Blocks are counted from position 0, so the first and the last may hold fewer tokens. Prefill
    passes stay as they are. Tokens keep state, confidence and acceptance, rows their order; the
    context is that of the block's first token; no such pass was timed.

    Raises:
        TraceError: a position is decoded in several passes, or positions go back.
    """
    decoded = np.repeat(trace.kind != Kind.PREFILL, np.diff(trace.token_offset))
    _check_course(trace, decoded)
    token_offset = _block_starts(trace, decoded, length)
    first_token, last_token = token_offset[:-1], token_offset[1:] - 1
    old_pass = np.searchsorted(trace.token_offset, first_token, "right") - 1
    prefill = trace.kind[old_pass] == Kind.PREFILL
    position = trace.position.astype(np.int64)
    block = np.where(prefill, position[last_token] + 1, position[first_token]) // length

    row_pass = np.searchsorted(token_offset, trace.row_token, "right") - 1
    row_layer = np.repeat(trace.event_layer, np.diff(trace.event_offset)).astype(np.int64)
    key = row_pass * (int(row_layer.max()) + 1) + row_layer
    order = np.argsort(key, kind="stable")
    event = np.flatnonzero(np.diff(key[order], prepend=-1))
    accepted = np.add.reduceat(trace.accepted.astype(np.int64), first_token)
    return replace(
        trace,
        kind=trace.kind[old_pass],
        block=block.astype(np.int32),
        context=trace.context[old_pass],
        accepted_count=accepted.astype(np.int32),
        time_us=np.where(prefill, trace.time_us[old_pass], np.nan),
        token_offset=token_offset,
        event_pass=row_pass[order][event].astype(np.int32),
        event_layer=row_layer[order][event].astype(np.int16),
        event_offset=np.append(event, len(key)),
        experts=trace.experts[order],
        gates=None if trace.gates is None else trace.gates[order],
        row_token=trace.row_token[order],
        full_gate=None,
        embedding=None,
        cosines=None,
    )


def reblocked_manifest(manifest: Manifest, length: int) -> Manifest:
    """Return the manifest of the trace that :func:`reblock` makes, without requests.

    Raises:
        UsageError: the trace is not autoregressive, or a block cannot be that long.
    """
    if not 1 <= length <= MOST_TOKENS:
        raise UsageError(f"a block of {length} tokens: give 1 to {MOST_TOKENS}")
    decode = manifest.decode
    if decode is None or decode.rule != "autoregressive":
        rule = "unknown" if decode is None else f"{decode.rule!r}"
        raise UsageError(
            "only autoregressive recordings can be cut into blocks, whose every token is decoded"
            f" once: the decoding rule of this one is {rule}"
        )
    note = f"passes put together to blocks of {length} tokens"
    return msgspec.structs.replace(
        manifest,
        decode=Decode(**{**msgspec.structs.asdict(decode), "block_length": length}),
        signals=tuple(s for s in manifest.signals if s in BLOCK_SIGNALS),
        notes="; ".join(filter(None, (manifest.notes, note))),
        requests=(),
    )


def reblock_trace(
    trace: Trace,
    out: Path,
    length: int,
    *,
    overwrite: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Manifest:
    """Write the re-blocked trace of a whole trace and return its manifest.

    Args:
        trace: autoregressive. out: directory of the new one. length: tokens of a block.
        overwrite: replace a trace that is there.
        on_progress: called with the share of the requests done.

    Raises:
        UsageError: the trace is not autoregressive, or ``out`` is not free.
        TraceError: the trace is damaged, or its tokens are not decoded one after the other.
    """
    manifest = reblocked_manifest(trace.manifest, length)
    if out.resolve() == trace.path.resolve():
        raise UsageError(f"{out} is the trace itself: give another directory")
    with whole_trace(out, manifest, overwrite=overwrite) as writer:
        for done, entry in enumerate(trace.manifest.requests, 1):
            request = trace.read(entry.request, signals=manifest.signals)
            writer.write_request(
                reblock(request, length),
                prompt_tokens=entry.prompt_tokens,
                output_tokens=entry.output_tokens,
                finish_reason=entry.finish_reason,
                prompt_row=entry.prompt_row,
                prompt_sha256=entry.prompt_sha256,
            )
            on_progress(done / len(trace))
    return writer.manifest


def _check_course(trace: RequestTrace, decoded: NDArray[np.bool_]) -> None:
    wrong = np.diff(trace.position[decoded]) <= 0
    if wrong.any():
        again = trace.position[decoded][1:][np.argmax(wrong)]
        raise TraceError(
            f"request {trace.request}: position {again} is decoded after a later one or twice, so"
            " its tokens cannot be cut into blocks: a batch, or no autoregressive recording"
        )


def _block_starts(
    trace: RequestTrace, decoded: NDArray[np.bool_], length: int
) -> NDArray[np.int64]:
    """Return where each new pass starts among the tokens, and the end."""
    block = trace.position // length
    new = np.zeros(len(decoded), np.bool_)
    new[trace.token_offset[:-1]] = ~decoded[trace.token_offset[:-1]]
    new[1:] |= decoded[1:] & (~decoded[:-1] | (block[1:] != block[:-1]))
    new[0] = True
    return np.append(np.flatnonzero(new), len(decoded))
