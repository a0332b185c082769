"""How far predictions were off where a validation on hardware is at hand."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from oled_sim.costs.profile import Profile
from oled_sim.errors import MeasurementError, UsageError

OFTEN = 0.9
"""Part of the validation's points that took no more than the margin."""


@dataclass(frozen=True)
class Accuracy:
    """What a validation found for a profile's machine and model.

    Attributes:
        source: name of the folder. profile: name of the profile that was held against hardware.
        policy: whose points these are, or None for those of all policies.
        points: how many. median, worst: of the errors' size; bias: their mean; predicted less
            measured, over measured.
        margin: in :data:`OFTEN` of the points measured over predicted was at most this.
    """

    source: str
    profile: str
    policy: str | None
    points: int
    median: float
    bias: float
    worst: float
    margin: float


def results_folder() -> Path:
    """Return where a checkout of the repository keeps its validations; it may be missing."""
    return Path(str(files("oled_sim"))).parent / "benchmarks" / "results"


def find_accuracy(
    profile: Profile, policies: list[str], folder: Path | None = None
) -> dict[str, Accuracy]:
    """Return what validations say about a profile, by policy.

    The newest validation of the same GPU and model counts, as :func:`find_validations` orders
    them. A policy that it has no point of gets the figures of all its points.

    Args:
        profile: whose predictions are in question; one that is estimated has no validation.
        policies: which.
        folder: of a validation, or of several; by default the repository's, if there is one.

    Raises:
        MeasurementError: a validation cannot be read.
    """
    if profile.status != "measured":
        return {}
    matching = [v for v in find_validations(folder) if _is_of(v[1], profile)]
    if not matching:
        return {}
    path, summary = matching[-1]
    points = _points(path)
    return {policy: _accuracy(path, summary, points, policy) for policy in policies}


def find_validations(folder: Path | None) -> list[tuple[Path, dict[str, Any]]]:
    """Return validations with their summaries, by the day at the end of their folders' names.

    Of those of a day, or without one, the one with the most points is last, as the newest.

    Args:
        folder: of a validation, or of several named ``validation-*``; None for the repository's,
            which may be missing.

    Raises:
        UsageError: a folder was given, and there is none in it.
        MeasurementError: a summary cannot be read.
    """
    root = results_folder() if folder is None else folder
    paths = sorted([*root.glob("summary.json"), *root.glob("validation-*/summary.json")])
    if folder is not None and not paths:
        raise UsageError(
            f"{folder} holds no results of a validation: give the folder that"
            " `oled-sim validate --out` wrote to"
        )
    found = [(path.parent, _summary(path)) for path in paths]
    return sorted(found, key=lambda v: (_day(v[0]), len(v[1].get("points", ()))))


def _summary(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{path} is no summary of a validation: {error}") from None


def _day(folder: Path) -> str:
    found = re.search(r"\d{4}-\d\d-\d\d$", folder.name)
    return found[0] if found else ""


def _is_of(summary: dict[str, Any], profile: Profile) -> bool:
    gpu = summary.get("machine", {}).get("hardware", {}).get("gpu")
    return gpu == profile.hardware.gpu and summary["geometry"]["name"] == profile.geometry.name


def _points(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path / "points.parquet", columns=["policy", "error"])
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{path} has no points of a validation: {error}") from None


def _accuracy(path: Path, summary: dict[str, Any], points: pd.DataFrame, policy: str) -> Accuracy:
    own = points[points["policy"] == policy]
    errors = (own if len(own) else points)["error"].to_numpy(np.float64)
    return Accuracy(
        source=path.name,
        profile=summary["profile"]["name"],
        policy=policy if len(own) else None,
        points=len(errors),
        median=float(np.median(np.abs(errors))),
        bias=float(errors.mean()),
        worst=float(np.abs(errors).max()),
        margin=float(np.quantile(1 / (1 + errors), OFTEN)),
    )
