"""Experts on CPU workers that wait actively for their next job.

Waking a thread takes tens of microseconds, as long as an expert's share of a worker: so workers
keep looking for a while after a job, as OpenMP's threads do, before they end; then the next job
starts them anew. They count on x86's order of stores (elsewhere torch's reference counts order
what they write before they tell).

Whatever the number of workers, a token's rows are added in the order of its top-k, in fp32.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from oled_sim.errors import UsageError
from oled_sim.geometry import CostGeometry
from oled_sim.hardware.cpu_shares import empty_shares
from oled_sim.hardware.cpu_workers import STEPS, begin
from oled_sim.hardware.place import Place
from oled_sim.hardware.rows import EventRows

if TYPE_CHECKING:
    from oled_sim.hardware.host_experts import HostExperts

LOOKS = 50_000
"""How often a worker looks for its next job before it ends, about 0.2 µs each.

That is longer than a decode pass goes without a job where most experts are resident. Starting
workers that had ended took 0.6 to 0.8 ms longer than for a job that finds them waiting (H200).
"""
WARM_UP_TOKENS = 4
"""Rows of an expert up to which matrix products are tried in advance."""
REST_S = 1e-4
_GIVEN_UP = 1 << 62


class CpuExperts:
    """Computes experts of an event in host memory, in the background.

    One job after the other: :meth:`prepare`, then :meth:`start` once ``x`` is there, then
    :meth:`poll` until it is true. Only one object at a time may have a job: its workers need as
    many threads of torch's pool.

    Args:
        experts: the weights, bf16 or fp32.
        place: dtype of activations; their buffers are page-locked for CUDA.
        cost: widths and k.
        workers: threads that compute. One core more is needed for the calling thread.
        most_tokens: of one event.
        looks: how often a worker looks for the next job before it ends.

    Attributes:
        x, sums: [most_tokens, h] in host memory; the first T rows are those of the job.

    Raises:
        UsageError: torch's inter-op pool runs already and has fewer threads than ``workers``.
    """

    def __init__(
        self, experts: HostExperts, place: Place, cost: CostGeometry, workers: int,
        most_tokens: int, looks: int = LOOKS,
    ) -> None:  # fmt: skip
        self._f, self._h = cost.moe_intermediate_size, cost.hidden_size
        middle = 2 * self._f * self._h
        self._up = [p[:, :middle].unflatten(1, (2 * self._f, self._h)) for p in experts.packed]
        self._down = [p[:, middle:].unflatten(1, (self._h, self._f)) for p in experts.packed]
        _start_pool(workers)
        self._shares = empty_shares(workers, cost.experts, most_tokens * cost.top_k)
        with torch.inference_mode(False):  # whoever computes may write to them
            self._allocate(place, most_tokens, most_tokens * cost.top_k)
        self._looks, self._job, self._tokens = looks, 0, 0
        self._serving: dict[int, Any] = {}
        self._starting: tuple[list[int], Any] | None = None
        self._warm_up(cost.top_k)

    def prepare(self, layer: int, rows: EventRows, which: NDArray[np.integer]) -> None:
        """Lay out a job and see to it that all workers are awake; none may be at work.

        Args:
            layer: index into the MoE layers of ``experts``.
            rows: the event's rows, T tokens.
            which: positions in ``rows.expert``, int [n], n ≥ 1.

        Raises:
            IndexError: there is no such layer.
        """
        if not 0 <= layer < len(self._up):
            raise IndexError(f"layer {layer} of {len(self._up)} in host memory")
        most = self._shares.lay_out(rows, which, self._f, self._h)
        self._header[:] = layer, rows.tokens, most
        self._job += 1
        self._wake()

    def start(self) -> None:
        """Let the workers begin: ``x`` is there."""
        self._newest[0] = self._job

    def poll(self) -> bool:
        """Return whether the job's sums are there.

        Raises:
            RuntimeError: a worker failed; the job is given up.
        """
        if self._reached.min() >= STEPS * (self._job + 1):
            return True
        self._wake()
        return False

    def close(self) -> None:
        """Wait until the workers have ended."""
        while self._awake():
            time.sleep(REST_S)

    def _allocate(self, place: Place, most_tokens: int, rows: int) -> None:
        """Make everything that the workers see. What is large is touched here."""
        shares, dtype = self._shares, self._up[0].dtype
        shape = (most_tokens, self._h)
        self.x = torch.zeros(shape, dtype=place.dtype, pin_memory=place.cuda)
        self.sums = torch.zeros(shape, dtype=place.dtype, pin_memory=place.cuda)
        flags = torch.zeros(shares.workers + 1, dtype=torch.int64)
        header = torch.zeros(3, dtype=torch.int64)
        self._flags, self._header = flags.numpy(), header.numpy()
        self._reached, self._newest = self._flags[:-1], self._flags[-1:]
        self._seen = (
            flags, header, torch.from_numpy(shares.starts), torch.from_numpy(shares.pieces),
            self.x, torch.from_numpy(shares.tokens), torch.from_numpy(shares.weights)[:, None],
            torch.from_numpy(shares.places), torch.zeros(rows, self._f, dtype=dtype),
            torch.zeros(rows + 1, self._h), self.sums, self._up, self._down,
        )  # fmt: skip

    def _awake(self) -> bool:
        """Take note of workers that have started or ended; return whether any is left."""
        if self._starting is not None and self._starting[1].done():
            asleep, started = self._starting[0], self._starting[1].wait()
            self._serving.update(zip(asleep, started, strict=True))
            self._starting = None
        for w in [w for w, serving in self._serving.items() if serving.done()]:
            self._serving.pop(w).wait()  # raises what went wrong
        return bool(self._serving) or self._starting is not None

    def _wake(self) -> None:
        """Start the workers that have ended without this job."""
        try:
            self._awake()
        except BaseException:
            self._give_up()
            raise
        if self._starting is not None or len(self._serving) == len(self._reached):
            return
        end = STEPS * (self._job + 1)
        asleep = [
            w for w, step in enumerate(self._reached) if w not in self._serving and step < end
        ]
        if asleep:
            self._starting = asleep, begin(asleep, self._job, self._looks, *self._seen)

    def _give_up(self) -> None:
        """End the job without the worker that failed: the others must not wait for it."""
        self._reached[:] = _GIVEN_UP
        while True:
            with contextlib.suppress(Exception):  # what comes after the first fault is its echo
                if not self._awake():
                    break
            time.sleep(REST_S)
        self._reached[:] = STEPS * (self._job + 1)

    def _warm_up(self, top_k: int) -> None:
        """Run the jobs of a decode pass: TorchScript compiles at its first calls, and matrix
        products at the first of each shape.
        """  # fmt: skip
        one = threading.Thread(target=torch.set_num_threads, args=(1,))
        one.start()  # a fresh thread sets the default of those yet to come, the pool's
        one.join()
        most = min(len(self._up[0]), self._shares.workers)
        for tokens in range(1, min(WARM_UP_TOKENS, len(self.x)) + 1):
            for n in range(1, most + 1):
                self._run_zeros(n, tokens, top_k)

    def _run_zeros(self, experts: int, each: int, top_k: int) -> None:
        """Run a job of some experts with as many rows each."""
        count = experts * each
        tokens = -(-count // top_k)
        if tokens > len(self.x):
            return
        row, number = np.arange(count, dtype=np.int32), np.arange(experts, dtype=np.int32)
        first = np.arange(experts + 1, dtype=np.int32) * np.int32(each)
        rows = EventRows(tokens, top_k, number, first, row, np.ones(count, np.float32))
        self.prepare(0, rows, number)
        self.start()
        while not self.poll():
            time.sleep(0)


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
