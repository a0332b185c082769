"""The lines of one request of a table as routes: k experts side by side, tokens and passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .cleaning import PADDING, Cleaning
from .recorded import TOKEN_DTYPES, Recorded
from .table_columns import TableColumns

Columns = dict[str, NDArray[Any]]
"""Columns by name, with ``line``, the number of each line."""

Refuse = Callable[[int, str], NoReturn]
"""Raises the complaint about a line."""

PASS_FACTS = ("kind", "block", "context", "time_us")


@dataclass(frozen=True)
class TableRows:
    """Routes of one request in the order of the file.

    ``step``, ``position``, ``layer``: int32 [n]. ``line``: int64 [n]. ``experts``: int32 [n, k].
    ``gates``: float32 [n, k] or None. ``about``: see :class:`Recorded`, but [n]. ``refuse``: raises
    the complaint about a line.
    """

    step: NDArray[Any]
    position: NDArray[Any]
    layer: NDArray[Any]
    line: NDArray[np.int64]
    experts: NDArray[Any]
    gates: NDArray[Any] | None
    about: dict[str, NDArray[Any]]
    refuse: Refuse

    def recorded(self, number: int, source: Path) -> Recorded:
        """Return the request.

        Raises:
            TraceError: lines of one token, or tokens of one pass, contradict each other.
        """
        wide = int(self.position.max()) + 1
        low = int(self.step.min())
        key = (self.step.astype(np.int64) - low) * wide + self.position
        keys, first, token = _distinct(key)
        about = {name: values[first] for name, values in self.about.items()}
        for name, values in self.about.items():
            self._check_agreement(values, about[name][token], name, "token")
        step = keys // wide + low
        start = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
        owner = np.repeat(start, np.diff(start, append=len(step)))
        for name in set(PASS_FACTS) & set(about):
            self._check_agreement(self.about[name], about[name][owner][token], name, "pass")
        return Recorded(
            number=number,
            step=step,
            position=keys % wide,
            token=token,
            layer=self.layer.astype(np.int32, copy=False),
            experts=self.experts,
            gates=self.gates,
            place=self.line,
            source=source,
            where=lambda line, layer: f"line {line}",
            about=about,
        )

    def _check_agreement(
        self, values: NDArray[Any], expected: NDArray[Any], name: str, of: str
    ) -> None:
        wrong = values != expected
        if values.dtype.kind == "f":
            wrong &= ~(np.isnan(values) & np.isnan(expected))
        if wrong.any():
            row = int(np.argmax(wrong))
            self.refuse(
                int(self.line[row]),
                f"{name} is {values[row]}, and {expected[row]} in another line of the same {of}",
            )


def _distinct(
    key: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct values in order, where each is first, and the place of every value."""
    step = np.diff(key, prepend=key[0] - 1)
    if (step < 0).any():
        return np.unique(key, return_index=True, return_inverse=True)
    first = np.flatnonzero(step)
    return key[first], first, np.cumsum(step != 0) - 1


def recorded_rows(
    columns: Columns, table: TableColumns, refuse: Refuse, top_k: int, cleaning: Cleaning
) -> TableRows | None:
    """Return the routes of a request, None if it holds nothing but padding.

    Args:
        columns: of the request's lines.
        table: which column means what.
        refuse: raises the complaint about a line.
        top_k: experts per token of earlier requests, 0 if there were none.
        cleaning: counts padding.

    Raises:
        TraceError: by ``refuse``: a negative number, or a token with more or fewer than k experts.
    """
    if table.long:
        columns, k = _one_line_per_expert(columns, table, refuse, top_k, cleaning)
        if k == 0:
            return None
    else:
        k = len(table.roles["expert"])
    experts = _side_by_side(columns, table.roles["expert"], k)
    gated = "gate" in table.roles
    gates = _side_by_side(columns, table.roles["gate"], k) if gated else None
    real = ~(experts == PADDING).all(axis=1)
    cleaning.padding += int(np.count_nonzero(~real))
    if not real.any():
        return None
    kept: Any = slice(None) if real.all() else real  # a mask would copy
    first = slice(None, None, k if table.long else 1)
    told = {
        role: columns[table.roles[role][0]][first][kept]
        for role in ("token", "layer", *TOKEN_DTYPES)
        if role in table.roles
    }
    line = columns["line"][first][kept]
    _check_ranges(told, line, refuse)
    return TableRows(
        step=columns["iteration"][first][kept],
        position=told.pop("token"),
        layer=told.pop("layer"),
        line=line,
        experts=experts[kept],
        gates=None if gates is None else gates[kept],
        about=told,
        refuse=refuse,
    )


def _check_ranges(told: Columns, line: NDArray[np.int64], refuse: Refuse) -> None:
    """Refuse what a narrow dtype would turn into something else."""
    for name in ("token", "layer"):
        wrong = told[name] < 0
        if wrong.any():
            refuse(int(line[np.argmax(wrong)]), f"the {name} is negative")
    highest = {"kind": 2, "state": 2, "accepted": 1, "edited": 1}
    for name, high in highest.items():
        values = told.get(name, np.zeros(1, np.int32))
        wrong = (values < 0) | (values > high)
        if wrong.any():
            row = int(np.argmax(wrong))
            refuse(int(line[row]), f"{name} is {values[row]}, not within 0..{high}")


def _side_by_side(columns: Columns, names: tuple[str, ...], k: int) -> NDArray[Any]:
    """Return the values of each token as [n, k], and let go of the columns they came from."""
    if len(names) == 1:
        return columns.pop(names[0]).reshape(-1, k)
    found = np.empty((len(columns["line"]), k), columns[names[0]].dtype)
    for slot, name in enumerate(names):
        found[:, slot] = columns.pop(name)
    return found


def _one_line_per_expert(
    columns: Columns, table: TableColumns, refuse: Refuse, top_k: int, cleaning: Cleaning
) -> tuple[Columns, int]:
    """Return the lines without padding, those of a token in a layer in succession, and k."""
    real = columns[table.roles["expert"][0]] != PADDING
    padding = int(np.count_nonzero(~real))
    columns = {name: values[real] for name, values in columns.items()} if padding else columns
    cleaning.padding += padding
    lines = len(columns["line"])
    if lines == 0:
        return columns, 0
    parts = ("iteration", table.roles["layer"][0], table.roles["token"][0])
    keys = [columns[name] for name in parts]
    if "slot" in table.roles or not _in_runs(keys):
        slot = columns[table.roles["slot"][0]] if "slot" in table.roles else np.arange(lines)
        columns = _gathered(columns, keys, slot)
        keys = [columns[name] for name in parts]
    start = _run_starts(keys)
    length = np.diff(start, append=lines)
    k = top_k or int(length[0])
    wrong = length != k
    if wrong.any():
        token = int(np.argmax(wrong))
        refuse(
            int(columns["line"][start[token]]),
            f"the token has {length[token]} experts in this layer, others have {k}",
        )
    return columns, k


def _run_starts(keys: list[NDArray[Any]]) -> NDArray[np.int64]:
    new = np.ones(len(keys[0]), np.bool_)
    new[1:] = False
    for values in keys:
        new[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(new)


def _in_runs(keys: list[NDArray[Any]]) -> bool:
    """Return whether lines of one token in one layer follow each other."""
    start = _run_starts(keys)
    iteration, layer, token = (values[start] for values in keys)
    if _ascending(iteration, layer, token) or _ascending(iteration, token, layer):
        return True
    return len(np.unique(np.stack([iteration, layer, token]), axis=1).T) == len(start)


def _ascending(*keys: NDArray[Any]) -> bool:
    """Return whether rows ascend strictly, the first key deciding before the second."""
    ascends = np.zeros(len(keys[0]) - 1, np.bool_)
    for values in reversed(keys):
        step = np.diff(values)
        ascends = (step > 0) | ((step == 0) & ascends)
    return bool(ascends.all())


def _gathered(columns: Columns, keys: list[NDArray[Any]], slot: NDArray[Any]) -> Columns:
    """Return the lines with those of a token together, by slot, tokens as they first occur."""
    order = np.lexsort((slot, *keys[::-1]))
    start = _run_starts([values[order] for values in keys])
    first = np.minimum.reduceat(order, start)
    rank = np.repeat(first, np.diff(start, append=len(order)))
    order = order[np.argsort(rank, kind="stable")]
    return {name: values[order] for name, values in columns.items()}
