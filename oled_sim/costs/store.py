"""Profiles as files: read, write, and those that ship with the package."""

from __future__ import annotations

import datetime
import difflib
import json
import os
import tempfile
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from oled_sim.costs.profile import Profile
from oled_sim.errors import ProfileError, UsageError
from oled_sim.geometry import CostGeometry


def bundled_profiles() -> list[str]:
    """Return the names of the profiles that ship with the package, sorted."""
    return sorted(_bundled())


def bundled_profile_for(cost: CostGeometry) -> str:
    """Return the name of the bundled measured profile for a cost geometry.

    An estimate is used only by name.

    Raises:
        UsageError: none ships for it, so that one has to be given.
    """
    found = _bundled()
    names = [n for n in sorted(found) if n.endswith(f"-{cost.name}") and _is_measured(found[n])]
    if not names:
        raise UsageError(
            f"no bundled profile is measured for geometry {cost.name!r}: give one with --profile "
            f"(bundled are {', '.join(bundled_profiles())})"
        )
    return names[0]


def load_profile(name_or_path: str | Path) -> Profile:
    """Read a profile: a bundled one by name, or any file whose name ends in ``.toml``.

    Raises:
        UsageError: no bundled profile by that name (the sentence suggests the nearest), or no file
            that can be read.
        ProfileError: the file is no TOML, or breaks the format.
    """
    name = str(name_or_path)
    if name.endswith(".toml"):
        return _read(Path(name))
    found = _bundled()
    if name in found:
        return _read(found[name])
    near = difflib.get_close_matches(name, found, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"unknown profile {name!r}: {hint}bundled are {', '.join(sorted(found))}; "
        "the path of a profile file ends in .toml"
    )


def save_profile(profile: Profile, path: Path, *, overwrite: bool = False) -> None:
    """Write a profile as TOML, atomically. The same profile gives the same bytes.

    Raises:
        UsageError: the file exists and ``overwrite`` is false.
        ProfileError: it cannot be written there.
    """
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists: give another name, or allow overwriting it")
    try:
        _replace(path, to_toml(profile).encode())
    except OSError as error:
        raise ProfileError(f"cannot write profile {path}: {error.strerror}") from error


def to_toml(profile: Profile) -> str:
    """Return the profile as TOML text, tables in the order of the format."""
    plain = partial(msgspec.to_builtins, builtin_types=(datetime.date,))
    document = plain(msgspec.convert(plain(profile), Profile))  # whole floats stay floats
    return HEADER + "\n".join(_emit(document, ())) + "\n"


HEADER = """\
# Hardware profile of oled-sim: times in microseconds, medians with 10th and 90th percentiles.
# Written by a program; docs/cost-model.md explains every table.
"""


def _bundled() -> dict[str, Traversable]:
    folder = files("oled_sim") / "profiles"
    return {
        entry.name.removesuffix(".toml"): entry
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def _is_measured(source: Traversable) -> bool:
    return _read(source).status == "measured"


def _read(source: Traversable) -> Profile:
    try:
        return msgspec.convert(tomllib.loads(source.read_bytes().decode()), Profile)
    except OSError as error:
        raise UsageError(
            f"cannot read profile {source}: {error.strerror}; give the path of a profile, or the"
            " name of a bundled one"
        ) from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"profile {source} is not a text file in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"profile {source} is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ProfileError(f"profile {source} breaks the format: {error}") from error


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _emit(table: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of one TOML table: its values, then its sub-tables, in their order."""
    values = {k: v for k, v in table.items() if not isinstance(v, dict) and v is not None}
    if path and values:
        yield f"\n[{'.'.join(path)}]"
    for key, value in values.items():
        yield f"{key} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _emit(value, (*path, key))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return _array(value)
    return repr(value)


def _array(items: list[Any] | tuple[Any, ...]) -> str:
    """Return an array on one line, or one line per row for an array of arrays."""
    if items and isinstance(items[0], list):
        return "[\n" + "".join(f"  {_value(row)},\n" for row in items) + "]"
    return "[" + ", ".join(map(_value, items)) + "]"
