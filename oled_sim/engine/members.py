"""Who takes part in a batch, and in which of its passes each advances (spec §4).

``lockstep``: all start together, every pass advances each unfinished request by its own next one,
finished ones leave. ``barrier``: likewise, but a request that has finished a block sits out until
all have finished their block of that index, so that all blocks start together. ``refill``: the
next request takes the place of one that has finished; a batch then covers the stretch until the
next change, and holds stretches of its requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.routes import carry_confidence
from oled_sim.trace.schema import Kind, RequestTrace


@dataclass(frozen=True)
class Member:
    """A request in a batch, or a stretch of its passes.

    Attributes:
        whole: the request.
        first, last: which of its passes take part, ``last`` exclusive.
        at: int64 [last − first], the pass of the batch that each of them is part of, ascending.
    """

    whole: RequestTrace
    first: int
    last: int
    at: NDArray[np.int64]

    @cached_property
    def trace(self) -> RequestTrace:
        """The passes that take part, as a request; columns are views."""
        if (self.first, self.last) == (0, self.whole.passes):
            return self.whole
        return stretch(self.whole, self.first, self.last)

    @property
    def head_rows(self) -> NDArray[np.int64]:
        """Per pass that takes part, the tokens that the LM head judges, int64.

        Those of a block: of a prefill pass its last ones, since nothing asks for a prompt's own.
        A request that ends with its prefill says nothing of its blocks; all are judged then.
        """
        length, decode = np.diff(self.whole.token_offset), self.whole.kind != Kind.PREFILL
        block = int(length[decode].max(initial=0)) or int(length.max(initial=0))
        return np.minimum(length[self.first : self.last], block)

    @property
    def carried(self) -> NDArray[np.float64]:
        """Per token row, the last confidence known for its position before the pass."""
        whole = self.whole
        size = int(whole.position.max(initial=0)) + 1
        known = carry_confidence(
            whole.token_offset, whole.position.astype(np.int64), whole.confidence, size
        )
        return known[whole.token_offset[self.first] : whole.token_offset[self.last]]


def stretch(trace: RequestTrace, first: int, last: int) -> RequestTrace:
    """Return passes ``first:last`` of a request as a request of that number."""
    tokens = slice(trace.token_offset[first], trace.token_offset[last])
    begin, end = np.searchsorted(trace.event_pass, [first, last])
    rows = slice(trace.event_offset[begin], trace.event_offset[end])
    per_pass = ("kind", "block", "context", "accepted_count", "time_us", "embedding")
    per_token = ("position", "token_id", "state", "confidence", "accepted", "edited")
    per_event, per_row = ("event_layer", "full_gate", "cosines"), ("experts", "gates")
    cut = {
        **dict.fromkeys(per_pass, slice(first, last)),
        **dict.fromkeys(per_token, tokens),
        **dict.fromkeys(per_event, slice(begin, end)),
        **dict.fromkeys(per_row, rows),
    }
    columns: dict[str, Any] = {
        name: None if getattr(trace, name) is None else getattr(trace, name)[part]
        for name, part in cut.items()
    }
    return RequestTrace(
        request=trace.request,
        token_offset=trace.token_offset[first : last + 1] - tokens.start,
        event_pass=trace.event_pass[begin:end] - np.int32(first),
        event_offset=trace.event_offset[begin : end + 1] - rows.start,
        row_token=trace.row_token[rows] - np.int32(tokens.start),
        **columns,
    )


def lockstep(traces: Sequence[RequestTrace]) -> list[Member]:
    """Return requests that advance in every pass until they end."""
    return [Member(t, 0, t.passes, np.arange(t.passes)) for t in traces]


def barrier(traces: Sequence[RequestTrace]) -> list[Member]:
    """Return requests whose blocks start together: the first of each, then the second, …

    Blocks are counted from each request's own first one, since prompts differ in length.
    """
    numbers = [np.cumsum(np.diff(t.block, prepend=t.block[:1]) != 0) for t in traces]
    blocks = max(int(n[-1]) + 1 for n in numbers)
    length = np.stack([np.bincount(n, minlength=blocks) for n in numbers])
    start = np.concatenate([[0], np.cumsum(length.max(axis=0))])
    members = []
    for trace, number in zip(traces, numbers, strict=True):
        within = np.arange(trace.passes) - np.searchsorted(number, number)
        members.append(Member(trace, 0, trace.passes, start[number] + within))
    return members
