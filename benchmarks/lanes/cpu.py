"""The CPU lane: experts shared out to worker threads, or one at a time on all threads.

Both ways run inside one TorchScript call. Its forks are served by torch's own inter-op thread
pool, so neither sharing out nor the operations of an expert wait for the Python interpreter.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from oled_sim.geometry import CostGeometry


def _share(
    x: Tensor, rows: Tensor, gates: Tensor, up: Tensor, down: Tensor, out: Tensor, first: int
) -> int:
    """Compute the experts of one share, out [n, t, hidden]: gather, SwiGLU, weight, store.

    x [T, hidden]; rows int64 [n, t]; gates [n, t, 1]; up [P, 2f, hidden] and down [P, hidden, f]
    are the rotating pool, of which the experts ``first`` and following are used.
    """
    for i in range(rows.size(0)):
        h = F.linear(x.index_select(0, rows[i]), up[first + i])
        gate, value = h.chunk(2, dim=1)
        out[i] = F.linear(F.silu(gate) * value, down[first + i]) * gates[i]
    return rows.size(0)


def _share_out(
    x: Tensor, rows: Tensor, gates: Tensor, up: Tensor, down: Tensor, out: Tensor, first: int,
    workers: int, rounds: int,
) -> int:  # fmt: skip
    """Share the experts out to ``workers``, and wait for the last; ``rounds`` times in a row."""
    n, done = rows.size(0), 0
    for r in range(rounds):
        start = (first + r * n) % (up.size(0) - n + 1)
        pending: list[torch.jit.Future[int]] = []
        for w in range(workers):
            a, b = n * w // workers, n * (w + 1) // workers
            if b > a:
                part = (x, rows[a:b], gates[a:b], up, down, out[a:b], start + a)
                pending.append(torch.jit.fork(share, *part))  # pyright: ignore
        for future in pending:
            done += torch.jit.wait(future)
    return done


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    share: Callable[..., int] = torch.jit.script(_share)
    share_out: Callable[..., int] = torch.jit.script(_share_out)


@dataclass(frozen=True)
class Task:
    """The work of one event: ``rows`` int64 [n, t] into ``x``, results into ``out``."""

    x: Tensor
    rows: Tensor
    gates: Tensor
    out: Tensor


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
        """Return a task of ``experts`` with ``tokens`` rows each."""
        hidden, dtype = self.cost.hidden_size, torch.bfloat16
        count = max(tokens, -(-experts * tokens // self.cost.top_k))
        rows = torch.arange(experts * tokens).view(experts, tokens) % count
        out = torch.zeros(experts, tokens, hidden, dtype=dtype)
        gates = torch.rand(experts, tokens, 1).to(dtype)
        return Task(torch.randn(count, hidden).to(dtype), rows, gates, out)

    def advance(self, experts: int) -> int:
        """Return the first of the pool's next ``experts`` experts, wrapping at its end."""
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
    """``count`` single-threaded workers beside the calling thread's own team of ``count``."""

    def __init__(self, experts: Experts, count: int) -> None:
        self.experts, self.count = experts, count
        torch.set_num_threads(count)
        self.by_threads(experts.task(1, 1))  # fixes the calling thread's team
        # A fresh thread sets the default of threads yet to come: torch's pool starts after it.
        one = threading.Thread(target=torch.set_num_threads, args=(1,))
        one.start()
        one.join()
        if torch.get_num_interop_threads() != count:
            torch.set_num_interop_threads(count)
        self.by_experts(experts.task(count, 1))
        if torch.get_num_threads() != count:
            raise RuntimeError("workers changed the number of threads of the calling thread")

    def by_threads(self, task: Task) -> None:
        """Compute one expert at a time on all threads."""
        e, first = self.experts, self.experts.advance(len(task.rows))
        share(task.x, task.rows, task.gates, e.up, e.down, task.out, first)

    def by_experts(self, task: Task, rounds: int = 1) -> None:
        """Share the experts out to single-threaded workers, and wait for the last."""
        e, first = self.experts, self.experts.advance(len(task.rows))
        share_out(
            task.x, task.rows, task.gates, e.up, e.down, task.out, first, self.count, rounds
        )  # fmt: skip

    def in_background(self, task: Task, rounds: int) -> threading.Thread:
        """Start ``rounds`` of the same work on the workers, without the calling thread."""
        own = replace(task, out=torch.zeros_like(task.out))
        thread = threading.Thread(target=self._quietly, args=(own, rounds), daemon=True)
        thread.start()
        return thread

    @torch.inference_mode()
    def _quietly(self, task: Task, rounds: int) -> None:
        self.by_experts(task, rounds)
