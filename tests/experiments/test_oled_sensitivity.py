"""The sensitivity table, and that docs/oled-sensitivity.md shows what the script finds."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from oled_sim.experiments._tables import TRACES, tidy
from oled_sim.experiments.oled_sensitivity import CONFIDENCE, VARIATIONS, main, markdown, measure

PAGE = (Path(__file__).parents[2] / "docs" / "oled-sensitivity.md").read_text(encoding="utf-8")


def tables(text):
    """Return cells by trace, row and cache, of the Markdown that the script writes."""
    found, trace, caches = {}, None, []
    for line in text.splitlines():
        if line.startswith("**nano"):
            trace = line.split("**")[1]
        elif line.startswith("| |"):
            caches = [int(cell.removeprefix(" C = ")) for cell in line.split("|")[2:-1]]
        elif line.startswith("| `"):
            name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
            for cache, cell in zip(caches, cells, strict=True):
                found[trace, name, cache] = cell
    return found


def test_page_shows_every_variation():
    names = ["`oled`", *(f"`{v}`" for v in VARIATIONS), *(f"`confidence={c}`" for c in CONFIDENCE)]
    names = [name + r" \*" * (name == "`confidence=current`") for name in names]
    expected = [(trace, name, c) for trace in TRACES for name in names for c in (8, 16, 40, 80)]
    assert list(tables(PAGE)) == expected


def test_page_shows_what_is_found():
    few = measure(["nano-humaneval"], ["16,80"], ["slack=0.5", "dispatch=load"], ["current"])
    found = tables(markdown(few))
    assert len(found) == 8
    assert found == {key: tables(PAGE)[key] for key in found}


def test_each_variation_is_beside_the_defaults_with_its_cache():
    found = measure(["nano-gsm8k"], ["8", "40"], ["swaps=0"], ["end"], requests=3)
    rows = tidy(found).to_pylist()
    assert [(r["cache"], r["policy"]) for r in rows] == [
        (8, "oled"), (8, "swaps=0"), (8, "confidence=end"),
        (40, "oled"), (40, "swaps=0"), (40, "confidence=end"),
    ]  # fmt: skip
    for default, *others in (rows[:3], rows[3:]):
        assert default["tpot_ratio"] == 1
        for row in others:
            assert row["tpot_ratio"] == pytest.approx(row["tpot_us"] / default["tpot_us"])


def test_from_the_command_line(tmp_path):
    out = tmp_path / "table.csv"
    options = ["--trace", "nano-gsm8k", "--cache", "16", "--requests", "3", "--json"]
    first = CliRunner().invoke(main, [*options, "--out", str(out)])
    assert first.exit_code == 0, first.output
    document = json.loads(first.stdout)
    with out.open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert [r["policy"] for r in written] == [r["policy"] for r in document["rows"]]
    assert len(written) == 1 + len(VARIATIONS) + len(CONFIDENCE)
    again = CliRunner().invoke(main, [*options, "--out", str(out)])
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert "exists" in again.stderr


def test_unknown_trace_is_one_sentence():
    done = CliRunner().invoke(main, ["--trace", "no-such-trace"])
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
