"""How experts of an event are divided among CPU workers. No torch here.

An expert is one piece, or cut into pieces of output rows: a piece computes some columns of the
expert's inner activations [t, f], and once all are there some columns of its output [t, h].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import kernel
from oled_sim.hardware.rows import EventRows

FIELDS = 7
"""int64 per piece: expert, first and last row of it, columns of f from and to, of h from and to."""
WEIGHTS_TOKENS = 64.0
"""An expert's weights are taken to be read in the time of so many tokens' products."""
PIECE_TOKENS = 6.0
"""What starting a piece is taken to cost, in the same unit: with 1, some jobs of 4 to 12 experts
were cut so finely that they took up to 40 % longer than with an expert more (14 workers, AMX)."""
GRAIN = 4
"""Cuts are multiples of this: matrix products treat what is left of a row of tiles differently,
so that another cut could change the last bits of a result."""


@dataclass(frozen=True)
class Shares:
    """One job laid out for the workers, in arrays that are used again by the next.

    Attributes:
        tokens: int64 [rows], of the routed rows of the job, expert after expert.
        weights: float32 [rows], theirs.
        places: int64 [k·T], seen as [most, T]: where the rows of each token stand in the order of
            its top-k, counted from 1; 0 for none.
        pieces: int64 [n, FIELDS], worker after worker.
        starts: int64 [workers + 1], where each one's pieces begin.
    """

    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]
    places: NDArray[np.int64]
    pieces: NDArray[np.int64]
    starts: NDArray[np.int64]
    place_of: NDArray[np.int64]

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.starts) - 1

    def lay_out(self, rows: EventRows, which: NDArray[np.integer], f: int, h: int) -> int:
        """Divide the experts at positions ``which`` of an event; return ``most``, at least 1.

        Experts that all workers can take whole, in equal numbers, are left whole; the rest is cut
        evenly. Then each piece, the largest first, goes to the worker with the least to do.
        """
        places = self.places[: rows.top_k * rows.tokens].reshape(rows.top_k, rows.tokens)
        most = _place(rows.first, rows.row, rows.weight, which, self.tokens, self.weights,
            self.place_of, places)  # fmt: skip
        _divide(rows.first, rows.expert, which, f, h, self.starts, self.pieces)
        return max(most, 1)


def empty_shares(workers: int, experts: int, rows: int) -> Shares:
    """Return room for jobs of at most so many experts and routed rows."""
    return Shares(
        tokens=np.empty(rows, np.int64),
        weights=np.empty(rows, np.float32),
        places=np.empty(rows, np.int64),
        pieces=np.empty((experts + 2 * workers * workers, FIELDS), np.int64),
        starts=np.zeros(workers + 1, np.int64),
        place_of=np.zeros(rows, np.int64),
    )


@kernel
def _place(first, row, weight, which, tokens, weights, place_of, places):  # noqa: ANN001, ANN202
    """Fill tokens, weights and places; return the most rows that one token has.

    ``place_of`` [T·k] is all zero before and after.
    """
    top_k = len(places)
    n = 0
    for i in which:
        for r in range(first[i], first[i + 1]):
            tokens[n] = row[r] // top_k
            weights[n] = weight[r]
            n += 1
            place_of[row[r]] = n
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


@kernel
def _best_cut(count, workers, most):  # noqa: ANN001, ANN202
    """Return into how many pieces to cut each of ``count`` like experts, at most ``most``."""
    best, best_cost = 1, np.inf
    for cut in range(1, min(workers, most) + 1):
        in_turn = (count * cut + workers - 1) // workers
        cost = in_turn * (WEIGHTS_TOKENS / cut + PIECE_TOKENS)
        if cost < best_cost:
            best, best_cost = cut, cost
    return best


@kernel
def _divide(first, expert, which, f, h, starts, pieces):  # noqa: ANN001, ANN202
    """Fill ``starts`` and ``pieces``."""
    workers, n = len(starts) - 1, len(which)
    begin = np.zeros(n + 1, np.int64)
    cost = np.empty(n, np.float64)
    for i in range(n):
        count = first[which[i] + 1] - first[which[i]]
        begin[i + 1] = begin[i] + count
        cost[i] = WEIGHTS_TOKENS + count
    fair = cost.sum() / workers
    whole = n // workers * workers
    most = max(1, min(f, h) // GRAIN)
    rest_cut = _best_cut(n - whole, workers, most)
    load = np.zeros(workers)
    owner = np.empty(len(pieces), np.int64)
    made = np.empty((len(pieces), FIELDS), np.int64)
    total = 0
    for position, i in enumerate(np.argsort(-cost, kind="mergesort")):
        cut = rest_cut
        if position < whole:
            cut = 1 if cost[i] <= 1.2 * fair else min(workers, most)
        for part in range(cut):
            to = 0
            for w in range(1, workers):
                if load[w] < load[to]:
                    to = w
            load[to] += cost[i] / cut + PIECE_TOKENS
            owner[total] = to
            piece = made[total]
            piece[0] = expert[which[i]]
            piece[1], piece[2] = begin[i], begin[i + 1]
            piece[3], piece[4] = _edge(f, part, cut), _edge(f, part + 1, cut)
            piece[5], piece[6] = _edge(h, part, cut), _edge(h, part + 1, cut)
            total += 1
    starts[:] = 0
    for j in range(total):
        starts[owner[j] + 1] += 1
    for w in range(workers):
        starts[w + 1] += starts[w]
    at = starts[:-1].copy()
    for j in range(total):
        pieces[at[owner[j]]] = made[j]
        at[owner[j]] += 1


@kernel
def _edge(width, part, cut):  # noqa: ANN001, ANN202
    """Return where a part of a width begins."""
    return width if part == cut else width // GRAIN * part // cut * GRAIN
