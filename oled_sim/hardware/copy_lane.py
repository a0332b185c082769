"""The copy engine: experts from host memory to slots of the GPU, one after the other.

On CUDA copies are queued on a stream of their own. On a CPU device a thread copies; the order and
what can be asked are the same.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from oled_sim.hardware.clock import Clock, Mark, now_us
from oled_sim.hardware.host_experts import HostExperts
from oled_sim.hardware.place import Place
from oled_sim.hardware.slab import Slab
from oled_sim.hardware.streams import stream_for


@dataclass(slots=True)
class Copy:
    """One expert on its way. ``layer``, ``expert``, ``slot``: what goes where."""

    layer: int
    expert: int
    slot: int
    began: Mark | None = None
    ended: Mark | None = None
    error: BaseException | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Whether every byte has arrived.

        Raises:
            RuntimeError: the copy failed.
        """
        if self.error is not None:
            raise RuntimeError("copying an expert failed") from self.error
        return self.ended is not None and self.ended.passed


class CopyLane:
    """Queues copies; they run in the order of submission and never beside each other.

    Args:
        place: device. clock: sets the marks.
        experts: where copies come from: page-locked memory, if there is a GPU. Pageable memory
            would make the host wait for the copy and for everything queued before it.
        slab: where they go.
    """

    def __init__(self, place: Place, clock: Clock, experts: HostExperts, slab: Slab) -> None:
        self._clock = clock
        # Taking a row of a tensor costs as much as queueing its copy: they are taken once.
        self._experts = [list(packed) for packed in experts.packed]
        self._slots = list(slab.weights)
        self._last: Mark | None = None
        self._stream = stream_for("copies", place.device) if place.cuda else None
        self._home = torch.cuda.current_stream(place.device) if place.cuda else None
        self._queue: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not place.cuda:
            self._thread = threading.Thread(target=self._work, name="copy lane", daemon=True)
            self._thread.start()

    def submit(self, copies: Sequence[tuple[Copy, Mark | None]]) -> None:
        """Queue copies in their order; their marks are set here.

        The current stream must be the one that was when the lane was made: asking which it is
        would take as long as a copy does.

        Args:
            copies: each with the mark of the GPU's stream that it waits for: who reads its slot
                until then.
        """
        if self._stream is None:
            for copy, _ in copies:
                self._queue.put(copy)
            return
        assert self._home is not None
        torch.cuda.set_stream(self._stream)
        try:
            for copy, after in copies:
                self._launch(copy, after)
        finally:
            torch.cuda.set_stream(self._home)

    def _launch(self, copy: Copy, after: Mark | None) -> None:
        assert self._stream is not None
        if after is not None and after.event is not None and not after.passed:
            self._stream.wait_event(after.event)
        idle = self._last is None or self._last.passed
        copy.began = self._clock.copy_mark(self._stream) if idle else self._last
        self._slots[copy.slot].copy_(self._experts[copy.layer][copy.expert], non_blocking=True)
        copy.ended = self._last = self._clock.copy_mark(self._stream)

    def close(self) -> None:
        """Wait for what is queued, and end."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    @torch.inference_mode()
    def _work(self) -> None:
        while (copy := self._queue.get()) is not None:
            copy.began = Mark(None, now_us())
            try:
                self._slots[copy.slot].copy_(self._experts[copy.layer][copy.expert])
            except BaseException as error:  # raised by whoever asks for the copy
                copy.error = error
            copy.ended = Mark(None, now_us())
