"""Writing a trace: one request at a time, each either wholly there or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Self

import msgspec

from oled_sim.errors import TraceError, UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace import replaced
from oled_sim.trace.builder import RequestBuilder, canonical
from oled_sim.trace.files import TEMPORARY_SUFFIX, sha256_hex, table_path, write_atomic
from oled_sim.trace.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    RequestEntry,
    load_manifest,
    save_manifest,
)
from oled_sim.trace.replaced import REPLACED
from oled_sim.trace.schema import TABLES, RequestTrace
from oled_sim.trace.tables import Layout, encode_table, to_tables
from oled_sim.trace.validate import check_request


def write_files(
    path: Path,
    manifest: Manifest,
    trace: RequestTrace,
    about: RequestEntry,
    compression_level: int = 9,
    *,
    check: bool = True,
) -> RequestEntry:
    """Check a whole request and write its files; return ``about`` with them.

    The manifest is left alone: nobody sees the request before :meth:`TraceWriter.add`.

    Args:
        path: an existing trace directory. manifest: of that trace.
        trace: in the row order that the manifest states.
        about: its entry, without files. compression_level: as of :class:`TraceWriter`.
        check: False for what is right by construction, a tenth of the time; readers check anyway.

    Raises:
        TraceError: it breaks a rule of the format, or lacks a signal of the manifest.
    """
    if check:
        check_request(trace, manifest, str(path))
    layout = Layout(manifest.geometry, frozenset(manifest.signals), manifest.ragged)
    entries = {}
    for name, table in to_tables(trace, layout).items():
        relative = table_path(name, trace.request)
        data = memoryview(encode_table(table, compression_level))
        write_atomic(path / relative, data)
        entries[relative] = FileEntry(size_bytes=data.nbytes, sha256=sha256_hex(data))
    return msgspec.structs.replace(about, files=entries)


class TraceWriter:
    """Writes the trace directory ``path``.

    The manifest is rewritten after every finished request, so a writer that is killed leaves
    every finished request readable. Several requests may be open at once. As a context manager it
    leaves no directory behind when no request was finished.

    Args:
        path: the directory; made with its parents where absent.
        manifest: everything but the requests.
        resume: keep the finished requests of a trace with the same settings, drop leftovers.
        overwrite: replace a trace that is there, once a request is finished; what ends the block
            before, Ctrl-C included, leaves it as it was.
        compression_level: of zstd, 1 (fast) to 22; 19 is a tenth smaller than 9, and slow.

    Raises:
        UsageError: ``path`` holds something and neither flag is given, or it is no trace.
        TraceError: ``resume`` meets a damaged trace or one with other settings.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: Manifest,
        *,
        resume: bool = False,
        overwrite: bool = False,
        compression_level: int = 9,
    ) -> None:
        self.path = Path(path)
        self.compression_level = compression_level
        manifest.check()
        self.manifest = msgspec.structs.replace(manifest, requests=())
        self._open_requests: set[int] = set()
        self._found_directory = self.path.exists()
        self._prepare(resume, overwrite)
        save_manifest(self.path, self.manifest)

    @property
    def geometry(self) -> RoutingGeometry:
        """What the trace routes over."""
        return self.manifest.geometry

    @property
    def finished(self) -> frozenset[int]:
        """Numbers of the requests that are in the trace."""
        return frozenset(r.request for r in self.manifest.requests)

    def begin(
        self, request: int, *, prompt_row: int | None = None, prompt_sha256: str | None = None
    ) -> OpenRequest:
        """Start a request.

        Raises:
            UsageError: the request is in the trace already, or open.
        """
        self._claim(request)
        self._open_requests.add(request)
        return OpenRequest(self, request, prompt_row, prompt_sha256)

    def write_request(
        self,
        trace: RequestTrace,
        *,
        prompt_tokens: int,
        output_tokens: int,
        finish_reason: str = "length",
        prompt_row: int | None = None,
        prompt_sha256: str | None = None,
    ) -> None:
        """Check and write a whole request.

        Raises:
            UsageError: the request is in the trace already, or open.
            TraceError: it breaks a rule of the format, or lacks a signal of the manifest.
        """
        self._claim(trace.request)
        if self.manifest.row_order == "canonical":
            trace = canonical(trace)
        about = RequestEntry(
            request=trace.request,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            passes=trace.passes,
            events=trace.events,
            finish_reason=finish_reason,
            prompt_row=prompt_row,
            prompt_sha256=prompt_sha256,
            files={},
        )
        self._list(write_files(self.path, self.manifest, trace, about, self.compression_level))

    def add(self, entry: RequestEntry) -> None:
        """List a request whose files :func:`write_files` put in place, from whatever process.

        Raises:
            UsageError: the request is in the trace already, or open.
        """
        self._claim(entry.request)
        self._list(entry)

    def _list(self, entry: RequestEntry) -> None:
        self.manifest = self.manifest.with_request(entry)
        save_manifest(self.path, self.manifest)
        if len(self.manifest.requests) == 1:
            replaced.drop(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Forget open requests; a trace without a finished request is removed."""
        self._open_requests.clear()
        if not self.finished:
            self._remove_empty()
            replaced.put_back(self.path)

    def _remove_empty(self) -> None:
        (self.path / MANIFEST).unlink(missing_ok=True)
        folders = [self.path / name for name in TABLES]
        for folder in folders if self._found_directory else [*folders, self.path]:
            with contextlib.suppress(OSError):  # another file is in it
                folder.rmdir()

    def _claim(self, request: int) -> None:
        if request in self.finished:
            raise UsageError(f"request {request} is in the trace {self.path} already")
        if request in self._open_requests:
            raise UsageError(f"request {request} of the trace {self.path} is open already")

    def _prepare(self, resume: bool, overwrite: bool) -> None:
        if resume or overwrite:
            replaced.heal(self.path)
        if refuse_occupied(self.path, allowed=resume or overwrite):
            self._prepare_existing(overwrite)
        try:
            for name in TABLES:
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make the trace {self.path} ({error.strerror}): name another directory"
            ) from None

    def _prepare_existing(self, overwrite: bool) -> None:
        if overwrite:
            replaced.set_aside(self.path)
            (self.path / MANIFEST).unlink(missing_ok=True)
        elif (self.path / MANIFEST).exists():
            self._take_over(load_manifest(self.path))
        for file in _leftovers(self.path) - {self.path / f for f in self.manifest.files}:
            file.unlink(missing_ok=True)

    def _take_over(self, found: Manifest) -> None:
        ours, theirs = self.manifest.recipe(), found.recipe()
        for field, value in ours.items():
            if value != theirs[field]:
                raise TraceError(
                    f"{self.path} was recorded with another {field!r} and cannot be resumed:"
                    " use the same settings or another directory, or overwrite it"
                )
        for name, entry in found.files.items():
            file = self.path / name
            if not file.exists() or file.stat().st_size != entry.size_bytes:
                raise TraceError(f"{file} is missing or truncated: record the trace again")
        self.manifest = msgspec.structs.replace(self.manifest, requests=found.requests)


class OpenRequest(RequestBuilder):
    """A request being recorded; nothing of it is on disk before :meth:`finish`."""

    def __init__(
        self, writer: TraceWriter, request: int, prompt_row: int | None, prompt_sha256: str | None
    ) -> None:
        super().__init__(
            writer.geometry, request, source_order=writer.manifest.row_order == "source"
        )
        self._writer = writer
        self._prompt_row = prompt_row
        self._prompt_sha256 = prompt_sha256

    def finish(
        self, *, output_tokens: int, prompt_tokens: int, finish_reason: str = "length"
    ) -> None:
        """Write the request's files, then the manifest.

        Args:
            output_tokens: generated tokens up to and including the first end of sequence.
            prompt_tokens: tokens of the prompt.
            finish_reason: ``eos``, ``length``, or the runtime's own word.

        Raises:
            TraceError: the request breaks a rule of the format.
        """
        trace = self.build()
        self._writer._open_requests.discard(self.request)
        self._writer.write_request(
            trace,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            finish_reason=finish_reason,
            prompt_row=self._prompt_row,
            prompt_sha256=self._prompt_sha256,
        )


def refuse_occupied(path: Path, *, allowed: bool) -> bool:
    """Return whether a trace, or what a killed writer left of one, is at ``path``.

    Raises:
        UsageError: ``path`` is a file, holds what is no trace, or one that is not ``allowed``.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: name a directory for the trace")
    if not path.is_dir() or not any(path.iterdir()):
        return False
    content = {f for f in path.rglob("*") if not f.is_dir() and path / REPLACED not in f.parents}
    if not (path / MANIFEST).exists() and _leftovers(path) != content:
        raise UsageError(f"{path} holds files that are no trace: choose another directory")
    if not allowed:
        raise UsageError(
            f"{path} is not empty: choose another directory, or ask to resume or overwrite"
        )
    return True


def _leftovers(path: Path) -> set[Path]:
    """Return the files that a writer may have left, finished or not, manifest apart."""
    tables = {f for name in TABLES for f in (path / name).glob("*.parquet*")}
    return tables | set(path.glob(MANIFEST + TEMPORARY_SUFFIX))
