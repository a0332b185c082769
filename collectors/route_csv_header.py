"""The header of a route CSV: format version, the model's geometry, bytes of an expert per layer.

Format ``route_trace v1``, as written by BigMoeOnEdge's ``--route-trace`` (github.com/Helldez/
BigMoeOnEdge, revision 2d4f2b1, ``core/src/metrics/route_trace_sink.cpp``, described in its
``docs/telemetry.md``): comment lines, one line of column names, then one row per token, layer and
slot. Columns are found by name, since later writers of v1 append some.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath

from oled_sim.errors import TraceError
from oled_sim.trace.manifest import MOST_LAYER

from .text_blocks import LineReader

VERSION_LINE = "# route_trace v1"


@dataclass(frozen=True)
class Header:
    """What a route CSV says before its rows.

    Attributes:
        model: file name of the model, without folder and ``.gguf``. architecture: its family.
        total_layers: layers of the model, those without routed experts included.
        experts: experts per layer. top_k: experts per token.
        expert_bytes: bytes of one expert by layer, for the layers that have routed experts.
        comments: comment lines that are not of the format.
        columns: names in file order.
    """

    model: str
    architecture: str
    total_layers: int
    experts: int
    top_k: int
    expert_bytes: dict[int, int]
    comments: tuple[str, ...]
    columns: tuple[str, ...]


def read_header(reader: LineReader, needed: Collection[str]) -> Header:
    """Read up to the line of column names.

    Args:
        reader: at the start of the file.
        needed: columns that must be there.

    Raises:
        TraceError: another format or version, or a fact that is missing or impossible.
    """
    _check_version(reader)
    lines = _Comments(reader)
    header = Header(
        model=lines.model(),
        architecture=lines.fact("arch", r"\S+"),
        total_layers=int(lines.fact("n_layer", r"\d+")),
        experts=int(lines.fact("n_expert", r"\d+")),
        top_k=int(lines.fact("n_expert_used", r"\d+")),
        expert_bytes=lines.expert_bytes(),
        comments=lines.others(),
        columns=lines.columns(needed),
    )
    _check_geometry(header, lines)
    return header


def _check_version(reader: LineReader) -> None:
    first = reader.read_line()
    if first == VERSION_LINE:
        return
    if first.startswith("# route_trace "):
        found, known = first.rpartition(" ")[2], VERSION_LINE.rpartition(" ")[2]
        problem = f"route_trace {found}, this importer reads {known}"
    else:
        problem = f"not a route CSV, which starts with {VERSION_LINE!r}"
    raise TraceError(f"{reader.path}, line 1: {problem}")


class _Comments:
    """The comment lines after the first, and the line of column names that ends them."""

    def __init__(self, reader: LineReader) -> None:
        self.path = reader.path
        self.lines: dict[int, str] = {}
        while (text := reader.read_line()).startswith("#"):
            self.lines[reader.line] = text
        self.names = text
        self.names_line = reader.line
        self.model_line = next((n for n, t in self.lines.items() if t.startswith("# model=")), None)

    def refuse(self, problem: str, line: int | None = None) -> TraceError:
        """Return the complaint, by default about the whole header."""
        place = f"lines 1 to {self.names_line}" if line is None else f"line {line}"
        return TraceError(f"{self.path}, {place}: {problem}")

    def model(self) -> str:
        path = self._search(r"# model=(.*?)(?: arch=.*)?", "model")
        return PurePosixPath(path).name.removesuffix(".gguf") or "unknown"

    def fact(self, name: str, form: str) -> str:
        return self._search(rf"# model=.* {name}=({form})(?: .*)?", name)

    def expert_bytes(self) -> dict[int, int]:
        sizes = {}
        for line, text in self.lines.items():
            if text.startswith("# layer="):
                match = re.fullmatch(r"# layer=(\d+) expert_bytes=(\d+)(?: .*)?", text)
                if not match:
                    raise self.refuse("not of the form '# layer=N expert_bytes=B ...'", line)
                sizes[int(match[1])] = int(match[2])
        return {layer: size for layer, size in sorted(sizes.items()) if size}

    def others(self) -> tuple[str, ...]:
        known = ("# layer=", "# model=")
        found = [text.lstrip("# ") for text in self.lines.values() if not text.startswith(known)]
        return tuple(found)

    def columns(self, needed: Collection[str]) -> tuple[str, ...]:
        names = tuple(self.names.split(","))
        for name in needed:
            if names.count(name) != 1:
                problem = "is missing" if name not in names else "is there twice"
                raise self.refuse(f"the column {name!r} {problem}", self.names_line)
        return names

    def _search(self, pattern: str, name: str) -> str:
        if self.model_line is None:
            raise self.refuse("no comment line '# model=...' describes the model")
        match = re.fullmatch(pattern, self.lines[self.model_line])
        if not match:
            raise self.refuse(f"{name}= is missing, or is no number", self.model_line)
        return match[1]


def _check_geometry(header: Header, lines: _Comments) -> None:
    if not 1 <= header.top_k <= header.experts <= 65536:
        problem = f"n_expert_used={header.top_k} of n_expert={header.experts} is impossible"
        raise lines.refuse(problem, lines.model_line)
    if not header.expert_bytes:
        raise lines.refuse("no line '# layer=N expert_bytes=B ...' tells the size of an expert")
    if (last := max(header.expert_bytes)) >= header.total_layers:
        raise lines.refuse(f"layer={last} is given, n_layer is {header.total_layers}")
    if last > MOST_LAYER:
        raise lines.refuse(f"layer={last} is above {MOST_LAYER}, the highest that a trace can hold")
