"""How far an estimate is off where the truth was measured: one geometry from another's tables.

    python -m benchmarks.estimate_error [MEASURED] [TRUTH]

Both profiles are of the same machine, so only sizes are carried over; what carrying over to another
machine adds is not in it. Per table: median of |error| and mean error over the cells of both.
"""

from __future__ import annotations

import argparse
import datetime

import numpy as np

from benchmarks.estimate_profile import H200
from oled_sim.costs.estimate import Machine, estimate
from oled_sim.costs.profile import AXES, Curve, Grid, Origin, Profile
from oled_sim.costs.store import load_profile


def main() -> None:
    """Print a line per table."""
    parser = argparse.ArgumentParser(description="Hold an estimate against what was measured.")
    parser.add_argument("measured", nargs="?", default="h200-llada2.0-mini")
    parser.add_argument("truth", nargs="?", default="h200-llada2.0-flash")
    args = parser.parse_args()
    measured, truth = load_profile(args.measured), load_profile(args.truth)
    found = estimated(measured, truth)
    print(
        f"{truth.name} estimated from {measured.name}, %\n{'table':<18}{'median':>10}{'mean':>10}"
    )
    for name in AXES:
        errors = 100 * relative_errors(getattr(found, name), getattr(truth, name))
        if len(errors):
            print(f"{name:<18}{np.median(np.abs(errors)):>10.1f}{errors.mean():>+10.1f}")


def estimated(measured: Profile, truth: Profile) -> Profile:
    """Return the estimate of the geometry and workers of ``truth`` on the same machine."""
    machine = Machine(truth.hardware, truth.software, H200)
    origin = Origin(
        date=datetime.date(1970, 1, 1), script="benchmarks/estimate_error.py", revision=""
    )
    return estimate(measured, H200, machine, truth.cost_geometry, origin, "estimate")


def relative_errors(found: Curve | Grid, truth: Curve | Grid) -> np.ndarray:
    """Return (estimate − truth) / truth at the counts that both tables have, float64 [n]."""
    theirs = cells(truth)
    pairs = [(time, theirs[at]) for at, time in cells(found).items() if at in theirs]
    known = np.array([(a, b) for a, b in pairs if a == a and b == b and b > 0]).reshape(-1, 2)
    return known[:, 0] / known[:, 1] - 1


def cells(table: Curve | Grid) -> dict[tuple[int, int], float]:
    """Return a table's times by its counts."""
    if isinstance(table, Curve):
        return {(x, 0): t for x, t in zip(table.points, table.median_us, strict=True)}
    return {
        (x, y): t
        for x, row in zip(table.rows, table.median_us, strict=True)
        for y, t in zip(table.columns, row, strict=True)
    }


if __name__ == "__main__":
    main()
