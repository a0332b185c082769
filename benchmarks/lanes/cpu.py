"""The CPU lane: experts on a pool of worker threads, or one at a time on all threads.

A worker runs its whole share inside one TorchScript call, which holds no Python lock, so that
sixteen workers do not queue for the interpreter between the operations of an expert.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from oled_sim.geometry import CostGeometry


def _share(
    x: Tensor, rows: Tensor, gates: Tensor, up: Tensor, down: Tensor, out: Tensor, first: int
) -> None:
    """Compute the experts of one share, out [n, t, hidden]: gather, SwiGLU, weight, store.

    x [T, hidden]; rows int64 [n, t]; gates [n, t, 1]; up [P, 2f, hidden] and down [P, hidden, f]
    are the rotating pool, of which the experts ``first`` and following are used.
    """
    for i in range(rows.size(0)):
        h = F.linear(x.index_select(0, rows[i]), up[first + i])
        gate, value = h.chunk(2, dim=1)
        out[i] = F.linear(F.silu(gate) * value, down[first + i]) * gates[i]


def compile_share() -> torch.jit.ScriptFunction:
    """Compile the share for the workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_share)


@dataclass(frozen=True)
class Task:
    """The work of one event: ``rows`` int64 [n, t] into ``x``, results into ``out``."""

    x: Tensor
    rows: Tensor
    gates: Tensor
    out: Tensor
    first: int

    def part(self, worker: int, workers: int) -> Task | None:
        """Return the share of one worker, as even as whole experts allow."""
        n = len(self.rows)
        a, b = n * worker // workers, n * (worker + 1) // workers
        if a == b:
            return None
        return Task(self.x, self.rows[a:b], self.gates[a:b], self.out[a:b], self.first + a)


class Experts:
    """A rotating pool of expert weights in host memory, large enough to defeat every cache."""

    def __init__(self, cost: CostGeometry, pool: int, *, pin: bool) -> None:
        self.cost, self.pool, self.next = cost, pool, 0
        f, h = cost.moe_intermediate_size, cost.hidden_size
        self.up = _filled(pool, 2 * f, h, pin)
        self.down = _filled(pool, h, f, pin)

    @property
    def bytes(self) -> int:
        """Size of the pool."""
        return self.pool * self.cost.expert_bytes

    def task(self, experts: int, tokens: int) -> Task:
        """Return a task of ``experts`` with ``tokens`` rows each, on the pool's next experts."""
        hidden, dtype = self.cost.hidden_size, torch.bfloat16
        count = max(tokens, -(-experts * tokens // self.cost.top_k))
        rows = torch.arange(experts * tokens).view(experts, tokens) % count
        out = torch.zeros(experts, tokens, hidden, dtype=dtype)
        gates = torch.rand(experts, tokens, 1).to(dtype)
        return Task(torch.randn(count, hidden).to(dtype), rows, gates, out, self.advance(experts))

    def moved(self, task: Task) -> Task:
        """Return the task on the pool's next experts."""
        return Task(task.x, task.rows, task.gates, task.out, self.advance(len(task.rows)))

    def advance(self, experts: int) -> int:
        """Return the first of the next ``experts`` experts, wrapping at the end of the pool."""
        if self.next + experts > self.pool:
            self.next = 0
        first, self.next = self.next, self.next + experts
        return first


def _filled(pool: int, rows: int, columns: int, pin: bool) -> Tensor:
    """Return [pool, rows, columns] of one random matrix repeated: other addresses, same values."""
    weights = torch.empty(pool, rows, columns, dtype=torch.bfloat16, pin_memory=pin)
    weights.copy_((torch.randn(rows, columns) / columns**0.5).to(torch.bfloat16))
    return weights


class Workers:
    """``count`` threads of one torch thread each; the calling thread keeps ``count`` threads."""

    def __init__(self, experts: Experts, count: int) -> None:
        self.experts, self.count = experts, count
        self.share = compile_share()
        torch.set_num_threads(count)
        self._run_whole(experts.task(1, 1))  # fixes the calling thread's own team first
        self._inbox: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in range(count)]
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._pending = 0
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()
        self.by_experts(experts.task(count, 1))  # every worker has set its own single thread
        if torch.get_num_threads() != count:
            raise RuntimeError("workers changed the number of threads of the calling thread")

    def by_threads(self, task: Task) -> None:
        """Compute one expert at a time on all threads."""
        self._run_whole(self.experts.moved(task))

    def by_experts(self, task: Task) -> None:
        """Share the experts out to the workers, and wait for the last."""
        self.start(task)
        self.wait()

    def start(self, task: Task) -> None:
        """Share the experts out without waiting."""
        task = self.experts.moved(task)
        for worker, inbox in enumerate(self._inbox):
            part = task.part(worker, self.count)
            if part is not None:
                self._pending += 1
                inbox.put(part)

    def running(self) -> bool:
        """Return whether every worker still has shares of what was started to finish."""
        return self._done.qsize() + self.count <= self._pending

    def wait(self) -> None:
        """Wait for everything that was started."""
        while self._pending:
            error = self._done.get()
            self._pending -= 1
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        for inbox in self._inbox:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    @torch.inference_mode()
    def _serve(self, worker: int) -> None:
        torch.set_num_threads(1)
        while (task := self._inbox[worker].get()) is not None:
            try:
                self._run_whole(task)
                self._done.put(None)
            except BaseException as error:  # handed to the caller, who raises it
                self._done.put(error)

    def _run_whole(self, task: Task) -> None:
        e = self.experts
        self.share(task.x, task.rows, task.gates, e.up, e.down, task.out, task.first)
