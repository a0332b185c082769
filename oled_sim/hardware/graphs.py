"""CUDA graphs: sequences of kernels captured once, launched by one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from oled_sim.hardware.streams import stream_for

__all__ = ["Graphs"]


class Graphs:
    """Captured sequences of kernels by key. On the CPU nothing is captured and nothing replayed.

    All share one memory pool for their intermediates, so they must not run concurrently: replay
    them on one stream. What a sequence leaves behind must lie in memory allocated outside.

    Args:
        device: a CUDA device, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream = stream_for("capture", device) if device.type == "cuda" else None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, key: Hashable, call: Callable[[], object], *, warm: bool = False) -> None:
        """Capture what ``call`` launches; nothing happens when ``key`` is there already.

        Args:
            key: to replay by.
            call: launches kernels on the current stream, without waiting for the device. It runs
                once as it is before (libraries choose and load their kernels then) unless
                ``warm``: what it changes, it may change.
            warm: a call of the same shapes has run before.
        """
        if self._stream is None or key in self._captured:
            return
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if not warm:
                call()
            torch.cuda.synchronize(self.device)
            # Other threads may allocate or copy meanwhile: they are no part of the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._captured[key] = graph

    def replay(self, key: Hashable) -> bool:
        """Launch a captured sequence on the current stream; False when there is none."""
        graph = self._captured.get(key)
        if graph is None:
            return False
        graph.replay()
        return True
