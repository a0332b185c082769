"""The comparison with the paper: what stands in it, at 80 columns and as Markdown."""

import pytest
from analysis_traces import GEOMETRY, worked_request
from msgspec.structs import replace
from rich.console import Console

from oled_sim.analysis import analyze_traces
from oled_sim.analysis.paper import CLAIMS, why_missing
from oled_sim.cli.paper_table import lines, markdown_beside_paper, print_beside_paper
from oled_sim.testing.traces import random_manifest, write_trace


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The request worked by hand, as a trace that calls itself real and one that does not."""
    folder = tmp_path_factory.mktemp("paper")
    traces = {}
    for name, origin, signals in (
        ("by-hand-humaneval", "real", ("ids", "confidence", "token_state")),
        ("made", "synthetic", ("ids", "confidence", "token_state")),
        ("bare", "imported", ("ids",)),
    ):
        manifest = replace(random_manifest(GEOMETRY, signals=signals), origin=origin)
        traces[name] = write_trace(folder / name, [worked_request()], GEOMETRY, manifest=manifest)
    return analyze_traces(traces)


def cells(tables):
    return {line.quantity: line.cells for line in lines(tables)}


def test_cells_by_hand(tables):
    found = cells(tables)
    assert len(found) == len(CLAIMS)
    assert found["experts, × one token's"] == ("≈8×", "-", "1.2×", "1.2×", "1.2×")
    assert found["activated experts"] == ("≈60", "≈90", "2.5", "2.5", "2.5")
    assert found["experts kept, next pass"] == ("85–90 %", "85–90 %", "83.3 %", "83.3 %", "83.3 %")
    assert found["experts kept, next block"] == ("> 65 %", "> 65 %", "75.0 %", "75.0 %", "75.0 %")


def test_what_is_missing_says_why(tables):
    found = cells(tables)
    assert found["hidden cosine, next pass"][2:] == (
        "not recorded", "not generated", "not recorded",
    )  # fmt: skip
    assert found["correlation, just accepted"][2:] == ("0.50", "0.50", "not recorded")
    assert found["experts kept, 4 passes on"][2:] == ("-", "-", "-")
    assert why_missing("cosine", "synthetic", ["ids", "cosines"]) == "-"


def test_three_traces_fit_80_columns(tables, capsys):
    print_beside_paper(Console(width=80), tables)
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 80
    assert out[1:5] == [
        "                                                by-hand-",
        "                               paper    paper  humaneval       made      bare",
        "                                mini    flash       real  synthetic  imported",
        "Figure 4 (§3.1)",
    ]
    assert [line for line in out if line.startswith("Figure")][1:] == [
        "Figure 7 (§3.3)", "Figure 10 (§4.3, §5.2)",
    ]  # fmt: skip


def test_markdown_holds_the_same_cells(tables):
    head, rule, *rows = (
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in markdown_beside_paper(tables).splitlines()
    )
    assert head[4:] == ("by-hand-humaneval (real)", "made (synthetic)", "bare (imported)")
    assert set(rule) == {"---"}
    assert {row[1]: row[2:] for row in rows} == cells(tables)
    assert rows[0][0] == "4a, §3.1"
