"""Importing logs of routes in JSON lines, as loggers patched into vLLM write them.

What becomes what is described in docs/importing.md. The file is read three times: to learn where
each of its requests ends, to check every row, and to write; memory holds the requests that are
open at the same time. The first read looks for ids alone, without parsing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oled_sim.importing import AS_BLOCKS, counted
from oled_sim.plugin_options import takes
from oled_sim.trace.manifest import Manifest

from .cleaning import Cleaning
from .recorded import Recorded
from .recording_options import EXPERTS, MODEL, PROMPT_TOKENS
from .route_jsonl_passes import Passes, recorded_log
from .route_jsonl_rows import LogRows, RouteLog
from .text_blocks import LineReader
from .two_reads import Facts, Target, import_recorded

Key = tuple[int, int]
"""The engine's run, and the index of the log's own id of a request."""

_REQUEST = re.compile(rb'"req_id"\s*:\s*("(?:[^"\\]|\\.)*"|-?[0-9]+)')


@takes(
    PROMPT_TOKENS,
    EXPERTS,
    MODEL,
    AS_BLOCKS,
    examples=(
        "oled-sim import route-jsonl moe_routes.jsonl --experts 60 --out trace",
        "oled-sim import route-jsonl routes.jsonl.gz --prompt-tokens 128 --out trace",
    ),
)
def import_route_jsonl(
    source: Path,
    out: Path,
    *,
    prompt_tokens: int | None = None,
    experts: int | None = None,
    model: str | None = None,
    as_blocks: int | None = None,
    stands_for: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write the trace of a route log; an :class:`oled_sim.importing.Importer`.

    Args:
        source: plain, .xz or .gz.
        out: directory of the trace.
        prompt_tokens: of every request; by default passes of several tokens are prefill.
        experts: per layer, where the file does not say.
        model: its name, where the file does not say.
        as_blocks: see :mod:`oled_sim.trace.reblock`.
        stands_for: see the protocol, as for the rest.
        overwrite: replace a trace that is there.
        on_progress: takes the share done. on_note: takes sentences.

    Raises:
        TraceError: malformed; names file and line.
        UsageError: ``out`` is not free, or blocks were asked for and passes are none of one token.
    """
    log = _Log(source, prompt_tokens, lambda done: on_progress(done / 3))

    def facts() -> Facts:
        meta = log.rows.meta
        return Facts(
            model=model or str(meta.get("model_id") or "unknown").rpartition("/")[2],
            runtime=" ".join(filter(None, ("vLLM", str(meta.get("vllm_version") or "")))),
            experts=_whole(meta.get("num_experts")) or experts,
        )

    target = Target(
        out, stands_for, overwrite, lambda done: on_progress((1 + 2 * done) / 3), on_note, as_blocks
    )
    manifest = import_recorded(source, log.read, facts, target)
    for note in log.notes():
        on_note(note)
    return manifest


class _Log:
    """A log and where each of its requests ends.

    ``ends``: by id, the last block of text that names it. A request ends there, or with the run of
    the engine, or at the end of the file.
    """

    def __init__(
        self, path: Path, prompt_tokens: int | None, on_progress: Callable[[float], None]
    ) -> None:
        self.path = path
        self.prompt_tokens = prompt_tokens
        self.rows = RouteLog(path)
        self.passes = Passes(prompt_tokens)
        self.ends: dict[Any, int] = {}
        with LineReader(path) as reader:
            for block in reader.blocks():
                for text in set(_REQUEST.findall(block.data)):
                    self.ends[_id(text)] = block.first_line + block.data.count(b"\n") - 1
                on_progress(reader.fraction)

    def read(self, on_progress: Callable[[float], None], cleaning: Cleaning) -> Iterator[Recorded]:
        """Yield the requests in the order in which they end; only open ones are in memory."""
        self.passes = Passes(self.prompt_tokens)
        held: dict[Key, list[LogRows]] = {}
        number = 0
        for run, rows in self.rows.rows(on_progress):
            for key, part in _by_request(run, rows):
                # Its key says all of `request`.
                held.setdefault(key, []).append(part._replace(request=part.request[:0]))
            for parts in self._over(held, run, int(rows.line[-1])):
                for recorded in self._requests(number, parts, cleaning):
                    yield recorded
                    number += 1
        for parts in self._over(held, -1, 0):
            for recorded in self._requests(number, parts, cleaning):
                yield recorded
                number += 1

    def _over(self, held: dict[Key, list[LogRows]], run: int, line: int) -> Iterator[list[LogRows]]:
        """Take out what no line after this one of this run can belong to, as it ended."""
        end = {index: self.ends.get(name, math.inf) for name, index in self.rows.ids.items()}
        over = [key for key in held if key[0] != run or end[key[1]] <= line]
        for key in sorted(over, key=lambda key: int(held[key][-1].line[-1])):
            yield held.pop(key)

    def _requests(
        self, number: int, parts: list[LogRows], cleaning: Cleaning
    ) -> Iterator[Recorded]:
        rows = _join(parts)
        gates = None if np.isnan(rows.gates).all() else rows.gates
        recorded = recorded_log(
            number, rows.token, rows.layer, rows.experts, gates, rows.line, self.path, _line
        )
        for k, request in enumerate(self.passes.requests(recorded, cleaning)):
            yield cleaning.clean(replace(request, number=number + k))

    def notes(self) -> Iterator[str]:
        """Yield a sentence about what had to be guessed."""
        if self.rows.others:
            yield f"{self.rows.others:,} lines of other types than route and meta are ignored"
        if self.passes.undivided:
            yield (
                "the log does not tell prompt and decoding of"
                f" {counted(self.passes.undivided, 'request')} apart:"
                " all of their tokens count as decoded (--prompt-tokens N)"
            )
        if self.passes.batches:
            yield (
                f"token_idx starts anew in every pass of {counted(self.passes.batches, 'request')}:"
                " sequences of a batch, which the log does not tell apart"
            )


def _by_request(run: int, rows: LogRows) -> Iterator[tuple[Key, LogRows]]:
    """Yield the rows of each id, in their order."""
    found, first = np.unique(rows.request, return_index=True)
    for request in found[np.argsort(first)].tolist():
        mine = rows if len(found) == 1 else rows.take(rows.request == request)
        yield (run, request), mine


def _join(parts: list[LogRows]) -> LogRows:
    """Return rows that follow each other as one, and let go of the parts, column by column."""
    columns = [list(column) for column in zip(*parts, strict=True)]
    parts.clear()
    joined = []
    for column in columns:
        joined.append(np.concatenate(column))
        column.clear()
    return LogRows._make(joined)


def _id(text: bytes) -> Any:
    """Return the id that a piece of JSON spells; itself if it is none, which parsing refuses."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _line(line: int, layer: int) -> str:
    return f"line {line}"


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
