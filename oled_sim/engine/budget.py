"""The expert budget: how much may be resident, and how it is shared between layers (spec §2, §5).

A budget is held in bytes, so that experts whose size differs by layer need no special case; with
equal sizes every figure is a whole number of slots.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import kernel
from oled_sim.errors import UsageError

UNITS = {
    "": 1,
    "k": 10**3,
    "ki": 2**10,
    "m": 10**6,
    "mi": 2**20,
    "g": 10**9,
    "gi": 2**30,
    "t": 10**12,
    "ti": 2**40,
}
"""Bytes of a unit, ascending."""
MOST_SLOTS, MOST_BYTES = 10**6, 2**50
"""Of a layer, and of a cache: far beyond any model, and what counters and lists hold."""


def parse_bytes(text: str) -> int:
    """Return the bytes that ``4000MiB``, ``1.5G`` or ``800k`` mean.

    Raises:
        UsageError: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size: give bytes such as 800M, 1.5G, 4000MiB or 1TB")
    number, unit = match.groups()
    size = float(number) * UNITS[(unit or "").lower()]
    if size > MOST_BYTES:
        raise UsageError(f"{text!r} is more than any cache: give 1024TiB or less")
    return int(size)


def bytes_text(size_bytes: int) -> str:
    """Return bytes in the largest unit that they are a whole number of: ``4000 MiB``, ``1 B``."""
    unit = max((u for u, n in UNITS.items() if size_bytes % n == 0), key=UNITS.__getitem__)
    unit = unit if size_bytes else ""
    name = unit if unit == "k" else unit.capitalize()
    return f"{size_bytes // UNITS[unit]} {name}B"


def parse_capacities(text: str) -> list[int]:
    """Return the capacities that ``8,16,32`` or ``8:128:8`` (both ends included) mean.

    Raises:
        UsageError: not a list of capacities.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?::(\d+)(?::(\d+))?)?\s*", part)
        if match is None:
            raise UsageError(
                f"{part!r} is no cache size: give slots per layer such as 8, 8,16,32 or 8:128:8"
            )
        first, last, step = (None if g is None else int(g) for g in match.groups())
        assert first is not None
        if max(first, last or 0) > MOST_SLOTS:
            raise UsageError(f"{part!r} is more than any cache: give {MOST_SLOTS} slots or fewer")
        if step == 0 or (last is not None and last < first):
            raise UsageError(f"{part!r} holds no cache size: give first:last:step, as in 8:128:8")
        found += range(first, (first if last is None else last) + 1, step or 1)
    return found


@dataclass(frozen=True)
class Budget:
    """How much may be resident: ``cache`` slots per MoE layer on average, or ``size_bytes``.

    Layers share it equally to begin with; ``slots`` gives every layer a number of its own instead.
    """

    cache: int | None = None
    size_bytes: int | None = None
    slots: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.cache, self.size_bytes, self.slots) if v is not None]
        if len(given) != 1:
            raise UsageError("give a budget either in slots per layer or in bytes")
        if min(self.slots or (0,)) < 0 or min(self.cache or 0, self.size_bytes or 0) < 0:
            raise UsageError(f"a cache of {self} is impossible: give 0 or more")

    def __str__(self) -> str:
        if self.slots is not None:
            return "/".join(map(str, self.slots))
        return str(self.cache) if self.size_bytes is None else f"{self.size_bytes} bytes"

    def total_bytes(self, expert_bytes: NDArray[np.int64]) -> int:
        """Return the whole budget in bytes, for layers whose experts have ``expert_bytes`` [L]."""
        if self.size_bytes is not None:
            return self.size_bytes
        if self.slots is not None:
            return int((np.array(self.slots, np.int64) * expert_bytes).sum())
        assert self.cache is not None
        return self.cache * int(expert_bytes.sum())

    def shares(self, expert_bytes: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
        """Return the slots of each layer to begin with, int64 [L].

        Raises:
            UsageError: ``slots`` are not those of so many layers and experts.
        """
        if self.slots is not None:
            if len(self.slots) != len(expert_bytes) or max(self.slots) > experts:
                raise UsageError(
                    f"slots {self} are impossible: give {len(expert_bytes)} numbers, none above"
                    f" {experts}"
                )
            return np.array(self.slots, np.int64)
        return uniform_capacity(self.total_bytes(expert_bytes), expert_bytes, experts)

    def slots_per_layer(self, expert_bytes: NDArray[np.int64]) -> int:
        """Return C, the whole slots per layer if all layers get the same number."""
        return self.total_bytes(expert_bytes) // int(expert_bytes.sum())


def uniform_capacity(
    total_bytes: int, expert_bytes: NDArray[np.int64], experts: int
) -> NDArray[np.int64]:
    """Return the slots of each layer, int64 [L], when a budget is shared equally."""
    layers = len(expert_bytes)
    lower = np.zeros(layers, np.int64)
    upper = np.full(layers, experts, np.int64)
    return apportion(np.ones(layers), lower, upper, expert_bytes, total_bytes)


@kernel
def apportion(weights, lower, upper, unit_bytes, total_bytes):  # noqa: ANN001, ANN201
    """Share a budget by weight, within bounds, in whole slots.

    The share of every layer is proportional to its weight as long as it lies within its bounds;
    what a bound cuts off or adds is shared again among the others. Whole slots are then handed
    out by largest remainder, ties to the lower layer.

    Args:
        weights: float64 [L], non-negative.
        lower: int64 [L], fewest slots; they must fit the budget.
        upper: int64 [L], most slots.
        unit_bytes: int64 [L], bytes of one slot.
        total_bytes: the budget. Never exceeded; with equal ``unit_bytes`` used up to a slot.

    Returns:
        int64 [L], slots per layer.
    """
    share = _bounded_shares(weights, lower, upper, unit_bytes, total_bytes)
    slots = np.empty(len(share), np.int64)
    remainder = np.empty(len(share), np.float64)
    left = total_bytes
    for i in range(len(share)):
        slots[i] = max(lower[i], int(np.floor(share[i] + 1e-9)))
        remainder[i] = share[i] - slots[i]
        left -= slots[i] * unit_bytes[i]
    while True:
        best = -1
        for i in range(len(share)):
            fits = slots[i] < upper[i] and unit_bytes[i] <= left
            if fits and (best < 0 or remainder[i] > remainder[best] + 1e-9):
                best = i
        if best < 0:
            return slots
        slots[best] += 1
        remainder[best] -= 1.0
        left -= unit_bytes[best]


@kernel
def _bounded_shares(weights, lower, upper, unit_bytes, total_bytes):  # noqa: ANN001, ANN202
    """Return real-valued slots per layer: proportional to weight, except at the bounds.

    As in CSS's flexible lengths: scale the free layers to the rest of the budget; if the bounds
    add more than they cut off, fix the layers below their lower bound, else those above the
    upper; repeat with what is left.
    """
    share = np.zeros(len(weights), np.float64)
    free = np.ones(len(weights), np.bool_)
    rest = float(total_bytes)
    while True:
        _scale_free(weights, unit_bytes, free, rest, share)
        excess = 0.0
        for i in range(len(share)):
            if free[i]:
                clipped = min(max(share[i], float(lower[i])), float(upper[i]))
                excess += (clipped - share[i]) * unit_bytes[i]
        fixed = False
        for i in range(len(share)):
            low, high = share[i] < lower[i], share[i] > upper[i]
            if free[i] and ((low and excess >= 0.0) or (high and excess <= 0.0)):
                share[i] = float(lower[i]) if low else float(upper[i])
                free[i] = False
                rest -= share[i] * unit_bytes[i]
                fixed = True
        if not fixed:
            return share


@kernel
def _scale_free(weights, unit_bytes, free, rest, share):  # noqa: ANN001, ANN202
    """Set the shares of the free layers by weight, or equal ones where none has any weight."""
    weighted = 0.0
    plain = 0.0
    for i in range(len(weights)):
        if free[i]:
            weighted += weights[i] * unit_bytes[i]
            plain += unit_bytes[i]
    for i in range(len(weights)):
        if free[i]:
            share[i] = rest * weights[i] / weighted if weighted > 0.0 else rest / plain
