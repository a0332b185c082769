"""Putting requests together and writing them in a thread, beside a model that generates.

The generating thread only hands over: a pass is assembled, and a finished request checked,
encoded and written, while the model works on. Memory is bounded: when the thread is behind by
:data:`QUEUED_PASSES`, the generating thread waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import Queue
from typing import Any, Self

from oled_sim.trace.writer import OpenRequest, TraceWriter

QUEUED_PASSES = 256
"""Passes that may wait for the thread. One of LLaDA2.0-mini takes about 25 kB, prefill apart."""

Job = Callable[[], object]


class Background:
    """Runs jobs one after the other in a thread; a context manager.

    The first job that fails ends the work: later jobs are dropped, and its error is raised by
    the next :meth:`put`, or at the latest when the ``with`` block is left.
    """

    def __init__(self, depth: int = QUEUED_PASSES) -> None:
        self._jobs: Queue[Job | None] = Queue(depth)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="oled-sim-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Do what is left, then raise what went wrong unless an error is on its way already."""
        self._jobs.put(None)
        self._thread.join()
        if kind is None:
            self._raise()

    def put(self, job: Job) -> None:
        """Queue ``job``; waits while the queue is full.

        Raises:
            BaseException: what an earlier job raised.
        """
        self._raise()
        self._jobs.put(job)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = error
            del job  # what it holds is released before the next one arrives


class BackgroundWriter:
    """A :class:`TraceWriter` whose requests are put together and written in the background.

    A context manager, to be left before the writer is.
    """

    def __init__(self, writer: TraceWriter, depth: int = QUEUED_PASSES) -> None:
        self.writer = writer
        self._background = Background(depth)

    def __enter__(self) -> Self:
        self._background.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._background.__exit__(kind)

    def begin(self, request: int, **about: Any) -> BackgroundRequest:
        """Start a request; see :meth:`TraceWriter.begin`."""
        return BackgroundRequest(self.writer.begin(request, **about), self._background)


class BackgroundRequest:
    """An :class:`OpenRequest` that is filled in the background."""

    def __init__(self, request: OpenRequest, background: Background) -> None:
        self._request = request
        self._background = background

    @property
    def request(self) -> int:
        """Number of the request."""
        return self._request.request

    def put(self, job: Callable[[OpenRequest], object]) -> None:
        """Call ``job`` with the request in the background."""
        self._background.put(lambda: job(self._request))

    def add_late(self, late: Callable[[], Mapping[str, Any]], **known: Any) -> None:
        """Queue a pass; see :meth:`RequestBuilder.add_late`."""
        self.put(lambda request: request.add_late(late, **known))

    def finish(self, **about: Any) -> None:
        """Queue the end of the request; see :meth:`OpenRequest.finish`."""
        self.put(lambda request: request.finish(**about))
