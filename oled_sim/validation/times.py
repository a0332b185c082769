"""How long a point took, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oled_sim.engine.averages import mean, percentile, ratio
from oled_sim.engine.state import LANES
from oled_sim.errors import MeasurementError
from oled_sim.validation.measured import LANE_COLUMNS, Point
from oled_sim.validation.predicted import Prediction

PERCENTILES = (10, 50, 90)

REGIMES = {"gpu": "compute-bound", "h2d": "transfer-bound", "cpu": "CPU-bound"}
"""What a point is called by the lane that has most of its critical path."""


@dataclass(frozen=True)
class Latency:
    """A point's times in µs, over decode passes (denoise and commit) but for ``prefill_us``.

    What was measured several times is the median over repetitions.

    Attributes:
        tpot_us: mean over requests.
        pass_us: percentiles ``PERCENTILES`` of the time of a pass.
        prefill_us: mean over requests of the time of their prefill passes.
        lanes: mean per pass by name, such as ``gpu_busy_us``; NaN where not measured.
    """

    tpot_us: float
    prefill_us: float
    pass_us: tuple[float, ...]
    lanes: dict[str, float]


@dataclass(frozen=True)
class Times:
    """Prediction and measurement of a point.

    Attributes:
        predicted, measured: in µs.
        repetitions_us: TPOT of each repetition.
        regime: one of ``REGIMES``: which lane has most of the predicted critical path.
        decide_us: time of a policy's decisions per decode pass: mean, median and most, NaN where
            not measured.
        decode_passes: of all measured requests, once. output_tokens: likewise.
    """

    predicted: Latency
    measured: Latency
    repetitions_us: tuple[float, ...]
    regime: str
    decide_us: tuple[float, float, float]
    decode_passes: int
    output_tokens: int

    @property
    def error(self) -> float:
        """Signed relative error of TPOT: (predicted - measured) / measured."""
        return self.predicted.tpot_us / self.measured.tpot_us - 1

    @property
    def spread_us(self) -> float:
        """Slowest minus fastest repetition's TPOT; NaN if there is only one."""
        if len(self.repetitions_us) < 2:
            return nan
        return max(self.repetitions_us) - min(self.repetitions_us)

    @property
    def spread(self) -> float:
        """The same relative to the measured TPOT."""
        return self.spread_us / self.measured.tpot_us

    def lane_error(self, column: str) -> float:
        """Signed relative error of a lane's time; NaN where not measured or never used."""
        return ratio(
            self.predicted.lanes[column] - self.measured.lanes[column], self.measured.lanes[column]
        )


def compare_times(point: Point, found: Prediction) -> Times:
    """Set a point's times beside the predicted ones.

    Raises:
        MeasurementError: a measured request puts out no token, so that it has no TPOT.
    """
    for request, tokens in found.tokens.items():
        if tokens == 0:
            raise MeasurementError(
                f"request {request} of {point.name} puts out no token in the passes that were"
                " measured: measure more passes"
            )
    (said,) = _runs(found.passes, found.tokens)
    runs = _runs(point.passes, found.tokens)
    decide_us = _decode(point.passes)["decide_us"].to_numpy()
    return Times(
        predicted=said,
        measured=_median(runs),
        repetitions_us=tuple(run.tpot_us for run in runs),
        regime=regime_of(said.lanes),
        decide_us=_decisions(decide_us),
        decode_passes=len(_decode(found.passes)),
        output_tokens=sum(found.tokens.values()),
    )


def regime_of(lanes: Mapping[str, float]) -> str:
    """Return the name for the lane that has most of the critical path; the GPU wins ties."""
    return REGIMES[max(LANES, key=lambda lane: lanes[f"{lane}_critical_us"])]


def _decode(passes: pa.Table) -> pa.Table:
    return passes.filter(pa.array(passes["kind"].to_numpy() != "prefill"))


def _runs(passes: pa.Table, tokens: Mapping[int, int]) -> list[Latency]:
    """Return the times of every repetition."""
    repetition = passes["repetition"].to_numpy()
    return [
        _latency(passes.filter(pa.array(repetition == i)), tokens) for i in np.unique(repetition)
    ]


def _latency(passes: pa.Table, tokens: Mapping[int, int]) -> Latency:
    """Return the times of one run; ``tokens`` are those that each request put out."""
    decode = _decode(passes)
    prefill = passes["pass_us"].to_numpy()[passes["kind"].to_numpy() == "prefill"]
    request, time_us = decode["request"].to_numpy(), decode["pass_us"].to_numpy()
    each = [time_us[request == r].sum() / count for r, count in tokens.items()]
    return Latency(
        tpot_us=mean(np.array(each)),
        prefill_us=float(prefill.sum()) / len(tokens),
        pass_us=tuple(percentile(time_us, q) for q in PERCENTILES),
        lanes={name: mean(decode[name].to_numpy()) for name in LANE_COLUMNS},
    )


def _median(runs: Sequence[Latency]) -> Latency:
    """Return the median of every figure over repetitions."""
    percentiles = np.median([run.pass_us for run in runs], axis=0)
    return Latency(
        tpot_us=float(np.median([run.tpot_us for run in runs])),
        prefill_us=float(np.median([run.prefill_us for run in runs])),
        pass_us=tuple(percentiles.tolist()),
        lanes={name: float(np.median([r.lanes[name] for r in runs])) for name in LANE_COLUMNS},
    )


def _decisions(decide_us: NDArray[np.float64]) -> tuple[float, float, float]:
    known = decide_us[~np.isnan(decide_us)]
    if not len(known):
        return nan, nan, nan
    return float(known.mean()), float(np.median(known)), float(known.max())
