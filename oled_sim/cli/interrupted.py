"""What to say when Ctrl-C ends a recording."""

from __future__ import annotations

from pathlib import Path

from oled_sim.trace.manifest import MANIFEST, load_manifest


def contents(out: Path | None) -> bytes:
    """Return what tells whether anything was recorded at ``out``: a trace's manifest."""
    file = None if out is None else out / MANIFEST
    return file.read_bytes() if file is not None and file.is_file() else b""


def interrupted(out: Path | None, before: bytes, total: int, rest: str) -> str:
    """Return a sentence about a recording that was stopped.

    Args:
        out: where it was recorded, None for nowhere. before: :func:`contents` at the start.
        total: requests wanted.
        rest: what to add where requests were recorded.
    """
    if out is None or not contents(out):
        return "interrupted, and nothing was recorded"
    if contents(out) == before:
        return f"interrupted before a request was finished: {out} is as it was"
    done = len(load_manifest(out).requests)
    return f"interrupted with {done} of {total} requests in {out}{rest}"
