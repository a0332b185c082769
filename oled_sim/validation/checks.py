"""Whether measured points can be compared: whole tables, like machines, right trace and profile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from oled_sim.costs.profile import Hardware, Profile
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.trace.manifest import Manifest
from oled_sim.validation.measured import EVENTS, PASSES, About, Point, profile_sha256
from oled_sim.validation.predicted import Prediction

SAME_HARDWARE = ("gpu", "cpu", "workers")
"""Fields in which a profile's machine and a point's must agree."""

PASS_KEYS = ("repetition", "request", "pass_index")
EVENT_KEYS = (*PASS_KEYS, "layer")


def check_together(points: Sequence[Point]) -> None:
    """Refuse points that no single report can be about.

    Machines of one kind may share the points of a grid, each with a profile of its own.

    Raises:
        MeasurementError: two kinds of machine, two cost geometries, or the same point twice.
    """
    first = points[0]
    for point in points[1:]:
        if point.about.geometry != first.about.geometry:
            raise MeasurementError(
                f"{first.name} and {point.name} are of different geometries"
                f" ({first.about.geometry.name} and {point.about.geometry.name}): validate each"
                " geometry apart"
            )
        if point.about.layers != first.about.layers:
            numbers = (p.about.layers or "all" for p in (first, point))
            raise MeasurementError(
                f"{first.name} and {point.name} ran different MoE layers"
                f" ({' and '.join(map(str, numbers))}): validate each number of layers apart"
            )
        _check_kind(first, point)
    seen: dict[object, Point] = {}
    for point in points:
        key = _identity(point.about)
        if key in seen:
            raise UsageError(
                f"{seen[key].name} and {point.name} measure the same point: validate them apart, or"
                " remove one"
            )
        seen[key] = point


def _check_kind(first: Point, point: Point) -> None:
    """Refuse points of machines that differ in what a profile's and a point's must agree in."""
    mine, theirs = first.about.machine.hardware, point.about.machine.hardware
    for field in SAME_HARDWARE:
        if getattr(mine, field) != getattr(theirs, field):
            raise MeasurementError(
                f"{first.name} and {point.name} are of different kinds of machine ({field}"
                f" {getattr(mine, field)!r} and {getattr(theirs, field)!r}): validate each kind"
                " apart"
            )


def _identity(about: About) -> object:
    cuts = (about.history, about.warmup, about.measured)
    return about.policy.label, about.cache, about.rules, about.trace.sha256, cuts


def check_profile(point: Point, profile: Profile, *, other_hardware: bool = False) -> None:
    """Refuse a profile that is not the point's, or was measured on another machine.

    ``other_hardware``: allow the latter.

    Raises:
        UsageError: it is another one.
        MeasurementError: says in what they differ.
    """
    about = point.about
    if profile_sha256(profile) != about.profile.sha256:
        raise UsageError(
            f"profile {profile.name!r} is not the one that {point.name} was measured with"
            f" ({about.profile.name!r}, {about.profile.sha256[:16]}): give that one with --profile"
        )
    if profile.geometry != about.geometry:
        raise MeasurementError(
            f"profile {profile.name!r} is of geometry {profile.geometry.name!r} and {point.name}"
            f" was measured with {about.geometry.name!r}: measure it again with a profile of its"
            " geometry"
        )
    if not other_hardware:
        _check_hardware(point, profile.name, profile.hardware)


def _check_hardware(point: Point, profile: str, theirs: Hardware) -> None:
    mine = point.about.machine.hardware
    for field in SAME_HARDWARE:
        if getattr(mine, field) != getattr(theirs, field):
            raise MeasurementError(
                f"{point.name} was measured with {field} {getattr(mine, field)!r} and profile"
                f" {profile!r} with {getattr(theirs, field)!r}: profile and replay belong on one"
                " machine, unless --allow-other-hardware is given"
            )


def check_trace(point: Point, manifest: Manifest) -> None:
    """Refuse a trace that has changed since it was replayed.

    Raises:
        MeasurementError: its manifest carries another checksum.
    """
    used = point.about.trace
    if manifest.checksum != used.sha256:
        raise MeasurementError(
            f"the trace {used.name} has changed since {point.name} was measured (its manifest was"
            f" {used.sha256[:16]} and is {manifest.checksum[:16]}): restore it, or replay it again"
        )


def check_tables(point: Point, found: Prediction) -> None:
    """Refuse tables that lack a row, repeat one, or hold one that the trace does not.

    Raises:
        MeasurementError: names the first such row.
    """
    repetitions = point.about.repetitions
    _check_keys(point, PASSES, point.passes, found.passes, PASS_KEYS, repetitions)
    _check_keys(point, EVENTS, point.events, found.events, EVENT_KEYS, repetitions)
    _check_passes(point, found.passes)


def _check_keys(
    point: Point,
    name: str,
    measured: pa.Table,
    predicted: pa.Table,
    keys: Sequence[str],
    repetitions: int,
) -> None:
    """Compare the keys of rows with those of the prediction, once for every repetition."""
    have = list(zip(*(measured[key].to_pylist() for key in keys), strict=True))
    once = list(zip(*(predicted[key].to_pylist() for key in keys[1:]), strict=True))
    want = {(i, *row) for i in range(repetitions) for row in once}
    where = f"{name} of {point.name}"
    seen: set[tuple[int, ...]] = set()
    for row in have:
        if row not in want:
            raise MeasurementError(f"{where} has a row that the trace has not: {_row(keys, row)}")
        if row in seen:
            raise MeasurementError(f"{where} repeats a row: {_row(keys, row)}")
        seen.add(row)
    if missing := sorted(want - seen):
        raise MeasurementError(f"{where} lacks a row: {_row(keys, missing[0])}")


def _row(keys: Sequence[str], row: Sequence[int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in zip(keys, row, strict=True))


def _check_passes(point: Point, predicted: pa.Table) -> None:
    """Check that passes are those of the trace, and that each was timed."""
    order = [(key, "ascending") for key in PASS_KEYS]
    rows = point.passes.sort_by(order)
    again = pa.concat_tables([predicted.sort_by(order)] * point.about.repetitions)
    where = f"{PASSES} of {point.name}"
    for column in ("kind", "tokens", "context"):
        mine, theirs = rows[column].to_numpy(), again[column].to_numpy()
        for i in np.flatnonzero(mine != theirs)[:1]:
            raise MeasurementError(
                f"{where} says {column} {mine[i]} and the trace {theirs[i]}: {_at(rows, i)}"
            )
    time_us = rows["pass_us"].to_numpy()
    for i in np.flatnonzero(~(np.isfinite(time_us) & (time_us > 0)))[:1]:
        raise MeasurementError(f"{where} has no time for a pass: {_at(rows, i)}")


def _at(rows: pa.Table, i: int) -> str:
    return _row(PASS_KEYS, [rows[key][i].as_py() for key in PASS_KEYS])
