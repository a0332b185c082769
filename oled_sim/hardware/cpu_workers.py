"""What a CPU worker does, in TorchScript: tasks of torch's inter-op thread pool.

So neither dividing the work nor the operations of an expert wait for the Python interpreter. A
job is written to tables that all workers see and announced by a counter; workers tell by counters
of their own how far they are, and look at each other's between two steps of a job. No loop looks
at a value that nothing in its function writes to: TorchScript may then read it once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

STEPS = 3
"""Of a job: inner activations, outputs, sums."""


def _inner(x: Tensor, tokens: Tensor, up: Tensor, inner: Tensor, pieces: list[list[int]]) -> None:
    """Fill inner [rows, f] = silu(gate) · up at the rows and columns of some pieces.

    x [T, h]; tokens int64 [rows]; up [E, 2f, h], the gate projection first.
    """
    f = inner.size(1)
    for p in pieces:
        e, a, b, first, last = p[0], p[1], p[2], p[3], p[4]
        given = x.index_select(0, tokens[a:b])
        gate = F.silu(F.linear(given, up[e, first:last]))
        value = F.linear(given, up[e, f + first : f + last])
        torch.mul(gate, value, out=inner[a:b, first:last])


def _outer(
    inner: Tensor, weights: Tensor, down: Tensor, out: Tensor, pieces: list[list[int]]
) -> None:
    """Fill out fp32 [rows + 1, h], rows from 1 on, with weighted outputs; down [E, h, f]."""
    for p in pieces:
        e, a, b, first, last = p[0], p[1], p[2], p[5], p[6]
        y = F.linear(inner[a:b], down[e, first:last])
        torch.mul(y, weights[a:b], out=out[a + 1 : b + 1, first:last])


def _add(out: Tensor, places: Tensor, sums: Tensor, first: int, last: int) -> None:
    """Add the rows of tokens ``first`` to ``last`` one after another; 0 is a row of zeros.

    places int64 [most, T]; sums [T, h].
    """
    if last > first:
        total = out.index_select(0, places[0, first:last])
        for j in range(1, places.size(0)):
            total += out.index_select(0, places[j, first:last])
        sums[first:last] = total


def _pass(mine: Tensor, reached: Tensor, step: int) -> None:
    """Say that this worker has done a step, and wait for all others."""
    mine.fill_(step)
    while int(reached.min()) < step:
        pass


def _serve(
    w: int, job: int, looks: int, flags: Tensor, header: Tensor, starts: Tensor, pieces: Tensor,
    x: Tensor, tokens: Tensor, weights: Tensor, places: Tensor, inner: Tensor, out: Tensor,
    sums: Tensor, up: list[Tensor], down: list[Tensor],
) -> int:  # fmt: skip
    """Work as worker ``w`` from a job on until there is none for a while; return the next job.

    flags int64 [workers + 1]: steps done by each worker, and the newest job. A step is numbered
    through all jobs. header int64 [3]: layer, tokens, most rows of a token.
    """
    n = flags.size(0) - 1
    mine, newest, reached = flags[w], flags[n], flags[:n]
    left = looks
    while left > 0:
        left = looks
        while left > 0 and int(newest) < job:
            left -= 1
        if left > 0:
            done = 3 * job  # STEPS, which TorchScript cannot see
            head: list[int] = header.tolist()
            layer, count, most = head[0], head[1], head[2]
            share: list[list[int]] = pieces[int(starts[w]) : int(starts[w + 1])].tolist()
            fill_inner(x, tokens, up[layer], inner, share)
            pass_step(mine, reached, done + 1)
            fill_outer(inner, weights, down[layer], out, share)
            pass_step(mine, reached, done + 2)
            at = places[: most * count].view(most, count)
            add(out, at, sums, count * w // n, count * (w + 1) // n)
            mine.fill_(done + 3)
            job += 1
    return job


def _wake(
    asleep: list[int], job: int, looks: int, flags: Tensor, header: Tensor, starts: Tensor,
    pieces: Tensor, x: Tensor, tokens: Tensor, weights: Tensor, places: Tensor, inner: Tensor,
    out: Tensor, sums: Tensor, up: list[Tensor], down: list[Tensor],
) -> list[torch.jit.Future[int]]:  # fmt: skip
    """Start some workers, see :func:`_serve`."""
    started: list[torch.jit.Future[int]] = []
    for w in asleep:
        started.append(
            torch.jit.fork(  # pyright: ignore
                serve, w, job, looks, flags, header, starts, pieces, x, tokens, weights, places,
                inner, out, sums, up, down,
            )
        )  # fmt: skip
    return started


def _begin(
    asleep: list[int], job: int, looks: int, flags: Tensor, header: Tensor, starts: Tensor,
    pieces: Tensor, x: Tensor, tokens: Tensor, weights: Tensor, places: Tensor, inner: Tensor,
    out: Tensor, sums: Tensor, up: list[Tensor], down: list[Tensor],
) -> torch.jit.Future[list[torch.jit.Future[int]]]:  # fmt: skip
    """Have a thread of the pool start workers: waking them would cost the caller's time."""
    return torch.jit.fork(  # pyright: ignore
        wake, asleep, job, looks, flags, header, starts, pieces, x, tokens, weights, places,
        inner, out, sums, up, down,
    )  # fmt: skip


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    fill_inner: Callable[..., None] = torch.jit.script(_inner)
    fill_outer: Callable[..., None] = torch.jit.script(_outer)
    add: Callable[..., None] = torch.jit.script(_add)
    pass_step: Callable[..., None] = torch.jit.script(_pass)
    serve: Callable[..., int] = torch.jit.script(_serve)
    wake: Callable[..., Any] = torch.jit.script(_wake)
    begin: Callable[..., Any] = torch.jit.script(_begin)
