"""Routed experts that are on the device, many in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from oled_sim.engine.jit import kernel
from oled_sim.geometry import CostGeometry
from oled_sim.hardware.graphs import Graphs
from oled_sim.hardware.place import Place
from oled_sim.hardware.rows import EventRows
from oled_sim.hardware.slab import Slab

ROWS = 16
"""Rows of a block: the least that tensor cores take."""

ROOMS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of blocks that calls are captured for; the next larger one serves."""

RING = 64
"""Tables staged in page-locked memory before the first is used again."""

_INTS = 1 + 2 * ROWS
"""int32 per block of a table: slot, rows, weights."""


class GroupedExperts:
    """Runs experts of a slab on the rows that chose them.

    A row's result depends on its token and its expert alone, not on what else is in the call.

    Args:
        place: CUDA runs two Triton kernels, the CPU a loop over experts.
        cost: sizes.
        slab: weights by slot.
        most_tokens: largest number of tokens of an event.
        triton: whether Triton's kernels run; default on CUDA. On the CPU they need Triton's
            interpreter (``TRITON_INTERPRET=1``), for tests.
    """

    def __init__(
        self,
        place: Place,
        cost: CostGeometry,
        slab: Slab,
        most_tokens: int,
        triton: bool | None = None,
    ) -> None:
        self.slab = slab
        self._rows: EventRows | None = None
        use_triton = place.cuda if triton is None else triton
        self._launcher = _Launcher(place, cost, slab, most_tokens) if use_triton else None

    def load(self, rows: EventRows) -> None:
        """Take the rows of the next event; costs no launch (calls upload what they use)."""
        self._rows = rows

    def capture(self, x: Tensor, out: Tensor, blocks: int = ROOMS[-1]) -> None:
        """Capture calls on these two tensors of up to ``blocks`` blocks of 16 rows (CUDA only).

        Calls on other tensors, or of more blocks, launch kernel by kernel.

        Args:
            x: [T, h], where inputs will be; only its address counts.
            out: [T·k, h], where outputs will go.
            blocks: at most 256. A call takes one per expert and started 16 rows of it.
        """
        if self._launcher is not None:
            self._launcher.capture(x, out, blocks)

    def run(self, x: Tensor, which: ArrayLike, slots: ArrayLike, out: Tensor) -> None:
        """Compute some experts of the loaded event; launches only.

        Args:
            x: [T, h] contiguous inputs.
            which: int [n], positions in the event's ``expert``.
            slots: int [n], where in the slab each one's weights are.
            out: [T·k, h] contiguous; row token·k + j becomes weight · expert(x[token]) for the
                rows of these experts, others are left alone.
        """
        rows = self._rows
        if rows is None:
            raise RuntimeError("load() an event's rows before run()")
        chosen = np.ascontiguousarray(which, np.int32)
        places = np.ascontiguousarray(slots, np.int32)
        if self._launcher is not None:
            self._launcher.run(x, rows, chosen, places, out)
            return
        for i, slot in zip(chosen.tolist(), places.tolist(), strict=True):
            _one_expert(x, self.slab.up[slot], self.slab.down[slot], rows, i, out)


def _one_expert(x: Tensor, up: Tensor, down: Tensor, rows: EventRows, i: int, out: Tensor) -> None:
    """Compute all rows of one expert with plain operations."""
    mine = slice(rows.first[i], rows.first[i + 1])
    flat = torch.from_numpy(rows.row[mine]).to(x.device, torch.int64)
    weight = torch.from_numpy(rows.weight[mine]).to(x.device)
    gate, value = F.linear(x[flat // rows.top_k], up).chunk(2, dim=-1)
    y = F.linear(F.silu(gate) * value, down)
    out[flat] = (y.float() * weight.unsqueeze(1)).to(out.dtype)


class _Launcher:
    """Fills tables and launches Triton's kernels, by a captured graph where there is one."""

    def __init__(self, place: Place, cost: CostGeometry, slab: Slab, most_tokens: int) -> None:
        # Triton is there wherever torch has CUDA; elsewhere only tests want it.
        from oled_sim.hardware import grouped_kernels

        self.kernels: Any = grouped_kernels
        self.cost, self.slab, self.place = cost, slab, place
        most = most_tokens * cost.top_k
        self.most_blocks = most // ROWS + min(cost.experts, most)
        self.most_blocks = max(self.most_blocks, ROOMS[0])
        device, width = place.device, cost.moe_intermediate_size
        self.inner = torch.empty(self.most_blocks * ROWS, width, device=device, dtype=place.dtype)
        self.table = torch.empty(self.most_blocks * _INTS, device=device, dtype=torch.int32)
        # Captured calls so far, which says what table of the ring is next; calls of other kinds.
        self.counter = torch.zeros(2, device=device, dtype=torch.int32)
        self.stage = _Stage(self.most_blocks, place.cuda)
        self.graphs = Graphs(device)
        self.rooms = np.array([0], np.int32)  # what calls may be rounded up to

    def capture(self, x: Tensor, out: Tensor, blocks: int) -> None:
        """Capture a call for each number of blocks up to ``blocks``."""
        rooms = [room for room in ROOMS if room <= self.most_blocks]
        rooms = [room for i, room in enumerate(rooms) if i == 0 or rooms[i - 1] < blocks]
        self._wait()
        self.stage.clear()  # capturing runs each call once, on what is staged: nothing
        for room in rooms:
            self.graphs.capture(_key(x, out, room), lambda n=room: self._from_ring(x, out, n))
        self.rooms = np.array(rooms, np.int32)
        self._wait()
        self.counter.zero_()

    def _wait(self) -> None:
        if self.place.cuda:
            torch.cuda.synchronize(self.place.device)

    def run(self, x: Tensor, rows: EventRows, which: NDArray, slots: NDArray, out: Tensor) -> None:
        """See :meth:`GroupedExperts.run`."""
        need, room = _rooms(rows.first, which, self.rooms)
        if need == 0:
            return
        key = _key(x, out, room)
        staged = self.stage.next() if key in self.graphs else None
        target = self.stage.large() if staged is None else staged
        room = need if staged is None else room
        _fill(rows.first, rows.row, rows.weight.view(np.int32), which, slots, room, target)
        if staged is not None:
            self.graphs.replay(key)
            self.stage.launched()
        else:
            self.table[: room * _INTS].copy_(
                self.stage.large_tensor[: room * _INTS], non_blocking=True
            )
            self.stage.large_launched()
            self._project(x, out, room, self.counter[1:])

    def _from_ring(self, x: Tensor, out: Tensor, room: int) -> None:
        size, chunk = room * _INTS, 1024
        self.kernels.upload[(-(-size // chunk),)](
            self.stage.ring, self.counter, self.table, size, self.stage.stride, RING, chunk=chunk
        )
        self._project(x, out, room, self.counter)

    def _project(self, x: Tensor, out: Tensor, room: int, counter: Tensor) -> None:
        """Launch both projections over the table on the device, then move ``counter`` on."""
        c, weights = self.cost, self.slab.weights
        f, h = c.moe_intermediate_size, c.hidden_size
        stride = weights.stride(0)
        up, down = _tile(f, 32), _tile(h, 64)
        self.kernels.up_projection[(-(-f // up), room)](
            x, weights, self.table, self.inner, room, stride,
            top_k=c.top_k, f=f, h=h, rows=ROWS, tile_n=up, tile_k=128, num_warps=4, num_stages=4,
        )  # fmt: skip
        self.kernels.down_projection[(-(-h // down), room)](
            self.inner, weights, self.table, out, counter, room, stride,
            f=f, h=h, rows=ROWS, tile_n=down, tile_k=128, num_warps=4, num_stages=4,
        )  # fmt: skip


class _Stage:
    """Page-locked memory that tables are written to: a ring for captured calls, one for others.

    Attributes:
        ring: int32 [RING · stride] for tables of at most ``ROOMS[-1]`` blocks.
        stride: int32 per table of the ring.
    """

    def __init__(self, most_blocks: int, cuda: bool) -> None:
        self.stride = min(most_blocks, ROOMS[-1]) * _INTS
        self.ring = torch.empty(RING * self.stride, dtype=torch.int32, pin_memory=cuda)
        self.large_tensor = torch.empty(most_blocks * _INTS, dtype=torch.int32, pin_memory=cuda)
        self._tables = list(self.ring.view(RING, self.stride).numpy())
        self._large = self.large_tensor.numpy()
        self._cuda = cuda
        self._turn = 0
        # Kernels that read a half of the ring, and the large table, must have run before it is
        # written again.
        self._events = [torch.cuda.Event() for _ in range(3)] if cuda else []

    def clear(self) -> None:
        """Empty all tables and begin with the first again; no call may be at work."""
        self.ring.fill_(-1)
        self._turn = 0

    def next(self) -> NDArray[np.int32]:
        """Return the next table of the ring to write to, waiting until it was read."""
        if self._turn % (RING // 2) == 0 and self._cuda:
            self._events[self._turn // (RING // 2)].synchronize()
        return self._tables[self._turn]

    def launched(self) -> None:
        """Note that the call which reads the table returned last has been launched."""
        self._turn = (self._turn + 1) % RING
        if self._turn % (RING // 2) == 0 and self._cuda:
            self._events[1 - self._turn // (RING // 2)].record()

    def large(self) -> NDArray[np.int32]:
        """Return the table for other calls, waiting until it was copied."""
        if self._cuda:
            self._events[2].synchronize()
        return self._large

    def large_launched(self) -> None:
        """Note that the copy of the large table has been launched."""
        if self._cuda:
            self._events[2].record()


def _key(x: Tensor, out: Tensor, room: int) -> tuple[int, int, int]:
    return (x.data_ptr(), out.data_ptr(), room)


def _tile(width: int, most: int) -> int:
    """Return the columns of a tile: ``most``, or less for a narrow matrix, at least 16."""
    return max(16, min(most, 1 << (width - 1).bit_length()))


@kernel
def _rooms(first: NDArray, which: NDArray, rooms: NDArray) -> Any:
    """Return the blocks of 16 rows that some experts take, and the room captured for as many.

    Rooms ascend; where none is large enough, the blocks themselves are the room.
    """
    need = 0
    for i in which:
        need += (first[i + 1] - first[i] + 15) // 16
    for room in rooms:
        if room >= need:
            return need, room
    return need, need


@kernel
def _fill(
    first: NDArray,
    row: NDArray,
    bits: NDArray,
    which: NDArray,
    slots: NDArray,
    room: int,
    table: NDArray,
) -> None:
    """Write the table of a call (see ``grouped_kernels``) for ``room`` blocks."""
    block = 0
    for j in range(len(which)):
        start, stop = first[which[j]], first[which[j] + 1]
        while start < stop:
            table[block] = slots[j]
            rows, weights = room + block * 16, room * 17 + block * 16
            for r in range(16):
                inside = start + r < stop
                table[rows + r] = row[start + r] if inside else -1
                table[weights + r] = bits[start + r] if inside else 0
            start += 16
            block += 1
    table[block:room] = -1
