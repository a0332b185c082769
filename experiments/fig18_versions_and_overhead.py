"""Figure 18: LLaDA2.0 beside 2.1, whose decoding edits, and the time that deciding takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from oled_sim.experiment import Experiment, Inputs, Point, Rows, Size, SyntheticTrace
from oled_sim.plotting.versions import draw_fig18
from oled_sim.trace.files import sha256_hex

from ._grids import CACHES, DATA_SETS, MACHINES, MODELS, synthetic
from ._parts import PartPoint

MEASURED = Path(__file__).parents[1] / "benchmarks" / "results"
"""Replays on hardware: each folder ``validation-*`` has ``points.parquet`` (docs/validation.md)."""


@dataclass(frozen=True)
class VersionPoint(PartPoint):
    """A run that says of which ``version`` the model is."""

    version: str = ""


@dataclass(frozen=True)
class OverheadPoint(Point):
    """Decision times of replays on hardware, as ``oled-sim validate`` wrote them.

    Attributes:
        trace: any bundled one, as a point must have one; rows say what was replayed.
        folder: of the results, below :data:`MEASURED`.
        sha256: of its table, so that another table is read anew.
    """

    folder: str = ""
    sha256: str = ""
    part: str = "overhead"

    def labels(self) -> dict[str, Any]:
        """Return what tells the rows from those of simulations."""
        return {"part": self.part, "folder": self.folder}

    def measure(self, inputs: Inputs) -> Rows:
        """Return a row per replayed point.

        ``trace``, ``policy``, ``cache``, ``replayed`` (which requests; ``request`` is the first),
        ``decode_passes``, ``repetitions``, ``layers`` (that ran); ``replays``, ``whole``, or
        ``part`` if not all of the model's layers ran, which the share does not mind;
        ``decide_us`` (mean per forward pass), ``pass_us`` (mean time of a decode pass without it)
        and ``share``, the former over the latter.
        """
        found = pd.read_parquet(MEASURED / self.folder / "points.parquet")
        pass_us = found["measured_tpot_us"] * found["output_tokens"] / found["decode_passes"]
        prefills = found["requests"].str.count("-") + 1
        passes = (found["decode_passes"] + prefills) * found["repetitions"]
        layers = found["events"] // passes
        geometry = json.loads((MEASURED / self.folder / "summary.json").read_text())["geometry"]
        every = geometry["layers"] - geometry["dense_layers"]
        rows = found[["trace", "policy", "cache", "decode_passes", "repetitions"]].assign(
            request=found["requests"].str.split("-").str[0].astype(int),
            replayed=found["requests"],
            layers=layers,
            replays=layers.map(lambda n: "whole" if n == every else "part"),
            decide_us=found["decide_mean_us"],
            pass_us=pass_us,
            share=found["decide_mean_us"] / pass_us,
            origin="measured",
        )
        return [{str(k): v for k, v in row.items()} for row in rows.to_dict("records")]


def points(size: Size) -> list[Point]:
    """Return the versions of (a), then the replays of (b), if there are any."""
    return [*_versions(size), *_overheads()]


def _versions(size: Size) -> Iterator[Point]:
    quick = size == "quick"
    for machine in MACHINES[: 1 if quick else None]:
        for model in MODELS[: 1 if quick else None]:
            for trace in _both_versions(model, quick=quick):
                for cache in CACHES:
                    yield VersionPoint(
                        trace, cache=cache, profile=f"{machine}-{model}", history=0, part="version",
                        version=trace.model.partition("-")[0],
                    )  # fmt: skip


def _both_versions(model: str, *, quick: bool) -> Iterator[SyntheticTrace]:
    for version in (model, model.replace("2.0", "2.1")):
        if quick:
            yield SyntheticTrace(version, "gsm8k", requests=3, output_tokens=64)
        else:
            yield from (synthetic(version, data_set) for data_set in DATA_SETS)


def _overheads() -> Iterator[Point]:
    for table in sorted(MEASURED.glob("validation-*/points.parquet")):
        checksum = sha256_hex(table.read_bytes())
        yield OverheadPoint("mini-gsm8k", folder=table.parent.name, sha256=checksum)


EXPERIMENT = Experiment(
    "fig18",
    "TPOT of LLaDA2.0 and 2.1, and the time that deciding takes on hardware",
    "5.4, figure 18",
    points,
    draw_fig18,
)
