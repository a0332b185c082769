"""How many experts a pass activates, and how much they compute, by tokens (figure 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.analysis.tally import KINDS, RequestView, tabulate
from oled_sim.geometry import CostGeometry, RoutingGeometry
from oled_sim.trace.schema import Kind, RequestTrace

BLOCK_LENGTHS = tuple(2**n for n in range(13))
"""Block lengths looked at by default: 1, 2, 4, ... 4096."""

_KEYS = ["kind", "layer", "tokens"]


def footprint(
    requests: Iterable[RequestTrace],
    geometry: RoutingGeometry,
    *,
    cost: CostGeometry | None = None,
) -> pd.DataFrame:
    """Return activated experts and expert FLOPs of events, by tokens routed (figure 4).

    Autoregressive decoding routes one token to its top-k, so against it an event costs |A| / k
    times the experts, A being the union of its tokens' top-k, and n·k / k = n times the FLOPs.

    Args:
        requests: read once, one at a time.
        geometry: what they route over.
        cost: sizes of the simulated model; without them ``expert_flops`` is NaN.

    Returns:
        One row per kind of pass, layer and number of tokens that occurs: ``kind``, ``layer``,
        ``tokens``; ``events``; ``activated``, ``activated_low``, ``activated_high`` (mean and
        extremes of |A|); ``footprint_ratio`` (mean |A| / k); ``flops_ratio``; ``expert_flops``
        (FLOPs of one event in its routed experts, a multiply-add being two).
    """
    return tabulate(requests, geometry, FootprintTally(geometry, cost))["footprint"]


def block_footprint(
    requests: Iterable[RequestTrace],
    geometry: RoutingGeometry,
    *,
    block_lengths: Sequence[int] = BLOCK_LENGTHS,
) -> pd.DataFrame:
    """Return how the footprint grows with the block: the union over its first b tokens (figure 4).

    One trace shows a whole curve, under an assumption: the first b tokens route as they do in the
    trace, where they see the rest of the block. Traces recorded at each block length do not need
    it. b = 1 is autoregressive decoding, exactly k experts.

    Args:
        requests: read once, one at a time.
        geometry: what they route over.
        block_lengths: values of b; those longer than any pass are left out.

    Returns:
        Over denoise events that hold the first b tokens of their pass, one row per layer and b:
        ``layer``, ``block_length`` (b), ``events``, ``activated`` (mean), ``footprint_ratio``
        (activated / k), ``flops_ratio`` (b).
    """
    return tabulate(requests, geometry, BlockTally(geometry, block_lengths))["block_footprint"]


def expert_flops(cost: CostGeometry) -> int:
    """Return the FLOPs of one token in one routed expert: gate, up and down projection."""
    return 6 * cost.hidden_size * cost.moe_intermediate_size


class FootprintTally:
    """Counts :func:`footprint`."""

    def __init__(self, geometry: RoutingGeometry, cost: CostGeometry | None = None) -> None:
        self._geometry = geometry
        self._flops = float("nan") if cost is None else float(expert_flops(cost))
        self._counts = pd.DataFrame()

    def add(self, view: RequestView) -> None:
        """Count one request."""
        sizes = view.sizes
        here = pd.DataFrame(
            {
                "kind": view.kind,
                "layer": view.trace.event_layer,
                "tokens": view.tokens,
                "events": 1,
                "total": sizes,
                "low": sizes,
                "high": sizes,
            }
        )
        # Merged at once, so that what is kept grows with the keys alone.
        self._counts = (
            pd.concat([self._counts, here])
            .groupby(_KEYS, as_index=False)
            .agg({"events": "sum", "total": "sum", "low": "min", "high": "max"})
        )

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the table."""
        counts, k = self._counts, self._geometry.top_k
        activated = counts["total"] / counts["events"]
        table = pd.DataFrame(
            {
                "kind": np.array(KINDS)[counts["kind"]],
                "layer": np.array(self._geometry.layers)[counts["layer"]],
                "tokens": counts["tokens"],
                "events": counts["events"],
                "activated": activated,
                "activated_low": counts["low"],
                "activated_high": counts["high"],
                "footprint_ratio": activated / k,
                "flops_ratio": counts["tokens"].astype(float),
                "expert_flops": counts["tokens"] * k * self._flops,
            }
        )
        return {"footprint": table}


class BlockTally:
    """Counts :func:`block_footprint`."""

    def __init__(
        self, geometry: RoutingGeometry, block_lengths: Sequence[int] = BLOCK_LENGTHS
    ) -> None:
        self._geometry = geometry
        self._lengths = sorted(set(block_lengths))
        self._sums = np.zeros((2, len(self._lengths), len(geometry.layers)))  # events, experts

    def add(self, view: RequestView) -> None:
        """Count one request."""
        rank = _ranks(view)
        first = _first_users(view, rank)
        for i, length in enumerate(self._lengths):
            within = np.bincount(view.row_event[rank < length], minlength=view.trace.events)
            whole = (within == length) & (view.kind == Kind.DENOISE)
            if not whole.any():
                break  # longer prefixes are not there either
            activated = (first[whole] < length).sum(axis=1)
            self._sums[0, i] += view.per_layer(whole)
            self._sums[1, i] += view.per_layer(whole, activated)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the table."""
        events, total = self._sums
        length, layer = np.nonzero(events)
        activated = total[length, layer] / events[length, layer]
        lengths = np.array(self._lengths, np.int64)[length]
        table = pd.DataFrame(
            {
                "layer": np.array(self._geometry.layers)[layer],
                "block_length": lengths,
                "events": events[length, layer].astype(np.int64),
                "activated": activated,
                "footprint_ratio": activated / self._geometry.top_k,
                "flops_ratio": lengths.astype(float),
            }
        )
        return {"block_footprint": table.sort_values(["layer", "block_length"], ignore_index=True)}


def _ranks(view: RequestView) -> NDArray[np.int64]:
    """Return the place of each routing row's token in its pass, from 0: int64 [N]."""
    first = view.trace.token_offset[view.trace.event_pass]
    return view.trace.row_token - first[view.row_event]


def _first_users(view: RequestView, rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of the first token that activates an expert: int64 [V, E], huge if none."""
    first = np.full(view.active.shape, np.iinfo(np.int64).max)
    order = np.argsort(-rank, kind="stable")
    # Of repeated assignments the last one stays: the lowest rank.
    first[view.row_event[order, None], view.trace.experts[order]] = rank[order, None]
    return first
