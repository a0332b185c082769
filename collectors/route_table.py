"""Importing tables of routes in comma-separated text, whatever their columns are called.

A line is one token in one layer with its k experts, or one of its k experts. ``oled-sim export
csv`` writes such tables. What becomes what is described in docs/importing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError
from oled_sim.importing import AS_BLOCKS
from oled_sim.plugin_options import PluginOption, takes
from oled_sim.trace.manifest import Manifest, decode_manifest
from oled_sim.trace.schema import Kind

from .cleaning import Cleaning
from .export_csv import MANIFEST_PREFIX
from .recorded import AUTOREGRESSIVE_PREFILL, TOKEN_DTYPES, Recorded
from .recording_options import EXPERTS, MODEL, PROMPT_TOKENS
from .table_columns import Mapped, TableColumns, find_columns, parse_mapping
from .table_rows import Columns, TableRows, recorded_rows
from .text_blocks import BLOCK_BYTES, LineReader, parse_columns
from .two_reads import Facts, Target, import_recorded

COLUMNS = PluginOption(
    "--columns",
    "ROLE=NAME,…",
    "Which column means what: token=tok,layer=l,expert=e,gate=w; several as expert=e0/e1 or e*.",
    parse_mapping,
)


@takes(
    COLUMNS,
    PROMPT_TOKENS,
    EXPERTS,
    MODEL,
    AS_BLOCKS,
    examples=(
        "oled-sim import csv routes.csv.gz --out trace",
        "oled-sim import csv log.csv --columns token=tok,layer=l,expert=e,gate=w --out trace",
        "oled-sim import csv wide.csv --columns token=t,expert=e*,gate=w* --experts 64 --out trace",
    ),
)
def import_table(
    source: Path,
    out: Path,
    *,
    columns: Mapped | None = None,
    prompt_tokens: int | None = None,
    experts: int | None = None,
    model: str | None = None,
    as_blocks: int | None = None,
    stands_for: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write the trace of a table; an :class:`oled_sim.importing.Importer`.

    Args:
        source: plain, .xz or .gz.
        out: directory of the trace.
        columns: by role, where their names are not the roles' own.
        prompt_tokens: of every request, where the table does not tell kinds; default 0.
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
    table = _Table(source, columns or {}, prompt_tokens)
    found = table.manifest

    def facts() -> Facts:
        if found is not None:
            return Facts(experts=found.model.experts, manifest=found)
        return Facts(model=model or "unknown", experts=experts)

    target = Target(out, stands_for, overwrite, on_progress, on_note, as_blocks)
    manifest = import_recorded(source, table.read, facts, target)
    if not table.tells_kinds and prompt_tokens is None:
        on_note(
            "the table does not tell prompt and decoding apart: all tokens count as decoded"
            " (--prompt-tokens N, or a column 'kind')"
        )
    return manifest


class _Table:
    """A table, its columns, and what is known of it before its rows.

    ``manifest``: of the trace that was exported to it, or None.
    """

    def __init__(
        self,
        path: Path,
        mapped: Mapped,
        prompt_tokens: int | None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.path = path
        self.mapped = mapped
        self.prompt_tokens = prompt_tokens or 0
        self.block_bytes = block_bytes
        self.manifest: Manifest | None = None
        with LineReader(path, block_bytes) as reader:
            self.names, self.columns = self._read_header(reader)

    @property
    def tells_kinds(self) -> bool:
        return "kind" in self.columns.roles

    def read(self, on_progress: Callable[[float], None], cleaning: Cleaning) -> Iterator[Recorded]:
        """Yield the requests; only one is in memory.

        Raises:
            TraceError: malformed; names file and line.
        """
        top_k = 0
        for number, columns in self._requests(on_progress):
            recorded = self._recorded(number, columns, top_k, cleaning)
            columns.clear()  # or they would stay while the request is written
            if recorded is not None:
                top_k = recorded.experts.shape[1]
                yield recorded

    def _recorded(
        self, number: int, columns: Columns, top_k: int, cleaning: Cleaning
    ) -> Recorded | None:
        rows = recorded_rows(columns, self.columns, self._refuse, top_k, cleaning)
        if rows is None:
            return None
        return cleaning.clean(self._with_steps(rows).recorded(number, self.path))

    def _read_header(self, reader: LineReader) -> tuple[list[str], TableColumns]:
        line = reader.read_line()
        while line.startswith("#"):
            if line.startswith(MANIFEST_PREFIX):
                text = line.removeprefix(MANIFEST_PREFIX).encode() + b"\n"
                self.manifest = decode_manifest(text, f"{self.path}, line {reader.line}")
            line = reader.read_line()
        names = [name.strip().strip('"') for name in line.removeprefix("\ufeff").split(",")]
        found = find_columns(names, self.mapped)
        if isinstance(found, str):
            self._refuse(max(1, reader.line), found)
        return names, found

    def _requests(self, on_progress: Callable[[float], None]) -> Iterator[tuple[int, Columns]]:
        """Yield number and rows of each request."""
        held: list[Columns] = []
        over: set[int] = set()
        for columns in self._blocks(on_progress):
            for number, part in _split(columns):
                if held and number != int(held[-1]["request"][0]):
                    over.add(int(held[-1]["request"][0]))
                    yield int(held[-1]["request"][0]), _join(held)
                    held = []
                if number in over:
                    self._refuse(int(part["line"][0]), f"request {number} is over already")
                held.append(part)
        if held:
            yield int(held[-1]["request"][0]), _join(held)

    def _blocks(self, on_progress: Callable[[float], None]) -> Iterator[Columns]:
        with LineReader(self.path, self.block_bytes) as reader:
            self._read_header(reader)
            for block in reader.blocks():
                columns = parse_columns(block, self.path, self.names, self.columns.types)
                lines = len(next(iter(columns.values())))
                for name in self.columns.roles.get("gate", ()):
                    columns[name] = columns[name].astype(np.float32)
                columns["line"] = block.first_line + np.arange(lines)
                for role in ("request", "iteration"):
                    name = self.columns.roles.get(role, ("",))[0]
                    columns[role] = columns.get(name, np.zeros(lines, np.int32))
                    self._refuse_negative(columns, role)
                yield columns
                on_progress(reader.fraction)

    def _refuse_negative(self, columns: Columns, name: str) -> None:
        wrong = columns[name] < 0
        if wrong.any():
            self._refuse(int(columns["line"][np.argmax(wrong)]), f"the {name} is negative")

    def _with_steps(self, rows: TableRows) -> TableRows:
        """Say which pass a row belongs to, and the kind of the pass."""
        prompt = rows.position < self.prompt_tokens
        if "iteration" not in self.columns.roles:
            if self.tells_kinds:
                prompt = rows.about["kind"] == Kind.PREFILL
            step = np.where(prompt, AUTOREGRESSIVE_PREFILL, rows.position)
            return replace(rows, step=step)
        if self.tells_kinds:
            return rows
        decoded = np.unique(rows.step[~prompt])
        kind = np.where(np.isin(rows.step, decoded), Kind.DENOISE, Kind.PREFILL)
        return replace(rows, about={**rows.about, "kind": kind.astype(TOKEN_DTYPES["kind"])})

    def _refuse(self, line: int, problem: str) -> NoReturn:
        raise TraceError(f"{self.path}, line {line}: {problem}")


def _split(columns: Columns) -> Iterator[tuple[int, Columns]]:
    """Yield runs of rows of one request."""
    request: NDArray[Any] = columns["request"]
    cuts = [0, *(np.flatnonzero(np.diff(request)) + 1).tolist(), len(request)]
    for start, stop in pairwise(cuts):
        # Copies: views would keep the whole block in memory.
        part = {name: values[start:stop].copy() for name, values in columns.items()}
        yield int(request[start]), part


def _join(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    # Parts go as soon as they are copied: a request may be most of the memory.
    return {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
