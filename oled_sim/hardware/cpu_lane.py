"""The CPU lane: experts of an event on CPU workers, beside the GPU.

A thread of its own brings the activations to the host, has the workers compute, and sends the
sums back, on a CUDA stream of its own. It holds the interpreter lock only between these steps.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.cpu_experts import CpuExperts, Strategy
from oled_sim.hardware.rows import EventRows

if TYPE_CHECKING:
    from oled_sim.hardware.host_experts import HostExperts
    from oled_sim.hardware.place import Place

SWITCH_S = 50e-6
"""How long a busy thread may keep the interpreter lock from the lane; Python's default is 5 ms."""

Chooser = Callable[[int, int], str]
"""From the numbers of experts and of routed rows of a job to a strategy."""


@dataclass(frozen=True)
class JobTimes:
    """When a job ran, on the host's monotone clock (``time.perf_counter_ns``), µs.

    ``begin_us``: the lane's thread took it. ``end_us``: the copy of its sums was queued.
    ``compute_us``: how long the workers took in between.
    """

    begin_us: float
    end_us: float
    compute_us: float


@dataclass(frozen=True)
class _Job:
    layer: int
    x: Tensor
    rows: EventRows
    which: NDArray[np.integer]


class CpuLane:
    """Computes experts of one event at a time in the background.

    Args:
        experts: weights in host memory, bf16 or fp32.
        place: device and dtype of activations.
        cost: widths and k.
        workers: threads that compute.
        most_tokens: of one event.
        strategy: says how a job is divided by (experts, routed rows); by default one expert at a
            time on all threads as long as there are fewer than a third as many as workers.

    Raises:
        UsageError: see :class:`CpuExperts`.
    """

    def __init__(
        self, experts: HostExperts, place: Place, cost: CostGeometry, workers: int,
        most_tokens: int, strategy: Chooser | None = None,
    ) -> None:  # fmt: skip
        self._choose = strategy or (lambda n, _: "threads" if 3 * n < workers else "experts")
        self._cuda = place.cuda
        self._workers = CpuExperts(experts, cost, workers, most_tokens)
        shape = (most_tokens, cost.hidden_size)
        self._x = torch.empty(shape, dtype=place.dtype, pin_memory=self._cuda)
        self._sums = torch.empty(shape, dtype=place.dtype, pin_memory=self._cuda)
        self._back = torch.empty(shape, dtype=place.dtype, device=place.device)
        if self._cuda:
            self._stream = torch.cuda.Stream(place.device)
            self._given, self.ready = torch.cuda.Event(), torch.cuda.Event()
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self.times = JobTimes(0.0, 0.0, 0.0)
        self._tokens = 0
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="cpu lane", daemon=True)
        self._thread.start()
        self._finished.wait()  # for the workers
        if self._error is not None:
            raise self._error

    def submit(self, layer: int, x: Tensor, rows: EventRows, which: NDArray[np.integer]) -> None:
        """Start the experts at positions ``which`` (int [n], n ≥ 1) of an event; return at once.

        ``x`` [T, h] must be ready on the current stream and stay as it is until :meth:`result`;
        ``rows`` likewise.

        Raises:
            RuntimeError: the job before has not been finished, or the lane is closed.
        """
        if not self._finished.is_set() or not self._thread.is_alive():
            raise RuntimeError("the CPU lane takes one job at a time, and none once closed")
        if len(which) == 0:
            raise ValueError("a job of the CPU lane needs at least one expert")
        if self._cuda:
            self._given.record()
        self._tokens = rows.tokens
        self._finished.clear()
        self._jobs.put(_Job(layer, x, rows, which))

    @property
    def sums(self) -> Tensor:
        """Where results land on the device, [most_tokens, h]: what :meth:`result` is a view of."""
        return self._back

    def poll(self) -> bool:
        """Return whether the copy of the last job's sums to the device has been queued."""
        return self._finished.is_set()

    def result(self) -> Tensor:
        """Return the last job's sums [T, h] on the device; the current stream waits for them.

        They stay valid until the next job. Whatever went wrong in the job is raised here.
        """
        self._finished.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._cuda:
            self.ready.wait()
        return self._back[: self._tokens]

    def close(self) -> None:
        """End the lane's thread after the job that it is at."""
        self._jobs.put(None)
        self._thread.join()

    def __enter__(self) -> CpuLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.inference_mode()
    def _serve(self) -> None:
        self._attempt(self._start)
        while (job := self._jobs.get()) is not None:
            self._attempt(partial(self._run, job))

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        self._finished.set()

    def _start(self) -> None:
        if self._cuda:
            torch.cuda.set_stream(self._stream)
        self._workers.join()

    def _run(self, job: _Job) -> None:
        begin = time.perf_counter_ns()
        x, sums = self._x[: self._tokens], self._sums[: self._tokens]
        if self._cuda:
            self._given.wait()
        x.copy_(job.x[: self._tokens])  # waits, also for an earlier copy from `sums`
        strategy: Strategy = "experts"
        if self._choose(len(job.which), _rows(job)) == "threads":
            strategy = "threads"
        start = time.perf_counter_ns()
        self._workers.compute(job.layer, x, job.rows, job.which, sums, strategy)
        compute_ns = time.perf_counter_ns() - start
        self._back[: self._tokens].copy_(sums, non_blocking=True)
        if self._cuda:
            self.ready.record()
        self.times = JobTimes(begin / 1e3, time.perf_counter_ns() / 1e3, compute_ns / 1e3)


def _rows(job: _Job) -> int:
    """Return the number of routed rows of a job."""
    first = job.rows.first
    return int((first[job.which + 1] - first[job.which]).sum())
