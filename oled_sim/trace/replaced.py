"""A trace on its way out: moved aside within its folder, until the new one is worth keeping."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from oled_sim.errors import TraceError, UsageError
from oled_sim.trace.manifest import MANIFEST, load_manifest
from oled_sim.trace.schema import TABLES

REPLACED = ".replaced"
"""Folder within the trace's, so that moving crosses no file system."""


def move(names: Iterable[str], source: Path, target: Path) -> None:
    """Move what is there and not yet moved."""
    for name in names:
        if (source / name).exists() and not (target / name).exists():
            (source / name).rename(target / name)


def give_back_files(old: Path, path: Path) -> None:
    """Move files of the user's out of the tables of an old trace into those of the new one."""
    for file in [f for name in TABLES for f in (old / name).glob("*") if ".parquet" not in f.name]:
        file.rename(path / file.relative_to(old))


def heal(path: Path) -> None:
    """Put right what a killed writer left: a trace aside, of which none has taken the place yet."""
    if (path / REPLACED).exists():
        drop(path) if holds_requests(path) else put_back(path)


def set_aside(path: Path) -> None:
    """Move the trace at ``path`` aside."""
    old = path / REPLACED
    old.mkdir()
    move((MANIFEST, *TABLES), path, old)


def put_back(path: Path) -> None:
    """Undo :func:`set_aside`: nothing came of the new trace, whose folders may hold leftovers."""
    old = path / REPLACED
    if old.exists():
        (path / MANIFEST).unlink(missing_ok=True)
        for name in TABLES:
            shutil.rmtree(path / name, ignore_errors=True)
        move((*TABLES, MANIFEST), old, path)
        shutil.rmtree(old)


def drop(path: Path) -> None:
    """Delete what was set aside: the new trace holds something."""
    old = path / REPLACED
    if old.exists():
        give_back_files(old, path)
        shutil.rmtree(old)


def holds_requests(path: Path) -> bool:
    """Whether there is a trace with a finished request at ``path``."""
    try:
        return bool(load_manifest(path).requests)
    except (TraceError, UsageError):
        return False
