"""Expert maps of earlier iterations, their store, and the two searches in it.

Follows ``ExpertMapStore`` in ``finemoe/runtime/model_offload.py`` of FineMoE at revision 5c58468.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._candidates import ranked
from ._similarity import add_products, norm, with_room


class Found(NamedTuple):
    """The best row of a search: its cosine, and its number."""

    score: float
    row: int


class StoredMap(NamedTuple):
    """A row of the store: its map float64 [L, E], and its experts by probability, int32 [L, E]."""

    map: NDArray[np.float64]
    order: NDArray[np.int32]


class Trajectory:
    """The map of an iteration so far, and its products with a store.

    Attributes:
        map: float64 [L, E], rows of the layers observed so far.
        reached: int64 [2], layers up to the last one observed, and those whose products are known.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.map = np.zeros((layers, experts))
        self.reached = np.zeros(2, np.int64)
        self.products = np.zeros(0)
        self.version = -1

    @property
    def observed(self) -> int:
        """Layers up to the last one observed."""
        return int(self.reached[0])

    def observe(self, layer: int, row: NDArray[np.float64]) -> None:
        """Note the gate probabilities float64 [E] of a layer; layers come in order."""
        self.map[layer] = row
        self.reached[0] = layer + 1


class ExpertMapStore:
    """Maps [L, E] and input embeddings [d] of earlier iterations.

    A new row takes a free place, else that of the most redundant one: the first of largest
    w · cos(embeddings) + (1 − w) · cos(maps).

    Args:
        layers, experts: L, E. capacity: most rows. embedding_weight: w.

    Attributes:
        size: rows. version: changes with every row.
    """

    def __init__(self, layers: int, experts: int, capacity: int, embedding_weight: float) -> None:
        self.capacity = capacity
        self.size = 0
        self.version = 0
        self._weight = embedding_weight
        self._maps = np.zeros((0, layers, experts))  # by row, for predictions
        self._columns = np.zeros((layers, experts, 0))  # the same by expert, for searches
        self._square = np.zeros((layers, 0))  # of the norm of the layers up to each
        self._orders = np.zeros((0, layers, experts), np.int32)
        self._embeddings = np.zeros((0, 0))  # [d, N], of norm 1, or 0 where there is none

    def map(self, row: int) -> NDArray[np.float64]:
        """Return the map of a row, float64 [L, E]."""
        return self._maps[row]

    def stored(self, row: int) -> StoredMap:
        """Return a row in the form that predictions use."""
        return StoredMap(self.map(row), self._orders[row])

    @property
    def arrays(
        self,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]:
        """What kernels read: maps [n, L, E] and [L, E, n], squares [L, n], orders [n, L, E]."""
        return self._maps, self._columns, self._square, self._orders

    def insert(self, trajectory: Trajectory, embedding: NDArray[np.float32] | None) -> None:
        """Add the map of a finished iteration; one without any event is no row."""
        if not trajectory.map.any():
            return
        unit = None if embedding is None else _unit(embedding)
        row = self.size if self.size < self.capacity else self._most_redundant(trajectory, unit)
        self._maps = with_room(self._maps, row + 1, axis=0)
        self._columns = with_room(self._columns, row + 1, axis=2)
        self._square = with_room(self._square, row + 1, axis=1)
        self._maps[row] = self._columns[:, :, row] = trajectory.map
        self._orders = with_room(self._orders, row + 1, axis=0)
        self._orders[row] = ranked(trajectory.map)
        self._square[:, row] = np.cumsum(np.square(trajectory.map).sum(axis=1))
        length = len(self._embeddings) if unit is None else len(unit)
        if length > len(self._embeddings):
            self._embeddings = np.zeros((length, len(self._maps)))
        self._embeddings = with_room(self._embeddings, len(self._maps), axis=1)
        self._embeddings[:, row] = 0.0 if unit is None else unit
        self.size = max(self.size, row + 1)
        self.version += 1

    def nearest_embedding(self, embedding: NDArray[np.float32] | None) -> Found | None:
        """Return the row whose embedding is most like, or None where there is nothing to like."""
        if embedding is None or self.size == 0 or len(self._embeddings) == 0:
            return None
        return _best(self._embedding_cosines(_unit(embedding)))

    def nearest_trajectory(self, trajectory: Trajectory) -> Found | None:
        """Return the row whose layers observed so far are most like, or None without a row."""
        if self.size == 0 or trajectory.observed == 0:
            return None
        return _best(self._map_cosines(trajectory))

    def open(self, trajectory: Trajectory) -> None:
        """Give a trajectory products with the rows there are now."""
        if trajectory.version != self.version:
            trajectory.version, trajectory.reached[1] = self.version, 0
            trajectory.products = np.zeros(len(self._maps))

    def _most_redundant(self, trajectory: Trajectory, unit: NDArray[np.float64] | None) -> int:
        trajectory.reached[0] = len(trajectory.map)
        redundancy = (1.0 - self._weight) * self._map_cosines(trajectory)
        if unit is not None and len(self._embeddings):
            redundancy += self._weight * self._embedding_cosines(unit)
        return int(np.argmax(redundancy))

    def _embedding_cosines(self, unit: NDArray[np.float64]) -> NDArray[np.float64]:
        cosines = np.zeros(self._embeddings.shape[1])
        add_products(self._embeddings, unit, self.size, cosines)
        return cosines[: self.size]

    def _map_cosines(self, trajectory: Trajectory) -> NDArray[np.float64]:
        """Return the cosines of the flattened layers observed so far, float64 [size]."""
        self.open(trajectory)
        for layer in range(trajectory.reached[1], trajectory.observed):
            add_products(
                self._columns[layer], trajectory.map[layer], self.size, trajectory.products
            )
        trajectory.reached[1] = trajectory.observed
        lengths = np.sqrt(self._square[trajectory.observed - 1, : self.size])
        lengths *= norm(trajectory.map[: trajectory.observed])
        products = trajectory.products[: self.size]
        return np.divide(products, lengths, out=np.zeros(self.size), where=lengths > 0)


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scale to norm 1; a vector of zeros stays one."""
    wide = np.asarray(vector, np.float64)
    length = norm(wide)
    return wide / length if length > 0 else wide


def _best(scores: NDArray[np.float64]) -> Found:
    row = int(np.argmax(scores))
    return Found(float(scores[row]), row)
