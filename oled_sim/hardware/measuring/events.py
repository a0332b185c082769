"""Events as the tables count them: n experts with the same number of tokens each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oled_sim.hardware.rows import EventRows


def tokens_of(experts: int, per_expert: int, top_k: int) -> int:
    """Return the tokens of the smallest event in which n experts serve t tokens each."""
    return per_expert if experts <= top_k else -(-experts * per_expert // top_k)


def even_rows(experts: int, per_expert: int, top_k: int, tokens: int | None = None) -> EventRows:
    """Return rows in which experts 0 to n - 1 serve ``per_expert`` different tokens each.

    Args:
        experts: n. per_expert: t. top_k: k.
        tokens: of the event, default as few as possible; those at the end may have no row.
    """
    one, each = np.arange(experts)[:, None], np.arange(per_expert)[None, :]
    row = each * top_k + one if experts <= top_k else each * experts + one
    return EventRows(
        tokens=tokens or tokens_of(experts, per_expert, top_k),
        top_k=top_k,
        expert=np.arange(experts, dtype=np.int32),
        first=np.arange(experts + 1, dtype=np.int32) * np.int32(per_expert),
        row=row.ravel().astype(np.int32),
        weight=np.full(experts * per_expert, 1 / top_k, np.float32),
    )


@dataclass
class Rotation:
    """Goes through all experts of all layers before it comes back to one.

    So no cache serves what a real pass would read from memory.
    """

    layers: int
    experts: int
    layer: int = 0
    next: int = 0

    def take(self, count: int) -> tuple[int, NDArray[np.int32]]:
        """Return a layer and the next ``count`` experts of it, int32 [count]."""
        if self.next + count > self.experts:
            self.layer, self.next = (self.layer + 1) % self.layers, 0
        self.next += count
        return self.layer, np.arange(self.next - count, self.next, dtype=np.int32)

    def rows(self, like: EventRows) -> tuple[int, EventRows]:
        """Return a layer and an event like the one given, with the next experts."""
        layer, experts = self.take(len(like.expert))
        return layer, replace(like, expert=experts)
