"""Experts on CPU threads: shared out to workers, or one at a time on all threads.

Both ways run inside one TorchScript call. Its forks are served by torch's own inter-op thread
pool, so neither sharing out nor the operations of an expert wait for the Python interpreter.
Whatever the way and the number of workers, every row is computed by itself per expert, and a
token's rows are added in the order of its top-k, in fp32.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.engine.jit import kernel
from oled_sim.errors import UsageError
from oled_sim.geometry import CostGeometry
from oled_sim.hardware.rows import EventRows

if TYPE_CHECKING:
    from oled_sim.hardware.host_experts import HostExperts

Strategy = Literal["experts", "threads"]
SUM_ELEMENTS = 1 << 15
"""Sums of fewer elements than this are not worth a worker of their own."""


def _share(
    x: Tensor, tokens: Tensor, weights: Tensor, ends: list[int], experts: list[int], up: Tensor,
    down: Tensor, out: Tensor, first: int, last: int,
) -> int:  # fmt: skip
    """Compute experts ``first`` to ``last``: gather, SwiGLU, weight, store from row 1 on.

    x [T, h]; tokens int64 [n]; weights fp32 [n, 1]; up [E, 2f, h]; down [E, h, f];
    out fp32 [> n, h], of which row 0 is left alone.
    """
    for i in range(first, last):
        a, b, e = ends[i], ends[i + 1], experts[i]
        gate, value = F.linear(x.index_select(0, tokens[a:b]), up[e]).chunk(2, dim=1)
        y = F.linear(F.silu(gate) * value, down[e])
        torch.mul(y, weights[a:b], out=out[a + 1 : b + 1])
    return last - first


def _add(out: Tensor, places: Tensor, sums: Tensor, first: int, last: int) -> int:
    """Add the rows of tokens ``first`` to ``last`` one after another; 0 is a row of zeros.

    out fp32 [> n, h]; places int64 [most, T]; sums [T, h].
    """
    total = out.index_select(0, places[0, first:last])
    for j in range(1, places.size(0)):
        total += out.index_select(0, places[j, first:last])
    sums[first:last] = total
    return last - first


def _compute(
    x: Tensor, tokens: Tensor, weights: Tensor, ends: list[int], experts: list[int], up: Tensor,
    down: Tensor, out: Tensor, places: Tensor, sums: Tensor, workers: int, shared_out: bool,
    adders: int,
) -> int:  # fmt: skip
    """Compute all experts of one job and its sums; wait for the last worker."""
    n, count, done = len(experts), places.size(1), 0
    if shared_out:
        pending: list[torch.jit.Future[int]] = []
        for w in range(workers):
            a, b = n * w // workers, n * (w + 1) // workers
            if b > a:
                part = (x, tokens, weights, ends, experts, up, down, out, a, b)
                pending.append(torch.jit.fork(share, *part))  # pyright: ignore
        for future in pending:
            done += torch.jit.wait(future)
    else:
        done += share(x, tokens, weights, ends, experts, up, down, out, 0, n)
    if adders == 1:
        return done + add(out, places, sums, 0, count)
    adding: list[torch.jit.Future[int]] = []
    for w in range(adders):
        a, b = count * w // adders, count * (w + 1) // adders
        adding.append(torch.jit.fork(add, out, places, sums, a, b))  # pyright: ignore
    for future in adding:
        done += torch.jit.wait(future)
    return done


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    share: Callable[..., int] = torch.jit.script(_share)
    add: Callable[..., int] = torch.jit.script(_add)
    compute: Callable[..., int] = torch.jit.script(_compute)


@kernel
def _lay_out(first, row, weight, which, top_k, tokens, weights, ends, place_of, places):  # noqa: ANN001, ANN202
    """Fill what a job needs from an event's rows; return the most rows that one token has.

    tokens, weights: of the rows of ``which`` in their order; ends [len(which) + 1]; place_of
    [T·k], all zero before and after; places [k, T]: where the rows of each token stand, the top-k
    order, counted from 1.
    """
    n = 0
    ends[0] = 0
    for i in range(len(which)):
        for r in range(first[which[i]], first[which[i] + 1]):
            tokens[n] = row[r] // top_k
            weights[n] = weight[r]
            n += 1
            place_of[row[r]] = n
        ends[i + 1] = n
    most = 0
    for t in range(places.shape[1]):
        found = 0
        for j in range(top_k):
            here = place_of[t * top_k + j]
            if here > 0:
                places[found, t] = here
                place_of[t * top_k + j] = 0
                found += 1
        for j in range(found, top_k):
            places[j, t] = 0
        most = max(most, found)
    return most


class CpuExperts:
    """Computes experts of an event in host memory, in one call that holds no interpreter lock.

    The thread that calls :meth:`compute` must have called :meth:`join` before.

    Args:
        experts: the weights, bf16 or fp32.
        cost: widths and k.
        workers: threads that compute; one core should be left to the thread that launches kernels.
        most_tokens: of one event.

    Raises:
        UsageError: torch's inter-op pool runs already and has fewer threads than ``workers``.
    """

    def __init__(
        self, experts: HostExperts, cost: CostGeometry, workers: int, most_tokens: int
    ) -> None:
        self.workers, self.top_k = workers, cost.top_k
        _start_pool(workers)
        f, h = cost.moe_intermediate_size, cost.hidden_size
        middle = 2 * f * h
        self._up = [p[:, :middle].unflatten(1, (2 * f, h)) for p in experts.packed]
        self._down = [p[:, middle:].unflatten(1, (h, f)) for p in experts.packed]
        rows = most_tokens * cost.top_k
        self._out = torch.empty(rows + 1, h).zero_()  # touched here, not in the first long pass
        self._tokens = torch.empty(rows, dtype=torch.int64)
        self._weights = torch.empty(rows, 1)
        self._places = torch.empty(rows, dtype=torch.int64)
        self._views = (self._tokens.numpy(), self._weights.numpy()[:, 0], self._places.numpy())
        self._ends = np.empty(cost.experts + 1, np.int64)
        self._place_of = np.zeros(rows, np.int64)

    def join(self) -> None:
        """Give the calling thread a team of ``workers`` threads; new threads get a team of one."""
        torch.set_num_threads(self.workers)
        # A fresh thread sets the default of threads yet to come, which are those of torch's pool.
        one = threading.Thread(target=torch.set_num_threads, args=(1,))
        one.start()
        one.join()
        for strategy in ("experts", "threads", "experts", "threads", "experts", "threads"):
            self._warm_up(strategy)  # TorchScript looks at its first calls and compiles then

    def compute(
        self, layer: int, x: Tensor, rows: EventRows, which: NDArray[np.integer], sums: Tensor,
        strategy: Strategy,
    ) -> None:  # fmt: skip
        """Compute experts and add up their weighted outputs per token.

        Args:
            layer: index into the MoE layers of ``experts``.
            x: [T, h] in host memory.
            rows: the event's rows.
            which: positions in ``rows.expert``, int [n], n ≥ 1.
            sums: [T, h] in host memory; a token that none of them serves gets zeros.
            strategy: how the work is divided.
        """
        tokens, weights, places = self._views
        place = places[: self.top_k * rows.tokens].reshape(self.top_k, rows.tokens)
        most = _lay_out(rows.first, rows.row, rows.weight, which, self.top_k, tokens, weights,
            self._ends, self._place_of, place)  # fmt: skip
        at = self._places[: most * rows.tokens].view(most, rows.tokens)
        size = most * rows.tokens * x.shape[1]
        adders = max(1, min(self.workers, rows.tokens, size // SUM_ELEMENTS))
        compute(
            x, self._tokens, self._weights, self._ends[: len(which) + 1].tolist(),
            rows.expert[which].tolist(), self._up[layer], self._down[layer], self._out, at, sums,
            self.workers, strategy == "experts", adders,
        )  # fmt: skip

    def _warm_up(self, strategy: Strategy) -> None:
        n = min(self.workers, len(self._up[0]), len(self._tokens))
        tokens = -(-n // self.top_k)
        each = np.arange(n + 1, dtype=np.int32)
        weight = np.ones(n, np.float32)
        rows = EventRows(tokens, self.top_k, each[:-1], each, each[:-1], weight)
        x = torch.zeros(tokens, self._out.shape[1], dtype=self._up[0].dtype)
        self.compute(0, x, rows, each[:-1], torch.empty_like(x), strategy)


def _start_pool(workers: int) -> None:
    """See to it that torch's inter-op pool has at least as many threads as workers."""
    if torch.get_num_interop_threads() >= workers:
        return
    try:
        torch.set_num_interop_threads(workers)
    except RuntimeError:
        raise UsageError(
            f"{workers} CPU workers are more than the {torch.get_num_interop_threads()} threads"
            " that torch's inter-op pool was started with: ask for fewer, or ask for them first"
        ) from None
