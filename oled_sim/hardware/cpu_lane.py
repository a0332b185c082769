"""The CPU lane: experts of an event on CPU workers, beside the GPU.

No thread of its own: the calling thread, which polls all lanes anyway, moves a job on. A kernel
writes the activations to page-locked memory; once :meth:`CpuLane.poll` sees that it has run, it
lets the workers begin; a kernel reads their sums. Copies would wait in the copy engines' queues
behind those of experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.cpu_experts import LOOKS, CpuExperts
from oled_sim.hardware.graphs import Graphs
from oled_sim.hardware.rows import EventRows

if TYPE_CHECKING:
    from oled_sim.hardware.host_experts import HostExperts
    from oled_sim.hardware.place import Place

BESIDE_CPU_LOOKS = 50
"""Where the CPU stands for the GPU as well, idle workers soon leave it their cores."""
REST_S = 5e-5
CHUNK = 1024


@dataclass(frozen=True)
class JobTimes:
    """When a job ran, on the host's monotone clock (``time.perf_counter_ns``), µs.

    ``begin_us``: it was submitted. ``end_us``: :meth:`CpuLane.poll` saw that its sums were there.
    ``compute_us``: how long before that the workers were let begin.
    """

    begin_us: float
    end_us: float
    compute_us: float


class CpuLane:
    """Computes experts of one event at a time in the background.

    Args:
        experts: weights in host memory, bf16 or fp32.
        place: device and dtype of activations.
        cost: widths and k.
        workers: threads that compute.
        most_tokens: of one event.

    Raises:
        UsageError: see :class:`CpuExperts`.
    """

    def __init__(
        self, experts: HostExperts, place: Place, cost: CostGeometry, workers: int,
        most_tokens: int,
    ) -> None:  # fmt: skip
        looks = LOOKS if place.cuda else BESIDE_CPU_LOOKS
        self._workers = CpuExperts(experts, place, cost, workers, most_tokens, looks)
        shape = (most_tokens, cost.hidden_size)
        with torch.inference_mode(False):
            self._back = torch.zeros(shape, dtype=place.dtype, device=place.device)
        self._link = _Link(place.device) if place.cuda else None
        if self._link is not None:  # compile the kernel now
            self._link.send(self._back[:1], self._workers.x[:1])
            self._link.read(self._workers.sums[:1], self._back[:1])
        # Other threads get the interpreter, and where the CPU is all there is, this core.
        self._rest_s = 0.0 if place.cuda else REST_S
        self.times = JobTimes(0.0, 0.0, 0.0)
        self._begin_ns = self._start_ns = 0
        self._tokens = 0
        self._sent = self._working = self._closed = False
        self._error: BaseException | None = None

    def capture(self, x: Tensor) -> None:
        """Capture the way there and back of events with input ``x`` [T, h]: launches cost less.

        The device must be idle, and jobs run on the stream that is current now.
        """
        if self._link is not None:
            tokens = len(x)
            self._link.capture(x, self._workers.x[:tokens])
            self._link.capture(self._workers.sums[:tokens], self._back[:tokens])

    def submit(self, layer: int, x: Tensor, rows: EventRows, which: NDArray[np.integer]) -> None:
        """Start the experts at positions ``which`` (int [n], n ≥ 1) of an event; return at once.

        ``x`` [T, h], contiguous, must be ready on the current stream.

        Raises:
            IndexError: there is no such layer in host memory.
            RuntimeError: the job before has not been finished, or the lane is closed.
        """
        if self._sent or self._working or self._closed:
            raise RuntimeError("the CPU lane takes one job at a time, and none once closed")
        if len(which) == 0:
            raise ValueError("a job of the CPU lane needs at least one expert")
        self._begin_ns = time.perf_counter_ns()
        given, there = x[: rows.tokens], self._workers.x[: rows.tokens]
        if self._link is None:
            there.copy_(given)
        else:
            self._link.send(given, there)
        self._workers.prepare(layer, rows, which)
        self._tokens, self._sent = rows.tokens, True
        self.poll()

    @property
    def sums(self) -> Tensor:
        """Where results land on the device, [most_tokens, h]: what :meth:`result` is a view of."""
        return self._back

    @property
    def working(self) -> bool:
        """Whether the last :meth:`poll` left the workers computing."""
        return self._working

    def poll(self) -> bool:
        """Move the job on; return whether the last one's sums are there, in host memory."""
        if self._sent and (self._link is None or self._link.sent.query()):
            self._sent, self._working = False, True
            self._start_ns = time.perf_counter_ns()
            self._workers.start()
        elif self._working and self._finished():
            self._working = False
            end = time.perf_counter_ns()
            self.times = JobTimes(self._begin_ns / 1e3, end / 1e3, (end - self._start_ns) / 1e3)
        return not (self._sent or self._working)

    def result(self) -> Tensor:
        """Return the last job's sums [T, h] on the device, read by the current stream.

        They stay valid until the next result. Whatever went wrong in the job is raised here.
        """
        while not self.poll():
            time.sleep(self._rest_s)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        there, back = self._workers.sums[: self._tokens], self._back[: self._tokens]
        if self._link is None:
            back.copy_(there)
        else:
            self._link.read(there, back)
        return back

    def close(self) -> None:
        """Wait for the job at work and for the workers' end."""
        while not self.poll():
            time.sleep(self._rest_s)
        self._closed = True
        self._workers.close()

    def __enter__(self) -> CpuLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finished(self) -> bool:
        try:
            return self._workers.poll()
        except Exception as error:  # raised again where the result is asked for
            self._error = error
            return True


class _Link:
    """Copies between a GPU and page-locked memory by kernels on the current stream."""

    def __init__(self, device: torch.device) -> None:
        # Triton is there wherever torch has CUDA.
        from oled_sim.hardware import copy_kernels

        self._copy: Any = copy_kernels.copy
        self._graphs = Graphs(device)
        self.sent, self._taken = torch.cuda.Event(), torch.cuda.Event()

    def capture(self, source: Tensor, target: Tensor) -> None:
        """Capture a copy of these two."""
        self._graphs.capture(_key(source, target), lambda: self._launch(source, target))

    def send(self, x: Tensor, there: Tensor) -> None:
        """Copy to the host once the results before have been read; ``sent`` tells when."""
        self._taken.wait()
        self._run(x, there)
        self.sent.record()

    def read(self, there: Tensor, back: Tensor) -> None:
        """Copy to the device."""
        self._run(there, back)
        self._taken.record()

    def _run(self, source: Tensor, target: Tensor) -> None:
        if not self._graphs.replay(_key(source, target)):
            self._launch(source, target)

    def _launch(self, source: Tensor, target: Tensor) -> None:
        size = source.numel()
        self._copy[(-(-size // CHUNK),)](source, target, size, chunk=CHUNK)


def _key(source: Tensor, target: Tensor) -> tuple[int, int, int]:
    return (source.data_ptr(), target.data_ptr(), source.numel())
