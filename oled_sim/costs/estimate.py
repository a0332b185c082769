"""Profiles of machines that were not measured, from one that was and from published figures.

What a kernel takes is split in two: the time that its bytes and operations need at the machine's
peak rates (its roofline), and the rest: launches, latency, imperfect kernels. The roofline is
replaced by that of the other machine and the other geometry, the rest is kept as measured, or
grows with the work where a table is one kernel. Work of the CPU lane is kept the same per worker.
The result says ``estimated`` wherever it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from oled_sim.costs.profile import (
    AXES,
    Curve,
    GeometryFields,
    Grid,
    Hardware,
    Host,
    Interference,
    Origin,
    Profile,
    Quantiles,
    Software,
)
from oled_sim.costs.work import WORK, Work, link_bytes
from oled_sim.errors import UsageError
from oled_sim.geometry import CostGeometry

_ONE_KERNEL = frozenset({"gpu_experts", "block_attention"})
"""Tables of one kernel, which is as far from its roofline with other sizes: what it takes beyond
the table's shortest time grows with the work. Elsewhere the rest is launches and latency."""

_OVER_LINK = frozenset({"h2d", "h2d_pageable", "d2h", "cpu_link"})


@dataclass(frozen=True)
class Rates:
    """Peak rates of a machine, as published: what its rooflines are made of.

    ``gpu_memory_gb_s``, ``cpu_memory_gb_s`` and ``link_gb_s`` (one direction, in theory) in 10⁹
    bytes per second; ``gpu_tflops``: dense bf16 with fp32 accumulation, 10¹² operations per second.
    """

    gpu_memory_gb_s: float
    gpu_tflops: float
    cpu_memory_gb_s: float
    link_gb_s: float

    def gpu_us(self, work: Work) -> float:
        """Return what the GPU needs at least for some work, µs."""
        return max(work.size_bytes / self.gpu_memory_gb_s / 1e3, work.flops / self.gpu_tflops / 1e6)


@dataclass(frozen=True)
class Machine:
    """A machine to estimate a profile of: what a profile names, and its rates."""

    hardware: Hardware
    software: Software
    rates: Rates


def estimate(
    measured: Profile, source: Rates, machine: Machine, geometry: CostGeometry, origin: Origin,
    name: str,
) -> Profile:  # fmt: skip
    """Return the estimated profile of a machine and geometry.

    Tables keep their points, so a table that the source did not measure somewhere is not known
    there either. An estimate has no spread of its own: percentiles equal the median.

    Args:
        measured: a measured profile, best of the same geometry.
        source: peak rates of the machine that it was measured on.
        machine: the other machine.
        geometry: what the estimate is for.
        origin: who made it when, with the assumptions in its note.
        name: what to call it.

    Raises:
        UsageError: the source is not measured, or its weights are of another number format.
    """
    if measured.status != "measured":
        raise UsageError(
            f"profile {measured.name!r} is {measured.status}: an estimate starts from measurements"
        )
    if measured.geometry.weight_bytes != geometry.weight_bytes:
        raise UsageError(
            f"profile {measured.name!r} has weights of {measured.geometry.weight_bytes} bytes, "
            f"{geometry.name!r} of {geometry.weight_bytes}: kernels of another format are not alike"
        )
    move = _Move(measured, source, machine, geometry)
    return msgspec.structs.replace(
        measured,
        name=name,
        status="estimated",
        provisional=False,
        origin=origin,
        hardware=machine.hardware,
        software=machine.software,
        geometry=GeometryFields(
            **{field: getattr(geometry, field) for field in GeometryFields.__struct_fields__}
        ),
        launch=_exactly(measured.launch),
        synchronize=_exactly(measured.synchronize),
        interference=_interference(measured.interference),
        host=None if measured.host is None else _host(measured.host),
        **{table: _moved(getattr(measured, table), move.of(table)) for table in AXES},
    )


class _Move:
    """Times of one machine and geometry as those of another."""

    def __init__(
        self, measured: Profile, source: Rates, machine: Machine, geometry: CostGeometry
    ) -> None:
        self._measured, self._source, self._machine = measured, source, machine
        self._before, self._after = measured.cost_geometry, geometry

    def of(self, table: str) -> Callable[[float, float, float], float]:
        """Return the function that takes a time and its two counts to the new time, µs."""
        if table == "cpu_experts":
            return self._on_workers
        if table in _OVER_LINK:
            return lambda time, x, _: self._over_link(table, time, x)
        return lambda time, x, y: self._on_gpu(table, time, x, y)

    def _on_gpu(self, table: str, time: float, x: float, y: float) -> float:
        work = WORK[table]
        before = self._source.gpu_us(work(self._before, x, y))
        after = self._source.gpu_us(work(self._after, x, y))
        bound = self._machine.rates.gpu_us(work(self._after, x, y))
        if time < before:  # caches help: as far below the other bound
            return time * bound / before
        rest = time - before
        if table in _ONE_KERNEL:
            fixed = min(_least(getattr(self._measured, table)), time)
            rest = fixed + (time - fixed) * after / before - after
        return max(rest, 0.0) + bound

    def _over_link(self, table: str, time: float, count: float) -> float:
        before = link_bytes(table, self._before, count) / self._source.link_gb_s / 1e3
        after = link_bytes(table, self._after, count) / self._machine.rates.link_gb_s / 1e3
        return time - before + after if time >= before else time * after / before

    def _on_workers(self, time: float, experts: float, tokens: float) -> float:
        """As long as the source's workers take for as much work each, one expert at least.

        Work is counted in weights, of which an expert has more in a wider geometry.
        """
        if math.isnan(time):
            return time
        share = self._measured.hardware.workers / self._machine.hardware.workers
        alike = experts * share * self._after.expert_bytes / self._before.expert_bytes
        found = _along(self._measured.cpu_experts, tokens, alike)
        memory = experts * self._after.expert_bytes / self._machine.rates.cpu_memory_gb_s / 1e3
        return max(found, memory)


def _least(table: Curve | Grid) -> float:
    return float(np.nanmin(np.array(table.median_us)))


def _along(table: Grid, column: float, row: float) -> float:
    """Return a grid's time at one of its columns and any row: linear, its last slope beyond."""
    times = np.array(table.median_us)[:, table.columns.index(int(column))]
    known = ~np.isnan(times)
    x, y = np.array(table.rows, float)[known], times[known]
    if row <= x[-1] or len(x) < 2:
        return float(np.interp(row, x, y))
    return float(y[-1] + (row - x[-1]) * max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0))


def _moved(table: Curve | Grid, move: Callable[[float, float, float], float]) -> Curve | Grid:
    if isinstance(table, Curve):
        times = [
            _rounded(move(t, x, 0)) for t, x in zip(table.median_us, table.points, strict=True)
        ]
        return msgspec.structs.replace(
            table, median_us=times, p10_us=times, p90_us=times, repeats=[1] * len(times)
        )
    cells = [
        [_rounded(move(t, x, y)) for t, y in zip(row, table.columns, strict=True)]
        for row, x in zip(table.median_us, table.rows, strict=True)
    ]
    repeats = [[0 if math.isnan(t) else 1 for t in row] for row in cells]
    return msgspec.structs.replace(
        table, median_us=cells, p10_us=cells, p90_us=cells, repeats=repeats
    )


def _rounded(time: float) -> float:
    return round(time, 3)


def _exactly(measured: Quantiles) -> Quantiles:
    value = measured.expected
    return Quantiles(median=value, p10=value, p90=value, repeats=1)


def _host(host: Host) -> Host:
    given = {name: getattr(host, name) for name in Host.__struct_fields__}
    return Host(**{name: _exactly(value) for name, value in given.items() if value is not None})


def _interference(found: Interference) -> Interference:
    def beside(lane: str) -> object:
        given = getattr(found, lane)
        factors = {n: getattr(given, n) for n in given.__struct_fields__}
        return msgspec.structs.replace(
            given, **{n: _exactly(q) for n, q in factors.items() if q is not None}
        )

    return msgspec.structs.replace(found, **{lane: beside(lane) for lane in ("gpu", "h2d", "cpu")})
