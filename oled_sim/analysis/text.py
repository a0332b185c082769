"""The analysis as tables for people: rows per trace, the paper's number beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from oled_sim.analysis.tally import pooled
from oled_sim.trace.reader import RECORDING_FLAGS

LRU_PERCENT = (5, 10, 15, 25, 40, 50, 75)
"""Cache sizes shown, in percent of a layer's experts; 15 and 40 % are the paper's 40 and 100."""

STATE_LABELS = {
    "masked": "still masked",
    "accepted": "just accepted",
    "decoded": "decoded",
    "edited": "just edited",
    "all": "all",
}

WIDTH_WITHOUT_TERMINAL = 120

_BAR_WIDTH = 16


def print_analysis(tables: dict[str, pd.DataFrame]) -> None:
    """Print the tables of :func:`~oled_sim.analysis.report.side_by_side` in short.

    The table ``traces`` holds one :func:`~oled_sim.analysis.report.describe` per trace.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    for title, table in _printed(tables):
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(table)
        console.print()
    for note in notes(tables["traces"]):
        console.print(Text(note, style="dim"), soft_wrap=True)


def _printed(tables: dict[str, pd.DataFrame]) -> Iterator[tuple[str, Table]]:
    """Yield title and table; a title is a line of its own, as a narrow table would fold it."""
    yield "Traces", _traces_table(tables["traces"])
    yield (
        "Activated experts of the first b tokens of a block, and against one token",
        _block_table(tables["block_footprint"]),
    )
    yield (
        "Likeness by iteration gap (%), within blocks and across their boundaries",
        _locality_table(tables["locality"]),
    )
    if len(tables["traces"]) == 1:
        yield (
            "Layers: activated in denoise passes, kept by the next pass, skew",
            _layers_table(tables),
        )
    else:
        yield "Activated experts |A| / E by layer (%)", _ratio_table(tables["activation_ratio"])
    yield (
        "Activations of decode passes (%): in the pass before, never before, LRU hits by C / E",
        _reuse_table(tables),
    )
    yield (
        "Tokens on a layer's most popular experts (%), effective experts; means over layers",
        _popularity_table(tables),
    )
    if "confidence_correlation" in tables:
        yield (
            "Confidence against route stability, by what happened to the token",
            _stability_table(tables["confidence_correlation"]),
        )


def notes(traces: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence for each figure that a trace has not the signals for."""
    for trace, signals in zip(traces["trace"], traces["signals"], strict=True):
        for figure, needed in _NEEDED.items():
            missing = [signal for signal in needed if signal not in signals.split()]
            flags = [RECORDING_FLAGS[signal] for signal in missing if signal in RECORDING_FLAGS]
            how = f" (record it with `oled-sim collect {' '.join(flags)}`)" if flags else ""
            if missing:
                yield f"{trace} has no {figure}: it holds no {' and no '.join(missing)}{how}."


_NEEDED = {
    "hidden-state cosines": ("cosines",),
    "popularity by gate mass": ("gates",),
    "confidence against route stability": ("confidence", "token_state"),
}


def _new_table(text: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table of ``text`` columns, which may fold, then ``numbers``."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in text:
        table.add_column(Text(column), overflow="fold")
    for column in numbers:
        table.add_column(Text(column), justify="right", overflow="fold")
    return table


def _names(table: pd.DataFrame) -> list[str]:
    """Return the names of the traces, marked real, synthetic or imported."""
    return [name for name, _ in _by_trace(table)]


def _by_trace(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for (trace, origin), rows in table.groupby(["trace", "origin"], sort=False):
        yield f"{trace} ({origin})", rows


def _traces_table(traces: pd.DataFrame) -> Table:
    columns = ("model", "layers × experts", "top-k", "decoding", "requests", "passes")
    table = _new_table(["trace"], columns)
    for name, rows in _by_trace(traces):
        row = rows.iloc[0]
        table.add_row(
            Text(name),
            Text(row["model"]),
            f"{row['layers']} × {row['experts']}",
            f"{row['top_k']}",
            _decoding(row),
            f"{row['requests']:,}",
            f"{row['passes']:,}",
        )
    return table


def _decoding(row: pd.Series) -> str:
    if pd.isna(row["rule"]):
        return "-"
    return f"rule {row['rule']}, block {row['block_length']}"


def _block_table(blocks: pd.DataFrame) -> Table:
    lengths = sorted(blocks["block_length"].unique())
    table = _new_table(["trace", ""], [f"b={n}" for n in lengths])
    for name, rows in _by_trace(blocks):
        for label, value in (("experts", "activated"), ("×", "footprint_ratio")):
            means = pooled(rows, ["block_length"], value, "events").set_index("block_length")
            cells = (_number(means[value].get(n), 1) for n in lengths)
            table.add_row(Text(name), label, *cells)
            name = ""
    return table


def _locality_table(locality: pd.DataFrame) -> Table:
    gaps = sorted(locality["gap"].unique())
    table = _new_table(["trace", ""], [f"gap {gap}" for gap in gaps])
    for name, rows in _by_trace(locality):
        for label, span, value, weight in _GAP_ROWS:
            chosen = rows[(rows["span"] == span) & rows[value].notna()]
            if chosen.empty:
                continue
            means = pooled(chosen, ["gap"], value, weight).set_index("gap")[value]
            cells = (_number(means.get(gap), 1, 100) for gap in gaps)
            table.add_row(Text(name), label, *cells)
            name = ""
    return table


_GAP_ROWS = (
    ("experts kept, within", "within", "overlap", "pairs"),
    ("experts kept, across", "across", "overlap", "pairs"),
    ("hidden cosine, within", "within", "cosine", "cosine_pairs"),
    ("hidden cosine, across", "across", "cosine", "cosine_pairs"),
)


def _layers_table(tables: dict[str, pd.DataFrame]) -> Table:
    """Return one row per layer of a single trace."""
    rows = _denoise(tables["activation_ratio"]).set_index("layer")
    kept = _first_gap(tables["locality"])
    skew = _top_share(tables["popularity"], 10)
    entropy = tables["entropy"].set_index("layer")
    columns = ("|A|", "5–95 %", "|A|/E %", "kept %", "on top 10 %", "effective")
    table = _new_table(["layer"], columns)
    table.add_column("|A| / E", width=_BAR_WIDTH)
    for layer, row in rows.iterrows():
        table.add_row(
            str(layer),
            _number(row["activated"], 1),
            f"{row['activated_p05']:.0f}–{row['activated_p95']:.0f}",
            _number(row["activation_ratio"], 1, 100),
            _number(kept.get(layer), 1, 100),
            _number(skew.get(layer), 1, 100),
            _number(entropy["effective_experts"].get(layer), 1),
            _bar(row["activation_ratio"]),
        )
    return table


def _bar(share: float) -> RenderableType:
    return Bar(1, 0, share, width=_BAR_WIDTH)


def _ratio_table(activation: pd.DataFrame) -> Table:
    """Return one row per layer, one column per trace."""
    rows = _denoise(activation)
    table = _new_table(["layer"], _names(rows))
    cells = rows.pivot(index="layer", columns="trace", values="activation_ratio")
    for layer, row in cells.iterrows():
        table.add_row(str(layer), *(_number(row[t], 1, 100) for t in rows["trace"].unique()))
    return table


def _denoise(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["kind"] == "denoise"]


def _first_gap(locality: pd.DataFrame) -> pd.Series:
    rows = locality[(locality["gap"] == 1) & (locality["span"] == "within")]
    return rows.set_index("layer")["overlap"]


def _top_share(popularity: pd.DataFrame, percent: int) -> pd.Series:
    rows = popularity[(popularity["weight"] == "tokens") & (popularity["top_percent"] == percent)]
    return rows.set_index("layer")["share"]


def _reuse_table(tables: dict[str, pd.DataFrame]) -> Table:
    columns = [f"C={p} %" for p in LRU_PERCENT]
    table = _new_table(["trace"], ["before", "never", *columns])
    distances = _decode(tables["reuse_distance"])
    for name, rows in _by_trace(_decode(tables["lru_hits"])):
        mine = distances[distances["trace"] == rows["trace"].iloc[0]]
        totals = rows.groupby("capacity")[["activations", "first_touches", "hits"]].sum()
        share = totals["hits"] / totals["activations"]
        capacities = [round(p * totals.index.max() / 100) for p in LRU_PERCENT]
        number, first = totals.iloc[0][["activations", "first_touches"]]
        table.add_row(
            Text(name),
            _number(_next_pass(mine) / number, 1, 100),
            _number(first / number, 1, 100),
            *(_number(share[capacity], 1, 100) for capacity in capacities),
        )
    return table


def _decode(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["phase"] == "decode"]


def _next_pass(distances: pd.DataFrame) -> int:
    """Return the activations whose expert the layer's event before activated, too."""
    rows = distances[distances["measure"] == "events"]
    return int(rows.loc[(rows["distance"] == 1).fillna(False), "activations"].sum())


def _popularity_table(tables: dict[str, pd.DataFrame]) -> Table:
    popularity, entropy = tables["popularity"], tables["entropy"]
    percents = sorted(popularity["top_percent"].unique())
    columns = [*(f"top {p} %" for p in percents), "effective", "set entropy"]
    table = _new_table(["trace"], columns)
    for name, rows in _by_trace(popularity):
        mine = entropy[entropy["trace"] == rows["trace"].iloc[0]]
        shares = (_top_share(rows, percent).mean() for percent in percents)
        table.add_row(
            Text(name),
            *(_number(share, 1, 100) for share in shares),
            _number(mine["effective_experts"].mean(), 1),
            f"{_number(mine['set_entropy_bits'].mean(), 0)} bits",
        )
    return table


def _stability_table(correlation: pd.DataFrame) -> Table:
    columns = ("transitions", "experts kept %", "correlation with confidence")
    table = _new_table(["trace", "token"], columns)
    for name, rows in _by_trace(correlation):
        for row in rows[(rows["transitions"] > 0) | (rows["state"] == "all")].to_dict("records"):
            table.add_row(
                Text(name),
                STATE_LABELS[row["state"]],
                f"{row['transitions']:,}",
                _number(row["kept"], 1, 100),
                _number(row["correlation"], 2),
            )
            name = ""
    return table


def style_value(value: float, style: str) -> str:
    """Return a value as the paper would print it; styles are those of ``Claim``."""
    if style == "times":
        return f"{_number(value, 1)}×" if value == value else "-"
    if style == "percent":
        return f"{_number(value, 1, 100)} %" if value == value else "-"
    return _number(value, 1 if style == "count" else 2)


def _number(value: float | None, digits: int, scale: float = 1) -> str:
    if value is None or value != value:
        return "-"
    return f"{round(scale * value, digits) + 0.0:,.{digits}f}"  # + 0.0: no -0.0
