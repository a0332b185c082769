"""Work that keeps one lane busy while another one is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from oled_sim.hardware.cpu_lane import CpuLane
from oled_sim.hardware.measuring.timing import Call


class Load(Protocol):
    """Work that keeps one lane busy for a while without the calling thread."""

    def start(self, duration_us: float) -> None:
        """Start work for at least this long."""
        ...

    def busy(self) -> bool:
        """Return whether the lane has been busy until now."""
        ...

    def stop(self) -> None:
        """Wait for the rest."""
        ...


@dataclass
class QueuedLoad:
    """Calls queued ahead on a CUDA stream."""

    call: Call
    once_us: float
    stream: torch.cuda.Stream
    end: torch.cuda.Event | None = None

    def start(self, duration_us: float) -> None:
        """Queue enough calls."""
        for _ in range(max(2, int(duration_us / self.once_us))):
            self.call()
        self.end = torch.cuda.Event()
        self.end.record(self.stream)

    def busy(self) -> bool:
        """Return whether the last call has not finished."""
        return self.end is not None and not self.end.query()

    def stop(self) -> None:
        """Wait for the last call."""
        if self.end is not None:
            self.end.synchronize()


class Job(Protocol):
    """A job of the CPU lane in two steps."""

    def submit(self) -> None:
        """Hand it to the lane."""
        ...

    def finish(self) -> None:
        """Wait for it."""
        ...


@dataclass
class JobLoad:
    """One job on the workers, as long as is asked for; the calling thread is free meanwhile."""

    lane: CpuLane
    lasting: Callable[[float], Job]
    job: Job | None = None

    def start(self, duration_us: float) -> None:
        """Submit a job, and see the workers begin."""
        self.job = self.lasting(duration_us)
        self.job.submit()
        while not self.lane.poll() and not self.lane.working:
            pass

    def busy(self) -> bool:
        """Return whether the workers have not finished."""
        return not self.lane.poll()

    def stop(self) -> None:
        """Wait for the job."""
        if self.job is not None:
            self.job.finish()
            self.job = None


class RepeatedLoad:
    """A call that a thread of its own repeats until it is stopped: of a lane that CPU threads
    stand for, or of the CPU lane beside it.
    """  # fmt: skip

    def __init__(self, call: Call) -> None:
        self.call = call
        self.going = False
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def start(self, duration_us: float) -> None:
        """Start; how long is up to :meth:`stop`."""
        self.going = True
        self.thread = threading.Thread(target=self._repeat, daemon=True)
        self.thread.start()

    def busy(self) -> bool:
        """Return whether the thread works."""
        return self.thread is not None and self.thread.is_alive()

    def stop(self) -> None:
        """Wait for the call at work. Whatever went wrong in the thread is raised here."""
        self.going = False
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise self.error

    @torch.inference_mode()
    def _repeat(self) -> None:
        try:
            while self.going:
                self.call()
        except BaseException as error:  # raised by whoever stops the load
            self.error = error
