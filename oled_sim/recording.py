"""Recording a model that somebody else runs: ``with oled_sim.record(model, out=...)``.

The model is a live object of whatever runtime; a collector plug-in of the entry-point group
:data:`oled_sim.plugins.LIVE_COLLECTORS` knows its classes and reads it through hooks. Nothing
here, and nothing in a collector, imports the runtime.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from oled_sim import plugins
from oled_sim.errors import TraceError, UsageError
from oled_sim.importing import check_out
from oled_sim.trace.background import BackgroundRequest, BackgroundWriter
from oled_sim.trace.manifest import Manifest
from oled_sim.trace.writer import TraceWriter


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the caller of :func:`record` asks for, whatever the collector."""

    signals: tuple[str, ...] = ()
    redact: bool = False
    name: str | None = None
    stands_for: str | None = None
    source: str = ""


class LiveCollector(AbstractContextManager[None], Protocol):
    """What a plug-in offers: made for one model, it hooks the model while it is entered.

    A plug-in is called as ``plugin(model, recorder, wishes, **options)`` and has a static method
    ``knows``. It raises :class:`UsageError` for options that make no sense, and
    :class:`TraceError`, as early as it can, for a pass that it cannot record in full.
    """

    @staticmethod
    def knows(model: Any) -> bool:
        """Whether the model is of a kind that this collector records."""
        ...

    def request(self, prompt: Any, **about: Any) -> AbstractContextManager[Any]:
        """Mark the passes in the block as those of one request; see :meth:`Recorder.request`."""
        ...


class Recorder:
    """What the body of ``with record(...)`` sees.

    Attributes:
        path: directory of the trace.
        requests: requests that have been recorded whole; the last of them may not be on disk yet.
        notes: sentences about what was left out.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self.requests = 0
        self.notes: list[str] = []
        self.collector: LiveCollector | None = None
        self._overwrite = overwrite
        self._begun = 0
        self._manifest: Manifest | None = None
        self._writer: TraceWriter | None = None
        self._background: BackgroundWriter | None = None

    def request(self, prompt: Any, **about: Any) -> AbstractContextManager[Any]:
        """Mark the passes run in the block as one request.

        Needed where the runtime has no ``generate`` of its own that a collector could follow.

        Args:
            prompt: token ids of the prompt, [P] or [1, P].
            about: what the collector wants to know besides.

        Raises:
            UsageError: the block was left, or the prompt or ``about`` make no sense.
        """
        if self.collector is None:
            raise UsageError("the block of record() was left: a request belongs inside it")
        return _Once(self.collector.request(prompt, **about), "request()")

    def note(self, sentence: str) -> None:
        """Keep a sentence about something that was left out, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def begin(self, manifest: Manifest) -> BackgroundRequest:
        """Start a request; for collectors. The first one opens the trace.

        Raises:
            TraceError: ``manifest`` says something else than that of earlier requests.
        """
        if self._background is None or self._manifest is None:
            self._open(manifest)
        elif manifest.recipe() != self._manifest.recipe():
            raise TraceError(_difference(self._manifest, manifest))
        assert self._background is not None
        self._begun += 1
        return self._background.begin(self._begun - 1)

    @contextmanager
    def one_request(self, count: int = 1) -> Iterator[None]:
        """Count ``count`` requests if the block ends well; for collectors."""
        try:
            yield
        except BaseException:
            self.note("a generation that failed was left out")
            raise
        self.requests += count

    def _open(self, manifest: Manifest) -> None:
        self._writer = TraceWriter(self.path, manifest, overwrite=self._overwrite)
        self._background = BackgroundWriter(self._writer)
        self._background.__enter__()
        self._manifest = manifest

    def close(self, failed: type[BaseException] | None) -> None:
        """Write what is left; raise what went wrong in the background unless ``failed``."""
        self.collector = None
        if self._background is None or self._writer is None:
            return
        try:
            self._background.__exit__(failed)
        finally:
            self._writer.__exit__()


def _difference(first: Manifest, second: Manifest) -> str:
    ours, theirs = (msgspec.to_builtins(m.recipe()) for m in (first, second))
    field = next(name for name in ours if ours[name] != theirs[name])
    if isinstance(ours[field], dict) and isinstance(theirs[field], dict):
        inner = next(k for k in ours[field] if ours[field][k] != theirs[field][k])
        before, now = ours[field][inner], theirs[field][inner]
        field = inner
    else:
        before, now = ours[field], theirs[field]
    return (
        f"{field} is {now}, and was {before} for the first request: one trace holds one setting,"
        " use another record() for the other"
    )


_T = TypeVar("_T")


class _Once(AbstractContextManager[_T]):
    """A context manager that says so when it is entered again; ``name``: of what made it."""

    def __init__(self, inner: AbstractContextManager[_T], name: str) -> None:
        self._inner = inner
        self._name = name
        self._entered = False

    def __enter__(self) -> _T:
        if self._entered:
            raise UsageError(f"this {self._name} was entered before: call {self._name} again")
        self._entered = True
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.__exit__(*error)


def record(
    model: Any,
    out: str | Path,
    *,
    collector: str | None = None,
    signals: Sequence[str] = (),
    redact: bool = False,
    name: str | None = None,
    stands_for: str | None = None,
    source: str = "",
    overwrite: bool = False,
    **options: Any,
) -> AbstractContextManager[Recorder]:
    """Record every generation in the ``with`` block as a request of the trace ``out``.

    Generated tokens are those of a run without it: hooks read, and draw no random number.
    Requests are written in a thread as they finish, so a run that is killed leaves every finished
    request readable. Hooks are gone when the block is left, also by an exception.

    Args:
        model: a live model; which runtimes are known is described in docs/collecting.md.
        out: directory of the trace.
        collector: plug-in to use; by default the one that knows the model.
        signals: of ``full_gate``, ``embedding``, ``cosines``: recorded besides ids, gates,
            confidence and token state.
        redact: leave prompt token ids out of the trace.
        name: of the model, for the manifest; by default what its configuration says.
        stands_for: cost geometry that results use by default.
        source: where prompts came from, for the manifest.
        overwrite: replace a trace that is there.
        options: of the collector.

    Returns:
        A context manager, to be entered once.

    Raises:
        UsageError: no collector knows the model, an option makes no sense, or ``out`` holds
            something and ``overwrite`` is not given.
        TraceError: a pass could not be recorded in full, from within the generation that ran it;
            or nothing was recorded at all, when the block is left.
    """
    if isinstance(signals, str):  # a sequence too, of letters
        raise UsageError(f"signals={signals!r}: give a list, as in signals=[{signals!r}]")
    for option, value in (("name", name), ("stands_for", stands_for), ("source", source)):
        if not isinstance(value, str | None):
            raise UsageError(f"{option}={value!r}: give a text")
    wishes = Wishes(tuple(signals), redact, name, stands_for, source)
    return _Once(_recording(model, Path(out), collector, wishes, overwrite, options), "record()")


@contextmanager
def _recording(
    model: Any,
    path: Path,
    collector: str | None,
    wishes: Wishes,
    overwrite: bool,
    options: dict[str, Any],
) -> Iterator[Recorder]:
    check_out(path, overwrite=overwrite)
    plugin = plugins.load(plugins.LIVE_COLLECTORS, collector) if collector else _find(model)
    recorder = Recorder(path, overwrite=overwrite)
    live = _made(plugin, model, recorder, wishes, options)
    recorder.collector = live
    try:
        with live:
            yield recorder
    except BaseException as error:
        recorder.close(type(error))
        raise
    recorder.close(None)
    if not recorder.requests:
        raise TraceError(
            "nothing was recorded: no generation ran inside the block, or it went around the model"
            " that was given to record()"
        )


def _find(model: Any) -> Any:
    """Return the collector that knows the model."""
    entries = sorted(entry_points(group=plugins.LIVE_COLLECTORS), key=lambda e: e.name)
    loaded = {entry.name: plugins.load(plugins.LIVE_COLLECTORS, entry.name) for entry in entries}
    known = [name for name, plugin in loaded.items() if plugin.knows(model)]
    if len(known) == 1:
        return loaded[known[0]]
    kind = type(model).__name__
    if known:
        raise UsageError(
            f"several collectors know a {kind}: say which, as in collector={known[0]!r}"
        )
    raise UsageError(
        f"no collector knows a {kind}: known are {', '.join(loaded)}, each with its classes"
    )


def _made(
    plugin: Any, model: Any, recorder: Recorder, wishes: Wishes, options: dict[str, Any]
) -> LiveCollector:
    try:
        inspect.signature(plugin).bind(model, recorder, wishes, **options)
    except TypeError as error:
        raise UsageError(f"collector {plugin.__name__}: {error}") from None
    return plugin(model, recorder, wishes, **options)
