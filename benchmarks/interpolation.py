"""How well a profile's tables interpolate: predict each inner point from its two neighbours.

    python benchmarks/interpolation.py [PROFILE]

Three ways are compared: linear in the count (what the cost model does), linear over the count's
logarithm, and linear between logarithms of count and time. The spacing of the points is twice
that of the profile, so real errors between points are smaller.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from oled_sim.costs.profile import AXES, Curve, Profile
from oled_sim.costs.store import load_profile

WAYS = {
    "linear": (np.asarray, np.asarray, np.asarray),
    "log axis": (np.log2, np.asarray, np.asarray),
    "log-log": (np.log2, np.log, np.exp),
}


def main() -> None:
    """Print one line per table and axis: median of |error| and mean error of every way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("profile", nargs="?", default="h200-llada2.0-mini", help="name or file")
    profile = load_profile(parser.parse_args().profile)
    print(f"{profile.name}, median |error| and mean error in %")
    print(f"{'':<32}" + "".join(f"{way:>16}" for way in WAYS))
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for label, points, times in lines(profile):
        for way in WAYS:
            errors = _errors(np.array(points, float), np.array(times), way)
            found[label][way] += errors
            found["all"][way] += errors
    for label, by_way in found.items():
        cells = [100 * np.array(by_way[way]) for way in WAYS]
        print(
            f"{label:<32}" + "".join(f"{np.median(abs(e)):>8.1f}{e.mean():>+8.1f}" for e in cells)
        )


def lines(profile: Profile) -> Iterator[tuple[str, list[int], list[float]]]:
    """Yield every line of measured points: label, points of one axis, times in µs."""
    for name, axes in AXES.items():
        table = getattr(profile, name)
        if isinstance(table, Curve):
            yield name, table.points, table.median_us
            continue
        for row in table.median_us:
            yield f"{name} by {axes[1]}", table.columns, row
        for column in zip(*table.median_us, strict=True):
            yield f"{name} by {axes[0]}", table.rows, list(column)


def _errors(points: np.ndarray, times: np.ndarray, way: str) -> list[float]:
    """Return the relative error of each inner point that has two measured neighbours."""
    axis, forward, back = WAYS[way]
    kept = (points > 0) & (times > 0)  # nan: not measured; 0: hidden by what runs before
    x, y = axis(points[kept]), forward(times[kept])
    weight = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    predicted = back(y[:-2] * (1 - weight) + y[2:] * weight)
    return list(predicted / times[kept][1:-1] - 1)


if __name__ == "__main__":
    main()
