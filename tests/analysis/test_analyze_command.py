"""`oled-sim analyze` from the outside."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from commands import oled_sim, oled_sim_process

from oled_sim.analysis import analyze_traces
from oled_sim.analysis.output import FIGURES, TABLES
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace import open_trace
from oled_sim.trace.schema import SIGNALS

GEOMETRY = RoutingGeometry((1, 2, 5), 12, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("analyze")
    for name, signals in (("alpha", SIGNALS), ("beta", ("ids",))):
        requests = [
            random_request(rng, GEOMETRY, request=i, passes=20, signals=signals) for i in range(2)
        ]
        write_trace(folder / name, requests, GEOMETRY, signals=signals)
    return folder


@pytest.fixture(scope="module")
def written(folder):
    """One run over both traces with everything written."""
    out = folder / "out"
    result = oled_sim("analyze", folder / "alpha", folder / "beta", "--out", out, "--plots")
    assert (result.returncode, result.stderr) == (0, "")
    return out, result.stdout


def test_tables_for_people(written):
    for text in (
        "alpha (synthetic)",
        "beta (synthetic)",
        "3 × 12",
        "Beside the paper",
        "≈8×",
        "85–90 %",
        "> 65 %",
        "≤ 98 %",
        "≈60      ≈90",
        "b=4",
        "gap 8",
        "LRU hits by C / E",
        "just accepted",
        "beta has no hidden-state cosines",
    ):
        assert text in written[1], text


def test_one_trace_is_shown_layer_by_layer(folder):
    result = oled_sim("analyze", folder / "alpha")
    assert result.returncode == 0
    assert "Layers: activated in denoise passes" in result.stdout
    assert "█" in result.stdout


def test_files_hold_the_tables_and_pictures(written, folder):
    out, _ = written
    names = {f"{name}.parquet" for name in TABLES} | {f"{name}.png" for name in FIGURES}
    assert {file.name for file in out.iterdir()} == names
    traces = {name: open_trace(folder / name) for name in ("alpha", "beta")}
    for name, table in analyze_traces(traces).items():
        pd.testing.assert_frame_equal(
            pd.read_parquet(out / f"{name}.parquet"), table, check_dtype=False
        )
    for name in FIGURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_same_files_again(written, folder, tmp_path):
    out, _ = written
    again = tmp_path / "new" / "folder"
    arguments = (folder / "alpha", folder / "beta", "--out", again, "--plots")
    result = oled_sim_process("analyze", *arguments)
    assert (result.returncode, result.stdout) == (0, written[1].replace(str(out), str(again)))
    for file in out.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_json_for_programs(folder):
    result = oled_sim("analyze", folder / "alpha", folder / "beta", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    tables = {k: pd.DataFrame(v) for k, v in json.loads(result.stdout)["tables"].items()}
    assert tuple(tables) == TABLES
    expected = analyze_traces({name: open_trace(folder / name) for name in ("alpha", "beta")})
    paper = tables["paper"].set_index(["trace", "key"])["value"].astype(float)
    mine = expected["paper"].set_index(["trace", "key"])["value"]
    pd.testing.assert_series_equal(paper, mine)
    assert None in json.loads(result.stdout)["tables"]["reuse_distance"]["distance"]


def test_the_comparison_with_the_paper_alone(folder):
    table = oled_sim("analyze", folder / "alpha", folder / "beta", "--paper")
    assert (table.returncode, table.stderr) == (0, "")
    assert table.stdout.startswith("Beside the paper\n")
    assert "LRU hits" not in table.stdout
    assert "gap 8" not in table.stdout
    page = oled_sim("analyze", folder / "alpha", folder / "beta", "--markdown")
    assert (page.returncode, page.stderr) == (0, "")
    rows = [line.split(" | ") for line in page.stdout.splitlines()]
    assert {len(row) for row in rows} == {6}
    assert rows[0][4:] == ["alpha (synthetic)", "beta (synthetic) |"]
    found = json.loads(oled_sim("analyze", folder / "alpha", "--paper", "--json").stdout)["tables"]
    assert list(found) == ["traces", "paper"]
    assert len(rows) == 2 + len(found["paper"]["key"])
    assert found["paper"]["paper_flash"][:2] == [None, None]


def test_nothing_is_overwritten_unasked(folder, tmp_path):
    out = tmp_path / "out"
    assert oled_sim("analyze", folder / "alpha", "--out", out, "--plots").returncode == 0
    (out / "mine.txt").write_text("keep")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    refused = oled_sim("analyze", folder / "beta", "--out", out)
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: ")
    assert "--force" in refused.stderr
    assert refused.stdout == ""
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    forced = oled_sim("analyze", folder / "beta", "--out", out, "--force")
    assert forced.returncode == 0
    # Neither pictures nor tables of the other trace are left, and no file of the user's is lost.
    left = {file.name for file in out.iterdir()}
    assert not [name for name in left if name.endswith(".png") or name.startswith("confidence")]
    assert (out / "mine.txt").read_text() == "keep"
    assert set(pd.read_parquet(out / "paper.parquet")["trace"]) == {"beta"}


def test_one_sentence_for_every_mistake(folder, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for arguments, code, words in (
        ([folder / "nowhere"], 2, "no trace"),
        ([folder / "alpha", "--plots"], 2, "--out DIR"),
        ([folder / "alpha", "--markdown", "--json"], 2, "give one of them"),
        ([folder / "alpha", folder / "alpha"], 2, "given twice"),
        ([folder / "alpha", "--out", file], 2, "is a file"),
        ([], 2, "TRACE..."),
        ([folder / "alpha", "--requests", "0"], 2, "0 is not in the range"),
    ):
        result = oled_sim("analyze", *arguments)
        assert result.returncode == code, arguments
        assert words in result.stderr
        assert "Traceback" not in result.stderr


def test_a_damaged_trace_leaves_no_output(folder, tmp_path):
    import shutil

    damaged = tmp_path / "damaged"
    shutil.copytree(folder / "alpha", damaged)
    (damaged / "routing" / "00001.parquet").unlink()
    result = oled_sim("analyze", damaged, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert "00001.parquet" in result.stderr
    assert not (tmp_path / "out").exists()


def test_traces_of_one_name_are_told_apart(folder, tmp_path):
    import shutil

    other = tmp_path / "alpha"
    shutil.copytree(folder / "alpha", other)
    result = oled_sim("analyze", folder / "alpha", other, "--requests", 1, "--json")
    traces = json.loads(result.stdout)["tables"]["traces"]
    assert traces["trace"] == [str(folder / "alpha"), str(other)]
    assert traces["requests"] == [1, 1]


def test_cold_forgets_between_requests(folder):
    def first_touches(*flags):
        result = oled_sim("analyze", folder / "alpha", "--json", *flags)
        return pd.DataFrame(json.loads(result.stdout)["tables"]["lru_hits"])["first_touches"].sum()

    assert first_touches("--cold") > first_touches()


def test_help_imports_nothing_heavy():
    code = (
        "import sys, oled_sim.cli.analyze\n"
        "heavy = {'pandas', 'matplotlib', 'numba', 'pyarrow', 'torch', 'numpy'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    shown = oled_sim_process("analyze", "--help")
    assert shown.returncode == 0
    assert "Examples:" in shown.stdout
