"""How alike passes are by the number of iterations between them (figure 7)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.analysis.tally import RequestView, ratio, tabulate
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import COSINE_GAPS, RequestTrace
from oled_sim.trace.stats import event_pairs

SPANS = ("within", "across")
"""Both passes in one block; the later pass in a later block."""

_PAIRS, _KEPT, _JACCARD, _COSINE_PAIRS, _COSINE = range(5)


def locality(requests: Iterable[RequestTrace], geometry: RoutingGeometry) -> pd.DataFrame:
    """Return expert-set overlap and hidden-state cosine by iteration gap (figure 7).

    A pair is one layer in passes i and i + g of a request, neither of them a prefill. Overlap is
    the share of the earlier set that the later one keeps, |A_i ∩ A_i+g| / |A_i|. The cosine is that
    of the block-mean inputs of the gate, where the trace has the signal ``cosines``.

    Args:
        requests: read once, one at a time.
        geometry: what they route over.

    Returns:
        One row per span, gap and layer with a pair: ``span`` (``within`` one block, or ``across``
        a block boundary), ``gap`` (1 to 8), ``layer``, ``pairs``, ``overlap`` (mean), ``jaccard``
        (mean of |A_i ∩ A_i+g| / |A_i ∪ A_i+g|), ``cosine_pairs``, ``cosine`` (mean, else NaN).
    """
    return tabulate(requests, geometry, LocalityTally(geometry))["locality"]


class LocalityTally:
    """Counts :func:`locality`."""

    def __init__(self, geometry: RoutingGeometry) -> None:
        self._geometry = geometry
        # Sums [span, gap, figure, layer]; figures are numbered above.
        self._sums = np.zeros((len(SPANS), COSINE_GAPS, 5, len(geometry.layers)))

    def add(self, view: RequestView) -> None:
        """Count one request."""
        block = view.trace.block[view.trace.event_pass]
        for gap in range(1, COSINE_GAPS + 1):
            now, then = event_pairs(view.trace, len(self._geometry.layers), gap)
            across = block[now] != block[then]
            for span, chosen in enumerate((~across, across)):
                self._add_pairs(view, now[chosen], then[chosen], self._sums[span, gap - 1])
                self._add_cosines(view, then[chosen], gap, self._sums[span, gap - 1])

    def _add_pairs(
        self,
        view: RequestView,
        now: NDArray[np.intp],
        then: NDArray[np.intp],
        sums: NDArray[np.float64],
    ) -> None:
        common = np.bitwise_count(view.sets[now] & view.sets[then]).sum(axis=1, dtype=np.int64)
        united = view.sizes[now] + view.sizes[then] - common
        sums[_PAIRS] += view.per_layer(now)
        sums[_KEPT] += view.per_layer(now, common / view.sizes[now])
        sums[_JACCARD] += view.per_layer(now, common / united)

    def _add_cosines(
        self, view: RequestView, then: NDArray[np.intp], gap: int, sums: NDArray[np.float64]
    ) -> None:
        if view.trace.cosines is None:
            return
        cosine = view.trace.cosines[then, gap - 1].astype(np.float64)
        known = ~np.isnan(cosine)
        sums[_COSINE_PAIRS] += view.per_layer(then[known])
        sums[_COSINE] += view.per_layer(then[known], cosine[known])

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the table."""
        span, gap, layer = np.nonzero(self._sums[:, :, _PAIRS])
        pairs, kept, jaccard, cosine_pairs, cosine = self._sums[span, gap, :, layer].T
        table = pd.DataFrame(
            {
                "span": np.array(SPANS)[span],
                "gap": gap + 1,
                "layer": np.array(self._geometry.layers)[layer],
                "pairs": pairs.astype(np.int64),
                "overlap": ratio(kept, pairs),
                "jaccard": ratio(jaccard, pairs),
                "cosine_pairs": cosine_pairs.astype(np.int64),
                "cosine": ratio(cosine, cosine_pairs),
            }
        )
        return {"locality": table}
