"""What is kept of a recording that was stopped."""

from __future__ import annotations

from pathlib import Path

from oled_sim.trace.manifest import MANIFEST, load_manifest


def contents(out: Path | None) -> bytes:
    """Return what tells whether anything was recorded at ``out``: a trace's manifest."""
    file = None if out is None else out / MANIFEST
    return file.read_bytes() if file is not None and file.is_file() else b""


def recorded(out: Path | None, before: bytes, total: int, rest: str) -> str:
    """Return what is kept, to be said by :func:`oled_sim.cli.stopping.keeping`.

    Args:
        out: where it was recorded, None for nowhere. before: :func:`contents` at the start.
        total: requests wanted.
        rest: what to add where requests were recorded.
    """
    if out is None or not contents(out):
        return "nothing was recorded"
    if contents(out) == before:
        return f"no request was finished, {out} is as it was"
    done = len(load_manifest(out).requests)
    return f"{done} of {total} requests are in {out}{rest}"
