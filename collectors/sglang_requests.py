"""Telling requests apart in a recording that holds no request ids.

What a pass ran is known by positions and tokens. A chunk continues a request whose last pass ran
the same block and left no mask that the chunk does not show, or ended where the chunk starts. Of
several the one whose tokens agree most, then the latest, then the next in the batch is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .sglang_dump import Chunk


class Found:
    """The passes of one request, in order.

    Attributes:
        chunks: of the request.
        place: of its last chunk in its pass.
        masked: whether the block at work held masks in an earlier pass.
        closed: an end of sequence was generated in a finished block.
    """

    def __init__(self, chunk: Chunk, place: int) -> None:
        self.chunks = [chunk]
        self.place = place
        self.masked = False
        self.closed = False

    @property
    def last(self) -> Chunk:
        """Its last pass."""
        return self.chunks[-1]


class Grouper:
    """Collects requests from the passes of a recording.

    Attributes:
        requests: in order of their first pass.
        doubtful: chunks that more than one request could have continued with.
    """

    def __init__(self, mask_id: int, eos_id: int) -> None:
        self.requests: list[Found] = []
        self.doubtful = 0
        self._mask_id, self._eos_id = mask_id, eos_id
        self._by_end: dict[int, list[Found]] = defaultdict(list)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Take one pass."""
        taken: set[int] = set()
        for place, chunk in enumerate(chunks):
            request = self._owner(chunk, place, taken)
            if request is None:
                request = Found(chunk, place)
                self.requests.append(request)
            else:
                self._by_end[request.last.end].remove(request)
                self._extend(request, chunk, place)
            self._by_end[chunk.end].append(request)
            taken.add(id(request))

    def _extend(self, request: Found, chunk: Chunk, place: int) -> None:
        before = request.last
        same = chunk.first == before.first
        request.masked = same and (request.masked or self._mask_id in before.ids)
        request.chunks.append(chunk)
        request.place = place
        if same and request.masked and self._mask_id not in chunk.ids:
            request.closed = self._eos_id in chunk.ids

    def _owner(self, chunk: Chunk, place: int, taken: set[int]) -> Found | None:
        same = [r for r in self._by_end[chunk.end] if self._same_block(r, chunk)]
        after = [r for r in self._by_end[chunk.first] if self._next_block(r, chunk)]
        found = [r for r in same + after if id(r) not in taken]
        if not found:
            return None
        found.sort(key=lambda r: self._rank(r, chunk, place), reverse=True)
        # Their places alone decide between requests whose tokens and last passes are alike.
        ranks = [self._rank(r, chunk, place)[:2] for r in found[:2]]
        self.doubtful += len(ranks) == 2 and ranks[0] == ranks[1]
        return found[0]

    def _rank(self, request: Found, chunk: Chunk, place: int) -> tuple[int, int, int]:
        before = request.last
        agree = 0
        if chunk.first == before.first:
            agree = int(np.count_nonzero((before.ids == chunk.ids) & ~self._masks(before)))
        return agree, before.record, -abs(request.place - place)

    def _same_block(self, request: Found, chunk: Chunk) -> bool:
        before = request.last
        if request.closed or before.first != chunk.first:
            return False
        old, new = self._masks(before), self._masks(chunk)
        if (new & ~old).any() or (old.any() and new.sum() == old.sum()):
            return False  # every pass accepts something
        kept = int(np.count_nonzero((before.ids == chunk.ids) & ~old))
        if not old.any():
            # A finished block comes again only if its last pass edited it.
            return request.masked and len(old) > kept >= len(old) / 2
        return 2 * kept >= int(np.count_nonzero(~old))

    def _next_block(self, request: Found, chunk: Chunk) -> bool:
        return not request.closed and self._mask_id not in request.last.ids

    def _masks(self, chunk: Chunk) -> np.ndarray:
        return chunk.ids == self._mask_id
