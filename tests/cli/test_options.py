"""Options that several commands share: lists of sizes, files, what has no effect, progress."""

import json
import os

import numpy as np
import pytest
from test_sweep import call

from oled_sim.cli import progress
from oled_sim.cli.progress import Lines
from oled_sim.engine.budget import bytes_text, parse_bytes
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace

GEOMETRY = RoutingGeometry((1, 2), 8, 2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(0)
    requests = [random_request(rng, GEOMETRY, request=i, passes=4) for i in range(3)]
    path = tmp_path_factory.mktemp("options") / "made-up"
    write_trace(path, requests, GEOMETRY)
    return str(path)


@pytest.fixture
def lru(trace):
    return ("run", "--trace", trace, "--policy", "lru")


@pytest.mark.parametrize("command", ["run", "sweep", "bounds"])
def test_cache_sizes_are_lists_and_ranges_everywhere(trace, command):
    where = ["--trace", trace] if command == "run" else [trace]
    code, out, _ = call(
        command, *where, "--policy", "lru", "--cache", "1,2", "--cache", "2:6:2",
        "--cache-bytes", "12MiB,30MB", "--cache-bytes", "12MiB", "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    found = found["runs"][0] if command == "sweep" else found
    rows = found["comparisons" if command == "bounds" else "results"]
    sizes = [(r["cache"], r["cache_bytes"]) for r in rows]
    assert sizes == [(c, None) for c in (1, 2, 4, 6)] + [(None, 12 << 20), (None, 30_000_000)]


def test_bytes_are_shown_as_they_were_asked_for(lru):
    _, out, _ = call(*lru, "--cache-bytes", "1,800MB,4000MiB,1TB")
    shown = [line.split("  ")[1:] for line in out.splitlines() if line.startswith("lru ")]
    cells = [next(cell.strip() for cell in row if cell) for row in shown]
    assert cells == ["1 B", "800 MB", "4000 MiB", "1 TB"]
    for text in (*cells, "1001 kB", "123456789 B", "3 TiB", "0 B"):
        assert bytes_text(parse_bytes(text)) == text


@pytest.mark.parametrize("option", ["--out", "--events"])
def test_a_suffix_that_promises_another_format_is_refused(lru, tmp_path, option):
    for name in ("x.txt", "x.json", *(["x.csv"] if option == "--events" else [])):
        code, out, err = call(*lru, "--cache", 2, option, tmp_path / name)
        assert (code, out) == (2, "")
        assert f"not as {name}: give a name that ends in .parquet" in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_timeline_option_needs_a_timeline(lru):
    code, out, err = call(*lru, "--cache", 2, "--timeline-requests", 2)
    assert (code, out) == (2, "") and "add --timeline FILE" in err


def test_what_has_no_effect_is_said_on_stderr(lru, trace):
    plain = call(*lru, "--cache", 2)
    assert (plain[0], plain[2]) == (0, "")
    code, _, err = call(*lru, "--cache", 2, "--batch-mode", "barrier")
    assert code == 0
    assert (
        err == "Note: --batch-mode barrier changes nothing with one request at a time (--batch)\n"
    )
    code, out, err = call(*lru, "--cache", 2, "--requests", 99)
    assert (code, out) == plain[:2]
    assert err == f"Note: --requests 99: {trace} holds 3, all are used\n"
    common = (trace, "--policy", "lru", "--cache", 2, "--batch-mode", "refill")
    assert "changes nothing" in call("sweep", *common)[2]
    assert call("sweep", *common, "--batch", "1,2")[2] == ""
    assert call(*lru, "--cache", 2, "--requests", 3)[2] == ""


def test_more_slots_than_experts_are_pointed_out_once(trace, lru):
    grid = (trace, "--policy", "lru", "--policy", "ideal", "--cache", "6:10:2", "--h2d-gbs", "9,50")
    code, _, err = call("sweep", *grid)
    assert (code, err) == (0, "Note: --cache 10 exceeds a layer's 8 experts: all are resident\n")
    said = "Note: --cache 9 and more exceed a layer's 8 experts: all are resident\n"
    assert call("sweep", *grid, "--cache", "9")[2] == said
    assert call(*lru, "--cache", "4,9,10")[2] == said
    assert call("compare", trace, "--policy", "lru", "--cache", "8,9,10")[2] == said


def test_a_file_that_cannot_be_made_is_found_before_the_run(lru, tmp_path, monkeypatch):
    monkeypatch.setattr("oled_sim.engine.runner.simulate_all", lambda *_, **__: 1 / 0)
    long = tmp_path / ("n" * 250)  # the name itself is allowed, that of the temporary file is not
    code, out, err = call(*lru, "--cache", 2, "--out", long)
    assert (code, out, err) == (2, "", f"Error: cannot write {long}: File name too long\n")
    code, _, err = call(*lru, "--cache", 2, "--force", "--out", os.devnull)
    assert code == 2 and "no ordinary file" in err


def test_a_disk_that_fills_up_takes_the_file_but_not_the_results(lru, tmp_path, monkeypatch):
    def full(table, where):
        where.write_text("half")
        raise OSError(28, f"Error writing to '{where}'")

    monkeypatch.setattr("pyarrow.csv.write_csv", full)
    path = tmp_path / "r.csv"
    code, out, err = call(*lru, "--cache", 2, "--out", path)
    assert code == 1 and "lru" in out
    assert err == f"Error: cannot write {path}: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "sweep", "bounds", "curve"])
def test_compiling_is_announced(trace, command, monkeypatch):
    monkeypatch.setattr(progress, "is_compiled", lambda _: False)
    where = ["--trace", trace] if command == "run" else [trace]
    code, _, err = call(command, *where, "--policy", "lru", "--cache", 2)
    assert (code, err) == (0, "Compiling kernels once, about half a minute\n")


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys):
    times = iter([0.0, 1.0, 11.0, 11.0, 12.0, 25.0, 25.0, 50.0, 99.0])
    lines = Lines(clock=lambda: next(times))
    # At 1 s too early; at 11 s due; at 12 s too early; at 25 s due; at 50 s only 5 % more.
    for done in (5, 15, 40, 45, 50, 100):
        lines.update(done, 100)
    assert capsys.readouterr().err == "Simulating: 15 %\nSimulating: 45 %\n"
