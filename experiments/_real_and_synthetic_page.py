"""The tables of docs/real-and-synthetic.md, and the page that holds them between two marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from oled_sim.cli.paper_table import markdown_beside_paper
from oled_sim.engine.output import NewFile
from oled_sim.errors import UsageError

from ._miss_curves import Apart, farthest, rates

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


class Compared(NamedTuple):
    """What was found of a data set.

    ``fitted``, ``sized``: tables of ``analyze_traces``, of the real trace and the synthetic ones of
    its size, and of those of the paper's sizes. ``curves``: rows of ``curves_of``.
    """

    name: str
    fitted: dict[str, pd.DataFrame]
    sized: dict[str, pd.DataFrame]
    curves: pd.DataFrame


def markdown(found: Sequence[Compared]) -> str:
    """Return everything that stands between the marks."""
    parts = ["## Largest differences of the miss curves", _differences_table(found)]
    for one in found:
        parts += [f"## {one.name}", f"{_requests(one)} At the size of the trace:"]
        parts += [markdown_beside_paper(one.fitted)]
        if len(one.sized):
            parts += ["At the paper's sizes, relations by name:", markdown_beside_paper(one.sized)]
        parts += ["Experts missed, % of those activated, by experts per layer:"]
        parts += [_curves_table(one.curves)]
    return "\n\n".join(parts)


def _requests(one: Compared) -> str:
    traces = one.fitted["traces"]
    numbers = [f"{r.trace} ({r.origin}) {r.requests}" for r in traces.itertuples()]
    return f"Requests: {', '.join(numbers)}."


def differences(curves: pd.DataFrame) -> Iterator[tuple[str, str, Apart]]:
    """Yield policy, synthetic trace, and where its curve is farthest from the real one."""
    for policy, rows in curves.groupby("policy", sort=False):
        real = rows[rows["origin"] == "real"]
        for trace, made in rows[rows["origin"] == "synthetic"].groupby("trace", sort=False):
            yield str(policy), str(trace), farthest(real, made)


def _differences_table(found: Sequence[Compared]) -> str:
    cells = {
        (one.name, trace, policy): _apart(apart)
        for one in found
        for policy, trace, apart in differences(one.curves)
    }
    policies = list(dict.fromkeys(policy for _, _, policy in cells))
    names = ["data set", "relation", *(f"`{policy}`" for policy in policies)]
    rows = [
        [name, trace, *(cells.get((name, trace, policy), "") for policy in policies)]
        for name, trace in dict.fromkeys(key[:2] for key in cells)
    ]
    return _table(names, rows)


def _apart(apart: Apart) -> str:
    value, low, high = (f"{100 * v:+.1f}" for v in apart[1:])
    return f"{value} at C = {apart.cache} ({low} to {high})"


def _curves_table(curves: pd.DataFrame) -> str:
    caches = list(dict.fromkeys(curves["cache"]))
    rate = rates(curves, ["policy", "trace", "origin", "cache"])
    lines = dict.fromkeys(zip(curves["policy"], curves["trace"], curves["origin"], strict=True))
    rows = [
        [f"`{policy}`, {trace} ({origin})"]
        + [f"{100 * rate[policy, trace, origin, cache]:.1f}" for cache in caches]
        for policy, trace, origin in sorted(lines, key=lambda line: _first(curves, line[0]))
    ]
    return _table(["C", *map(str, caches)], rows)


def _first(curves: pd.DataFrame, policy: str) -> Any:
    """Return where a policy stands among all, for a stable sort."""
    return list(curves["policy"].unique()).index(policy)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check_page(path: Path) -> str:
    """Return the text of a page that tables can be put into.

    Raises:
        UsageError: it cannot be read, or does not hold each mark once, in order.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the page {path}: {error}") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(
            f"{path} has no place for the tables: put the lines {BEGIN} and {END} into it"
        )
    return text


def replace_tables(path: Path, tables: str) -> None:
    """Put ``tables`` between the marks of a page; the rest of it stays.

    Raises:
        UsageError: as :func:`check_page`, or it cannot be written.
    """
    text = check_page(path)
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    with NewFile(path) as file:
        page = f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"
        file.temporary.write_text(page, encoding="utf-8")
