"""Which column of a table means what: defaults by name, and the mapping that a user gives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from oled_sim.errors import UsageError

INTEGERS = (
    "request", "iteration", "kind", "block", "context", "token", "layer", "slot", "token_id",
    "state", "accepted", "edited",
)  # fmt: skip
FLOATS = ("time_us", "confidence")
LISTS = ("expert", "gate")
"""Roles that have one column, with a line per expert, or k columns, with a line per token."""

ROLES = (*INTEGERS, *FLOATS, *LISTS)
NEEDED = ("token", "layer", "expert")

Mapped = Mapping[str, tuple[str, ...]]
"""Columns by role, as the user gives them; ``e*`` is e0, e1, ... or e_0, e_1, ... in the file."""


class TableColumns(NamedTuple):
    """Columns by role, all of them in the file. ``types``: of every column to read, by name."""

    roles: dict[str, tuple[str, ...]]
    types: dict[str, pa.DataType]

    @property
    def long(self) -> bool:
        """Whether a line is one expert of a token, not a whole token."""
        return len(self.roles["expert"]) == 1 and self.roles["expert"][0] != "expert_0"


def parse_mapping(text: str) -> Mapped:
    """Return what ``--columns`` says.

    Args:
        text: ``token=tok,layer=l,expert=e0/e1,gate=w*``.

    Raises:
        UsageError: no such role, or not of this form.
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        role, equals, names = part.strip().partition("=")
        columns = tuple(name.strip() for name in names.split("/"))
        if not equals or not all(columns):
            raise UsageError(f"--columns holds {part!r}: give pairs such as token=tok,layer=l")
        if role not in ROLES:
            raise UsageError(f"--columns maps {role!r}: known are {', '.join(ROLES)}")
        if role in found:
            raise UsageError(f"--columns maps {role!r} twice: name several columns as in e0/e1")
        if len(columns) > 1 and role not in LISTS:
            raise UsageError(f"--columns maps {role!r} to {len(columns)} columns: give one")
        found[role] = columns
    return found


def find_columns(names: Sequence[str], mapped: Mapped) -> TableColumns | str:
    """Return the columns of a file, or what is wrong with them.

    Args:
        names: of all columns, in the order of the file.
        mapped: what the user said; other roles are found by their own names.
    """
    roles = {}
    for role in ROLES:
        wanted = mapped.get(role) or _default(role, names)
        columns = tuple(c for name in wanted for c in _expand(name, names))
        missing = [c for c in columns if c not in names]
        if role in mapped and (missing or not columns):
            return f"there is no column {(*missing, *wanted)[0]!r} for {role!r}"
        if columns and not missing:
            roles[role] = columns
    if problem := _problem(names, roles):
        return problem
    types: dict[str, pa.DataType] = {}
    for role, columns in roles.items():
        floats = role in FLOATS or role == "gate"
        types.update(dict.fromkeys(columns, pa.float64() if floats else pa.int32()))
    return TableColumns(roles, types)


def _problem(names: Sequence[str], roles: Mapping[str, tuple[str, ...]]) -> str:
    for role in NEEDED:
        if role not in roles:
            return (
                f"no column is called {role!r}, the columns are {', '.join(names)}: say which it"
                f" is, as in --columns {role}=NAME"
            )
    used = [c for columns in roles.values() for c in columns]
    for name in used:
        if names.count(name) > 1:
            return f"the column {name!r} is there {names.count(name)} times"
        if used.count(name) > 1:
            return f"the column {name!r} is to mean several things"
    if "gate" in roles and len(roles["gate"]) != len(roles["expert"]):
        return f"{len(roles['gate'])} columns of gates for {len(roles['expert'])} of experts"
    return ""


def _default(role: str, names: Sequence[str]) -> tuple[str, ...]:
    return (f"{role}_*",) if role in LISTS and role not in names else (role,)


def _expand(name: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that ``e*`` stands for, by their numbers."""
    if not name.endswith("*"):
        return (name,)
    pattern = re.compile(re.escape(name[:-1]) + r"_?(\d+)")
    found = [(int(match[1]), n) for n in names if (match := pattern.fullmatch(n))]
    return tuple(column for _, column in sorted(found))
