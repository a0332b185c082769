"""Repetitions of one point, measured one by one, put together."""

from __future__ import annotations

import msgspec
import pyarrow as pa

from oled_sim.validation.measured import About, Lossless, Point


def joined(before: Point | None, more: Point) -> Point:
    """Return a point with the repetitions of both, those of ``more`` last.

    Args:
        before: of the same settings, None for nothing. more: rows carry numbers of repetitions
            that go on from there.
    """
    if before is None:
        return more
    orders = [point.order for point in (before, more) if point.order is not None]
    return Point(
        about=_joined(before.about, more.about),
        passes=pa.concat_tables([before.passes, more.passes]),
        events=pa.concat_tables([before.events, more.events]),
        order=pa.concat_tables(orders) if orders else None,
    )


def _joined(before: About, more: About) -> About:
    return msgspec.structs.replace(
        more,
        repetitions=before.repetitions + more.repetitions,
        lossless=_both_checked(before.lossless, more.lossless),
        arrivals_recorded=before.arrivals_recorded or more.arrivals_recorded,
        speeds=(*before.speeds, *more.speeds),
        tables={},
    )


def _both_checked(before: Lossless | None, more: Lossless | None) -> Lossless | None:
    """Return what both checks found together; unchecked repetitions add no events."""
    if before is None or more is None:
        return before or more
    return Lossless(
        events_checked=before.events_checked + more.events_checked,
        worst_relative_error=max(before.worst_relative_error, more.worst_relative_error),
        tolerance=more.tolerance,
    )
