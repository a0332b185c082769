"""What a resident is worth by MoE-Infinity's paper and by its Python cache, which is not wired in.

The paper's rule is in its section on expert caching; ``priority_score`` is in
``moe_infinity/memory/expert_priority_score.py`` at revision d617801.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def paper_values(counts: NDArray[np.float64], epsilon: float) -> NDArray[np.float64]:
    """Return (share + epsilon) · (1 − layer / L) from an EAM float64 [L, E]."""
    layers = len(counts)
    near = 1.0 - np.arange(layers)[:, None] / layers
    return (_shares(counts, 0.0) + epsilon) * near


def priority_values(
    counts: NDArray[np.float64], visits: NDArray[np.float64], layer: int
) -> NDArray[np.float64]:
    """Return layer factor × share × visits, each normalised, as the class scores them.

    The layer factor is 1 up to the running layer and x / (L + 1) for a later layer x. The class
    was written for encoder-decoder models, of which the first half are encoder layers; here
    there are none.

    Args:
        counts: EAM float64 [L, E]. visits: of the residents, float64 [L, E]. layer: that runs.
    """
    layers, experts = counts.shape
    x = np.arange(layers)[:, None]
    factor = np.where(x <= layer, 1.0, x / (layers + 1)) * np.ones_like(counts)
    visits = visits if visits.any() else np.ones_like(visits)
    return _normal(factor) * _normal(_shares(counts, 1.0 / experts)) * _normal(visits)


def _normal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normalise to sum 1, and add the 1e-6 of the released code."""
    return values / values.sum() + 1e-6


def _shares(counts: NDArray[np.float64], without: float) -> NDArray[np.float64]:
    """Normalise each row to sum 1; ``without``: the shares of a row that is empty."""
    total = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, total, out=np.full_like(counts, without), where=total > 0)
