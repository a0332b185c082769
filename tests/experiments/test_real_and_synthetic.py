"""Real beside synthetic: differences by hand, the page, and that it shows what is found."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from oled_sim.errors import UsageError
from oled_sim.experiments import real_and_synthetic
from oled_sim.experiments._miss_curves import farthest, miss_counts, rates
from oled_sim.experiments._real_and_synthetic_page import (
    BEGIN,
    END,
    differences,
    markdown,
    replace_tables,
)
from oled_sim.experiments.real_and_synthetic import CACHES, DATA_SETS, SIZES, Compared, measure
from oled_sim.synthesis.parameters import COUPLINGS
from oled_sim.trace import open_trace

PAGE = (Path(__file__).parents[2] / "docs" / "real-and-synthetic.md").read_text(encoding="utf-8")


def counts(*rows, policy="lru"):
    """Return rows of cache, request, misses, activations."""
    table = pd.DataFrame(rows, columns=["cache", "request", "misses", "activations"])
    return table.assign(policy=policy)


def tables(text):
    """Return {(section, row, column): cell} of a page; rows are named by their first two cells."""
    found, section, head = {}, None, None
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells
        elif set(cells) != {"---"}:
            name = cells[0] if head[0] == "C" else tuple(cells[:2])
            row = zip(head, cells, strict=True)
            found |= {(section, name, column): cell for column, cell in row}
    return found


# Two cache sizes and requests: real 3/10 and 1/10 missed, synthetic 4/20 and 4/20.
REAL = counts((10, 0, 1, 4), (10, 1, 2, 6), (40, 0, 1, 4), (40, 1, 0, 6))
MADE = counts((10, 0, 2, 10), (10, 1, 2, 10), (40, 0, 2, 10), (40, 1, 2, 10))


def test_rates_pool_requests():
    assert rates(REAL, ["cache"]).to_dict() == {10: 0.3, 40: 0.1}


def test_where_two_curves_are_farthest_apart():
    made = counts((10, 0, 8, 10), (10, 1, 8, 10), (40, 0, 9, 10), (40, 1, 9, 10))
    found = farthest(REAL, made)
    # 0.8 - 0.3 at 10 slots, 0.9 - 0.1 at 40: drawn again, the real rate there is 0, 0.1 or 0.25.
    assert found.cache == 40
    assert found.difference == pytest.approx(0.8)
    assert (found.low, found.high) == (pytest.approx(0.65), pytest.approx(0.9))


def test_a_difference_has_its_sign():
    found = farthest(REAL, counts((10, 0, 0, 5), (10, 1, 0, 5), (40, 0, 0, 5), (40, 1, 0, 5)))
    assert (found.cache, found.difference) == (10, pytest.approx(-0.3))


def test_one_request_has_no_interval():
    found = farthest(REAL[REAL["request"] == 0], MADE)
    assert np.isnan(found.low)


def test_tables_by_hand():
    curves = pd.concat(
        [REAL.assign(trace="mini", origin="real"), MADE.assign(trace="none", origin="synthetic")]
    )
    ((policy, trace, apart),) = differences(curves)
    # -0.1 at 10 slots and +0.1 at 40: of equals the first, but for the last bits.
    assert (policy, trace, abs(apart.difference)) == ("lru", "none", pytest.approx(0.1))
    found = tables(markdown([Compared("gsm8k", _bare("mini", "none"), {}, curves)]))
    assert found["gsm8k", "`lru`, mini (real)", "10"] == "30.0"
    assert found["gsm8k", "`lru`, none (synthetic)", "40"] == "20.0"
    summary = found["Largest differences of the miss curves", ("gsm8k", "none"), "`lru`"]
    assert summary.startswith(("-10.0 at C = 10 (", "+10.0 at C = 40 ("))


def _bare(*names):
    """Return tables of traces that were read but hold nothing to compare."""
    traces = pd.DataFrame({"trace": names, "origin": "real", "signals": "ids", "requests": 2})
    columns = ["key", "source", "quantity", "paper_mini", "paper_flash", "style", "value"]
    paper = pd.DataFrame(columns=["trace", "origin", *columns])
    return {"traces": traces, "paper": paper}


def test_the_rest_of_a_page_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{BEGIN}\nold\n{END}\nend\n", encoding="utf-8")
    replace_tables(page, "new")
    assert page.read_text(encoding="utf-8") == f"# Title\n{BEGIN}\n\nnew\n\n{END}\nend\n"


@pytest.mark.parametrize("text", ["no marks", f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_a_place_is_refused(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="no place for the tables"):
        replace_tables(page, "new")
    assert page.read_text(encoding="utf-8") == text


def test_misses_are_those_of_decode_passes():
    trace = open_trace("nano-humaneval")
    found = miss_counts(trace, ["lru", "belady"], [4, 16], requests=3)
    assert found["request"].unique().tolist() == [1, 2]
    assert (found.groupby("request")["activations"].nunique() == 1).all()
    rate = rates(found, ["policy", "cache"])
    for cache in (4, 16):
        assert 0 < rate["belady", cache] <= rate["lru", cache] < 1


def test_page_has_every_curve():
    found = {key for key in tables(PAGE) if not isinstance(key[1], tuple) and key[2] != "C"}
    expected = set()
    for name in DATA_SETS:
        real = f"mini-{name} (real)"
        made = [f"{coupling} (synthetic)" for coupling in COUPLINGS]
        rows = [f"`{policy}`, {trace}" for policy in ("lru", "oled") for trace in (real, *made)]
        rows += [f"`belady`, {trace}" for trace in (real, made[0])]
        expected |= {(name, row, str(cache)) for row in rows for cache in CACHES}
    assert found == expected


@pytest.mark.slow
def test_page_shows_what_is_found():
    few = measure(["humaneval"], couplings=COUPLINGS[:1], sizes=(), policies=("lru",), caches=(60,))
    found = {key: cell for key, cell in tables(markdown(few)).items() if key[0] == "humaneval"}
    assert ("humaneval", "`belady`, measured (synthetic)", "60") in found
    assert ("humaneval", ("7, §3.3", "experts kept, next block"), "measured (synthetic)") in found
    page = tables(PAGE)
    assert found == {key: page[key] for key in found}


def test_page_says_that_cosines_are_not_generated():
    row = ("7, §3.3", "hidden cosine, next pass")
    for name in DATA_SETS:
        assert tables(PAGE)[name, row, "measured (synthetic)"] == "not generated"
        for size in SIZES:
            label = f"{size.removeprefix('llada2.0-')}, positive (synthetic)"
            assert tables(PAGE)[name, row, label] == "not generated"


@pytest.mark.slow
def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(real_and_synthetic, "SIZE_TOKENS", 32)
    monkeypatch.setattr(real_and_synthetic, "CACHES", (20, 60))
    page, plot = tmp_path / "page.md", tmp_path / "curves.png"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    options = ["--data-set", "science", "--requests", "2", "--jobs", "1", "--json"]
    files = ["--page", str(page), "--plot", str(plot)]
    first = CliRunner().invoke(real_and_synthetic.main, [*options, *files])
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)["science"]
    assert {row["trace"] for row in found["curves"]} == {"mini-science", *COUPLINGS}
    assert len(found["differences"]) == 2 * len(COUPLINGS) + 1
    assert all(row["low"] is None for row in found["differences"])  # one request counts
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert ("science", "`oled`, none (synthetic)", "60") in tables(page.read_text(encoding="utf-8"))
    again = CliRunner().invoke(real_and_synthetic.main, [*options, *files])
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert "exists" in again.stderr
