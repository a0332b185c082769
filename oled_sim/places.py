"""What is in the way where a file or a folder is to be."""

from __future__ import annotations

import os
from pathlib import Path

from oled_sim.errors import UsageError


def require_place(path: Path, what: str, *, folder: bool = False) -> None:
    """Refuse a place that holds something which what is to be there cannot replace.

    Args:
        path: of a file or a folder that is there or will be. what: to call it.
        folder: whether it is a folder. A file takes the place of all but a folder.

    Raises:
        UsageError: says what is in the way.
    """
    if path.is_dir() != folder and os.path.lexists(path):
        raise UsageError(
            f"{path} is {kind_of(path)} in the place of {what}: remove it, or give another folder"
        )


def kind_of(path: Path) -> str:
    """Return what to call something that is at a path."""
    if path.is_dir():
        return "a folder"
    return "a file" if path.exists() else "a symbolic link that leads nowhere"
