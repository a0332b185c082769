"""Reading a trace: one request at a time, every byte checked against the manifest."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Iterator
from importlib import resources
from pathlib import Path

import pyarrow as pa

from oled_sim.errors import TraceError, UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.files import sha256_hex, table_path
from oled_sim.trace.manifest import MANIFEST, FileEntry, Manifest, load_manifest
from oled_sim.trace.replaced import REPLACED, holds_requests
from oled_sim.trace.schema import TABLES, RequestTrace
from oled_sim.trace.tables import Layout, decode_table, from_tables, schemas
from oled_sim.trace.validate import RuleError, check_request

RECORDING_FLAGS = {
    "full_gate": "--full-gate",
    "embedding": "--embedding",
    "cosines": "--cosines",
}
"""Flags of ``oled-sim collect`` that record a signal; the others are always recorded."""

_OPTIONAL_COLUMNS = {"gates", "full_gate", "embedding", "cosines"}


class Trace:
    """An open trace. Nothing but the manifest is in memory between reads.

    Attributes:
        label: what to call it: the bundled name or path that it was opened by.
    """

    def __init__(
        self, path: Path, manifest: Manifest, *, verify: bool = True, label: str = ""
    ) -> None:
        self.path = path
        self.label = label or str(path)
        self.manifest = manifest
        self.verify = verify
        signals = frozenset(manifest.signals)
        self._layout = Layout(manifest.geometry, signals, manifest.ragged)
        self._schemas = schemas(self._layout)

    @property
    def geometry(self) -> RoutingGeometry:
        """What the trace routes over."""
        return self.manifest.geometry

    @property
    def requests(self) -> tuple[int, ...]:
        """Numbers of the requests, ascending."""
        return tuple(r.request for r in self.manifest.requests)

    @property
    def signals(self) -> frozenset[str]:
        """Signals that the trace holds."""
        return frozenset(self.manifest.signals)

    def __len__(self) -> int:
        return len(self.manifest.requests)

    def __iter__(self) -> Iterator[RequestTrace]:
        return (self.read(request) for request in self.requests)

    def read(self, request: int, *, signals: Collection[str] | None = None) -> RequestTrace:
        """Read and check one request.

        Args:
            request: one of :attr:`requests`.
            signals: decode only these optional signals (None: all that the trace holds).

        Raises:
            TraceError: no such request, a file missing or damaged, or a rule of the format broken.
        """
        entry = self.manifest.entry(request)
        wanted = self.signals if signals is None else self.signals & set(signals)
        tables = {name: self._read_table(name, request, entry.files, wanted) for name in TABLES}
        try:
            trace = from_tables(tables, self._layout)
        except RuleError as broken:
            raise broken.locate(str(self.path), request) from None
        check_request(trace, self.manifest, str(self.path), signals=wanted, entry=entry)
        return trace

    def require(self, signals: Iterable[str], who: str) -> None:
        """Refuse the trace when a signal is missing.

        Args:
            signals: what is needed (``future`` is every trace's and ignored).
            who: who needs it, such as ``policy 'finemoe'``.

        Raises:
            TraceError: says which signal is missing and how to record it.
        """
        for signal in sorted(set(signals) - {"future"}):
            if signal not in self.signals:
                flag = RECORDING_FLAGS.get(signal)
                how = f"oled-sim collect {flag}" if flag else "oled-sim collect"
                raise TraceError(
                    f"{who} needs the signal {signal!r}, which the trace {self.path} does not hold:"
                    f" record one with `{how}`"
                )

    def _read_table(
        self, name: str, request: int, files: dict[str, FileEntry], signals: Collection[str]
    ) -> pa.Table:
        relative = table_path(name, request)
        file = self.path / relative
        data = _read_file(file, files[relative], verify=self.verify)
        expected = self._schemas[name]
        columns = set(expected.names) - (_OPTIONAL_COLUMNS - set(signals))
        try:
            return decode_table(data, name, expected, columns)
        except TraceError as error:
            raise TraceError(f"{file}, request {request}: {error}") from None
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise TraceError(
                f"{file}, request {request} is not a readable Parquet file: {reason}"
            ) from None


def open_trace(source: str | Path, *, verify: bool = True) -> Trace:
    """Open a trace directory, or a bundled trace by name.

    Args:
        source: a path, or a name from :func:`bundled_traces` (a trace at that path wins).
        verify: check the SHA-256 of every file read; page checksums are checked regardless.

    Raises:
        UsageError: neither a trace's directory nor the name of a bundled trace.
        TraceError: a trace that is damaged, of another version, or without requests.

    Where a writer that was to replace the trace was killed too soon, the old one is opened.
    """
    path = _resolve(source)
    if (path / REPLACED / MANIFEST).exists() and not holds_requests(path):
        path /= REPLACED  # who was to replace it was killed before anything was finished
    manifest = load_manifest(path)
    if not manifest.requests:
        raise TraceError(f"the trace {path} holds no finished request: record it again")
    return Trace(path, manifest, verify=verify, label=str(source))


@functools.cache
def bundled_traces() -> dict[str, Path]:
    """Return name and directory of every trace that ships with the package."""
    root = Path(str(resources.files("oled_sim.traces")))
    return {f.parent.name: f.parent for f in sorted(root.glob(f"*/{MANIFEST}"))}


def _resolve(source: str | Path) -> Path:
    path, name = Path(source), str(source)
    bundled = bundled_traces()
    # A folder of results may have the name of the trace that they are of.
    is_one = (path / MANIFEST).exists() or (path.exists() and name not in bundled)
    if is_one or isinstance(source, Path):
        return path
    if name in bundled:
        return bundled[name]
    near = difflib.get_close_matches(name, bundled, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(bundled) or "none"
    raise UsageError(f"no trace {name!r}: {hint}give a directory or a bundled trace ({known})")


def _read_file(file: Path, entry: FileEntry, *, verify: bool) -> bytes:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise TraceError(f"{file} is missing: restore it, or record the trace again") from None
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror}") from None
    if len(data) != entry.size_bytes:
        raise TraceError(
            f"{file} has {len(data)} bytes instead of {entry.size_bytes}: truncated or replaced"
        )
    if verify and sha256_hex(data) != entry.sha256:
        raise TraceError(f"{file} does not match its checksum in the manifest: damaged or replaced")
    return data
