"""Digests of source code: what was measured by other code is measured again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

ANALYSES = ("analysis", "bounds", "costs", "engine", "synthesis", "trace", "geometry.py")
"""Folders and files of the core whose code decides what analyses of traces come to."""

RUNS = (
    "costs", "engine", "trace", "contenders.py", "geometry.py", "policy.py", "run_inputs.py",
    "experiment/grid.py",
)  # fmt: skip
"""Those that decide what simulated runs come to, besides the policies."""


@cache
def digest(parts: tuple[str, ...]) -> str:
    """Return the SHA-256 of the Python and TOML sources in folders or files of ``oled_sim``."""
    return digest_of([Path(str(files("oled_sim"))) / part for part in parts])


@cache
def policies_digest() -> str:
    """Return the SHA-256 of the sources of all bundled policies."""
    return digest_of([Path(str(files("oled_sim.policies")))])


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
