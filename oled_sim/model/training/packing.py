"""Packing of token sequences into windows.

A document starts at a multiple of ``pad_multiple`` and is padded with end-of-text up to the
next one, as it would be at the end of a generated block. Documents in one window never see each
other (:mod:`oled_sim.model.training.attention`), and positions restart with each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Windows:
    """W windows of S tokens.

    Attributes:
        tokens: int32 [W, S], end-of-text where no document lies.
        starts: bool [W, S], true at the first token of a document and of the unused tail.
        real: bool [W, S], tokens of documents, their end-of-text included, padding excluded.
        used: bool [W, S], ``real`` and the padding of documents; false in the unused tail.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.bool_]
    real: NDArray[np.bool_]
    used: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, count: int) -> Windows:
        """Return the first ``count`` windows."""
        return Windows(
            self.tokens[:count], self.starts[:count], self.real[:count], self.used[:count]
        )

    def tail(self, count: int) -> Windows:
        """Return all windows but the first ``count``."""
        return Windows(
            self.tokens[count:], self.starts[count:], self.real[count:], self.used[count:]
        )


def pack(documents: Sequence[NDArray[np.int32]], window: int, multiple: int, eos: int) -> Windows:
    """Append end-of-text to each document and pack all, best fit, in the order given.

    A document longer than a window is cut; only its last piece ends with end-of-text.
    """
    pieces = [piece for document in documents for piece in _pieces(document, window, eos)]
    units = [-(-len(piece) // multiple) for piece in pieces]
    bins = _best_fit(units, window // multiple)
    packed = _empty(max(bins, default=(-1, 0))[0] + 1, window, eos)
    for piece, size, (row, unit) in zip(pieces, units, bins, strict=True):
        _place(packed, piece, row, unit * multiple, size * multiple)
    return packed


def _pieces(document: NDArray[np.int32], window: int, eos: int) -> Iterator[NDArray[np.int32]]:
    ended = np.append(document, np.int32(eos))
    for start in range(0, len(ended), window):
        yield ended[start : start + window]


def _best_fit(sizes: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Return (bin, offset) per size; each goes to the open bin that it fills best."""
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by room left
    placed, count = [], 0
    for size in sizes:
        room = next((r for r in range(size, capacity + 1) if open_bins[r]), None)
        if room is None:
            room, number, count = capacity, count, count + 1
        else:
            number = open_bins[room].pop()
        placed.append((number, capacity - room))
        open_bins[room - size].append(number)
    return placed


def _empty(rows: int, window: int, eos: int) -> Windows:
    flags = [np.zeros((rows, window), np.bool_) for _ in range(3)]
    return Windows(np.full((rows, window), eos, np.int32), *flags)


def _place(packed: Windows, piece: NDArray[np.int32], row: int, start: int, room: int) -> None:
    packed.tokens[row, start : start + len(piece)] = piece
    packed.real[row, start : start + len(piece)] = True
    packed.used[row, start : start + room] = True
    packed.starts[row, start] = True
    if start + room < packed.starts.shape[1]:
        packed.starts[row, start + room] = True  # the next document, or the tail
