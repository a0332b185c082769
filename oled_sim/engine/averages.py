"""Averages of figures; 0/0 is NaN, and NaN counts for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sum_of(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Return the sum of arrays of one shape."""
    return np.sum(np.stack(list(arrays)), axis=0)


def ratio(a: float, b: float) -> float:
    """Return a / b, NaN where b is 0."""
    return float(a) / float(b) if b else float("nan")


def mean(values: NDArray[np.float64]) -> float:
    """Return the mean of what is not NaN; NaN if nothing is left."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def percentile(values: NDArray[np.float64], q: float) -> float:
    """Return a percentile of what is not NaN, linearly interpolated; NaN if nothing is left."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, q)) if len(known) else float("nan")
