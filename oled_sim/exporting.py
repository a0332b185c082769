"""Exporters: plug-ins that turn a trace into a file for another tool.

An exporter is a callable in the entry-point group :data:`oled_sim.plugins.EXPORTERS`, one per
format. ``oled-sim export`` finds it by name. What it takes beyond the arguments of
:class:`Exporter` it declares with :func:`oled_sim.plugin_options.takes`.
"""

from __future__ import annotations

import gzip
import lzma
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import pyarrow as pa

from oled_sim.engine.output import NewFile, refuse_existing
from oled_sim.errors import UsageError
from oled_sim.trace.manifest import Manifest
from oled_sim.trace.reader import Trace

PACKED = (".gz", ".xz", ".zst")
"""Ends of names whose files are compressed, whatever the format."""

EXPORTED_SIGNALS = ("ids", "gates", "confidence", "token_state")
"""Signals of a token or a route, which tables and arrays of tokens can hold."""

_COPY_BYTES = 1 << 20


class Exporter(Protocol):
    """Converts one trace. Memory must be bounded by one request."""

    def __call__(
        self,
        trace: Trace,
        file: IO[bytes],
        *,
        on_progress: Callable[[float], None] = lambda _: None,
        on_note: Callable[[str], None] = lambda _: None,
    ) -> Mapping[str, int]:
        """Write the trace and return what was written, as numbers by name.

        Args:
            trace: open; reading it checks it.
            file: empty, open for reading and writing at any place.
            on_progress: called with the share of the work done, 0 to 1.
            on_note: called with a sentence about what is left out.

        Raises:
            TraceError: the trace is damaged. UsageError: the format cannot hold it.
        """
        ...


def export_trace(
    exporter: Exporter,
    trace: Trace,
    out: Path,
    *,
    overwrite: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Mapping[str, int]:
    """Write ``out`` wholly or not at all; a name that ends in .gz, .xz or .zst is compressed.

    Args:
        exporter: the plug-in. trace: what to export. out: the file.
        overwrite: replace a file that is there.
        on_progress: takes the share done. on_note: takes sentences.
        options: of the exporter's own.

    Returns:
        What the exporter says that it wrote, and ``bytes``, the size of the file.

    Raises:
        UsageError: the file is there, inside the trace, or cannot be written.
        TraceError: the trace is damaged.
    """
    if out.resolve().is_relative_to(trace.path.resolve()):
        raise UsageError(f"{out} is inside the trace {trace.label}: give a file elsewhere")
    refuse_existing(out, force=overwrite, flag="--overwrite")
    packed = out.suffix in PACKED
    with NewFile(out) as new:
        plain = new.temporary.with_name(new.temporary.name + ".plain") if packed else new.temporary
        try:
            with plain.open("w+b") as file:
                written = exporter(trace, file, on_progress=on_progress, on_note=on_note, **options)
            if packed:
                _pack(plain, new.temporary, out.suffix)
        except OSError as error:
            raise new.refused(error) from None
        finally:
            if packed:
                plain.unlink(missing_ok=True)
    return {**written, "bytes": out.stat().st_size}


def exported_manifest(trace: Trace) -> Manifest:
    """Return the manifest of what tables and arrays of tokens can hold of a trace."""
    signals = tuple(s for s in trace.manifest.signals if s in EXPORTED_SIGNALS)
    return msgspec.structs.replace(trace.manifest, signals=signals)


def note_missing_signals(trace: Trace, on_note: Callable[[str], None]) -> None:
    """Say which signals an export of tokens and routes leaves out."""
    missing = [s for s in trace.manifest.signals if s not in EXPORTED_SIGNALS]
    if missing:
        on_note(
            f"the signals {', '.join(missing)} are left out: the format holds tokens and routes"
        )


def first_requests(trace: Trace, count: int | None) -> Trace:
    """Return a trace of the first ``count`` requests; None takes all.

    Raises:
        UsageError: there are not as many.
    """
    if count is None or count == len(trace):
        return trace
    if count > len(trace):
        raise UsageError(f"--requests is {count}, {trace.label} holds {len(trace)}")
    manifest = msgspec.structs.replace(trace.manifest, requests=trace.manifest.requests[:count])
    return Trace(trace.path, manifest, verify=trace.verify, label=trace.label)


def _pack(plain: Path, packed: Path, suffix: str) -> None:
    with plain.open("rb") as source, _packer(packed, suffix) as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)


@contextmanager
def _packer(path: Path, suffix: str) -> Iterator[Any]:
    """Open a compressed file; the same content gives the same bytes."""
    with path.open("wb") as file:
        if suffix == ".gz":  # neither name nor time of the temporary file
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packer:
                yield packer
        elif suffix == ".xz":
            with lzma.open(file, "wb") as packer:
                yield packer
        else:
            with pa.CompressedOutputStream(file, "zstd") as packer:
                yield packer
