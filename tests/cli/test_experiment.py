"""``oled-sim experiment`` end to end, with an experiment from a file."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from oled_sim.cli.main import main

MINE = """
from oled_sim.experiment import Experiment, RunPoint
from oled_sim.plotting.capacities import draw_gap

def points(size):
    requests = 3 if size == "quick" else 5
    return [
        RunPoint("nano-gsm8k", policy=p, cache=c, requests=requests)
        for c in (16, 40) for p in ("lru", "ideal")
    ]

MINE = Experiment("mine", "a small one", "none", points, draw_gap)
NOT_ONE = 3
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return f"{file}:MINE"


def run(capsys, *arguments):
    try:
        main(["experiment", *map(str, arguments)])
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_writes_table_manifest_and_figure(capsys, tmp_path, mine):
    out = tmp_path / "out"
    code, text, err = run(capsys, mine, "--quick", "--out", out, "--jobs", 1)
    assert code == 0, err  # a slow machine shows progress
    assert "mine" in text
    table = pd.read_parquet(out / "mine.parquet")
    assert table.groupby(["cache", "policy"], sort=False).ngroups == 4
    assert json.loads((out / "mine.manifest.json").read_text())["size"] == "quick"
    assert (out / "mine.png").read_bytes()[:4] == b"\x89PNG"


def test_a_second_run_measures_nothing(capsys, tmp_path, mine):
    arguments = [mine, "--quick", "--out", tmp_path / "out", "--jobs", 1, "--json"]
    first, second = (json.loads(run(capsys, *arguments)[1]) for _ in range(2))
    assert [f["measured"] for f in (*first, *second)] == [4, 0]


def test_a_damaged_part_is_named(capsys, tmp_path, mine):
    arguments = [mine, "--quick", "--out", tmp_path / "out", "--jobs", 1]
    run(capsys, *arguments)
    part = next((tmp_path / "out" / "parts").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    code, _, err = run(capsys, *arguments)
    assert code == 1 and part.name in err and "delete it and run again" in err
    part.unlink()
    assert run(capsys, *arguments)[0] == 0


def test_sizes_are_told_apart(capsys, tmp_path, mine):
    out = tmp_path / "out"
    run(capsys, mine, "--quick", "--out", out, "--jobs", 1)
    run(capsys, mine, "--out", out, "--jobs", 1)
    assert json.loads((out / "mine.manifest.json").read_text())["size"] == "full"


def test_lists_experiments(capsys):
    code, text, _ = run(capsys, "--list", "--json")
    assert code == 0
    assert {"fig05", "fig06", "fig12", "fig13", "fig15"} <= {e["name"] for e in json.loads(text)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no experiment to run"),
        (["fig21"], "unknown experiment 'fig21'"),
        (["fig12", "--jobs", "0"], "0 is not in the range"),
    ],
)
def test_mistakes_are_usage_errors(capsys, tmp_path, arguments, said):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert said in err


def test_a_file_must_hold_an_experiment(capsys, tmp_path, mine):
    code, _, err = run(capsys, mine.replace(":MINE", ":NOT_ONE"))
    assert code == 2
    assert "is no experiment but a int" in err


def test_a_folder_that_cannot_be_made_is_said(capsys, tmp_path, mine):
    code, _, err = run(capsys, mine, "--quick", "--out", tmp_path / "mine.py" / "out")
    assert code == 2
    assert "cannot be made" in err


@pytest.mark.slow
def test_an_interrupt_keeps_finished_points_and_leaves_no_process(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "oled_sim", "experiment", "fig12", "--quick", "--jobs", "2"]
    process = subprocess.Popen(
        [*command, "--out", out], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 240
    while not list(out.glob("parts/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the children get it too
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.strip().endswith("Error: interrupted")
    finished = list(out.glob("parts/*.parquet"))
    assert finished
    assert all(len(pd.read_parquet(part)) for part in finished)
    assert not list(out.glob("parts/.*"))
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
