"""Digests of source code: what was measured by other code is measured again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

RESULTS_DEPEND_ON = (
    "analysis", "bounds", "costs", "engine", "synthesis", "trace",
    "comparison.py", "contenders.py", "geometry.py", "policy.py", "run_inputs.py", "sweep.py",
    "experiment/grid.py",
)  # fmt: skip
"""Folders and files of the core whose code decides what points come to; times are simulated."""


@cache
def digest(parts: Sequence[str]) -> str:
    """Return the SHA-256 of the Python and TOML sources in folders or files of ``oled_sim``."""
    return digest_of([Path(str(files("oled_sim"))) / part for part in parts])


@cache
def code_digest() -> str:
    """Return the SHA-256 of the core's sources that results depend on, and of all policies."""
    policies = digest_of([Path(str(files("oled_sim.policies")))])
    return hashlib.sha256((digest(RESULTS_DEPEND_ON) + policies).encode()).hexdigest()


def digest_of(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of all Python and TOML files in ``paths``, with their names."""
    found = hashlib.sha256()
    for path in paths:
        inside = sorted(f for f in path.rglob("*") if f.suffix in (".py", ".toml"))
        for file in inside if path.is_dir() else [path]:
            content = file.read_bytes()
            name = file.relative_to(path.parent).as_posix()
            found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()
