"""Policies written down in a TOML file, for what is long or used again.

::

    [[policy]]
    name = "oled:priority"     # anything that --policy takes
    label = "careful"          # what results call it; without one, name:parameter=value,…
    psi = "square"             # every other key is a parameter
    allocate_every = 3

``--policy grid.toml`` stands for all policies of the file, ``--policy grid.toml:careful`` for one.
A ``.py`` file in ``name`` is looked for beside the TOML file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oled_sim.errors import FileError, OledSimError, UsageError
from oled_sim.policy import Policy
from oled_sim.policy_spec import build_policy, split_spec

OWN_KEYS = ("name", "label")
"""Keys of a ``[[policy]]`` table that are no parameters."""

_SPEC = re.compile(r"(?P<path>[^=]+\.toml)(?::(?P<label>.+))?")


def named_in(spec: str) -> bool:
    """Whether a specification names a TOML file."""
    return _SPEC.fullmatch(spec) is not None


def policies_of_file(spec: str) -> dict[str, Policy]:
    """Return the policies that ``path.toml`` or ``path.toml:label`` stands for, by label.

    Raises:
        UsageError: no such file or label.
        FileError: the file is wrong, and where.
    """
    match = _SPEC.fullmatch(spec)
    assert match is not None, "the caller asked `named_in`"
    path, label = Path(match["path"]), match["label"]
    found = read_policies(path)
    if label is None:
        return found
    if label not in found:
        raise UsageError(f"{path} labels no policy {label!r}: labels are {', '.join(found)}")
    return {label: found[label]}


def read_policies(path: Path) -> dict[str, Policy]:
    """Return the policies of a TOML file by label, in the order of the file.

    Raises:
        UsageError: the file cannot be read.
        FileError: a table of it describes no policy.
    """
    found: dict[str, Policy] = {}
    for i, table in enumerate(_tables(path), 1):
        try:
            label, policy = _policy(path, table)
            if label in found:
                raise FileError(f"a policy before it is called {label!r} too: give it a label")
        except OledSimError as error:
            raise FileError(f"{path}, policy {i}: {error}") from error
        found[label] = policy
    return found


def _tables(path: Path) -> list[Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no file {path}: give the path of a TOML file with policies") from None
    except OSError as error:
        raise UsageError(f"cannot read policies {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FileError(f"{path} is no TOML file: {error}") from None
    unknown = sorted(document.keys() - {"policy"})
    if unknown:
        raise FileError(f"{path} holds {unknown[0]!r}: it may hold [[policy]] tables only")
    tables = document.get("policy", [])
    if not isinstance(tables, list) or not tables:
        raise FileError(f"{path} holds no policy: write a [[policy]] table for each")
    return tables


def _policy(path: Path, table: Any) -> tuple[str, Policy]:
    if not isinstance(table, dict):
        raise FileError(f"{table!r} is no table: write [[policy]] above its keys")
    for key in OWN_KEYS:
        if key in table and not (isinstance(table[key], str) and table[key]):
            raise FileError(f"{key} = {table[key]!r} is no text")
    if "name" not in table:
        raise FileError('there is no name: write name = "lru", or another that --policy takes')
    values = {key: value for key, value in table.items() if key not in OWN_KEYS}
    policy = build_policy(_beside(path, table["name"]), values)
    return table.get("label", _label(table["name"], values)), policy


def _beside(path: Path, name: str) -> str:
    """Return a policy's name, a Python file in it looked for beside the TOML file."""
    file, extension, rest = name.partition(".py")
    return f"{path.parent / file}{extension}{rest}" if extension else name


def _label(name: str, values: Mapping[str, Any]) -> str:
    """Return the specification that means the same."""
    policy, options = split_spec(name)
    options += [f"{key}={_text(value)}" for key, value in values.items()]
    return f"{policy}:{','.join(options)}" if options else policy


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
