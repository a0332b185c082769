"""Rules every request of a trace obeys (spec §3)."""

from __future__ import annotations

from collections.abc import Collection

from oled_sim.trace.manifest import Manifest, RequestEntry
from oled_sim.trace.schema import RequestTrace


def check_request(
    trace: RequestTrace,
    manifest: Manifest,
    where: str,
    *,
    signals: Collection[str] | None = None,
    entry: RequestEntry | None = None,
) -> None:
    """Check all."""
