"""``oled-sim experiment`` end to end, with an experiment from a file."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO

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


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    return f"{file}:MINE"


@pytest.fixture(scope="module")
def ran(mine, tmp_path_factory):
    """The folder of a quick run, and what it printed."""
    out = tmp_path_factory.mktemp("ran") / "out"
    printed = StringIO()
    with redirect_stdout(printed):
        main(["experiment", mine, "--quick", "--out", str(out), "--jobs", "1"])
    return out, printed.getvalue()


@pytest.fixture
def out(ran, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(ran[0], tmp_path / "out")


def run(capsys, *arguments):
    try:
        main(["experiment", *map(str, arguments)])
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_writes_table_manifest_and_figure(ran):
    out, text = ran
    assert text.splitlines()[1].split()[:3] == ["mine", "4", "4"]  # points, measured
    table = pd.read_parquet(out / "mine.parquet")
    assert table.groupby(["cache", "policy"], sort=False).ngroups == 4
    assert json.loads((out / "mine.manifest.json").read_text())["size"] == "quick"
    assert (out / "mine.png").read_bytes()[:4] == b"\x89PNG"


def test_a_second_run_measures_nothing(capsys, mine, out):
    code, text, err = run(capsys, mine, "--quick", "--out", out, "--jobs", 1, "--json")
    assert code == 0, err  # a slow machine shows progress
    assert [f["measured"] for f in json.loads(text)] == [0]


def test_a_damaged_part_is_named(capsys, mine, out):
    arguments = [mine, "--quick", "--out", out, "--jobs", 1]
    part = next((out / "parts").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    code, _, err = run(capsys, *arguments)
    assert code == 1 and part.name in err and "delete it and run again" in err
    part.unlink()
    assert run(capsys, *arguments)[0] == 0


def test_sizes_are_told_apart(capsys, mine, out):
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


def test_a_file_must_hold_an_experiment(capsys, mine):
    code, _, err = run(capsys, mine.replace(":MINE", ":NOT_ONE"))
    assert code == 2
    assert "is no experiment but a int" in err


def test_a_folder_that_cannot_be_made_is_said(capsys, tmp_path, mine):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, mine, "--quick", "--out", tmp_path / "file" / "out")
    assert code == 2
    assert "cannot be made" in err


@pytest.mark.parametrize("name", ["mine.parquet", "mine.manifest.json", "mine.png", "parts/*"])
def test_a_folder_in_the_place_of_a_result_is_found_before_the_run(
    capsys, monkeypatch, mine, out, name
):
    place = next(out.glob(name))
    place.unlink()
    place.mkdir()

    def measure(*_):
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr("oled_sim.experiment.running._measure", measure)
    code, _, err = run(capsys, mine, "--quick", "--out", out, "--jobs", "1")
    assert code == 2 and f"Error: {place} is a folder in the place of" in err


@pytest.mark.parametrize("name", [".", "parts", "traces"])
def test_a_link_that_leads_nowhere_is_named(capsys, mine, tmp_path, name):
    place = tmp_path / "out" / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to("nowhere")
    code, _, err = run(capsys, mine, "--quick", "--out", tmp_path / "out")
    assert code == 2 and f"Error: {place} is a symbolic link that leads nowhere" in err


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
    assert process.returncode == 130
    finished = list(out.glob("parts/*.parquet"))
    assert finished
    points = f"{len(finished)} points more are" if len(finished) > 1 else "1 point more is"
    says = f"Error: experiment stopped: {points} in {out}; the same command goes on from there"
    assert err.strip().splitlines()[-1] == says
    assert all(len(pd.read_parquet(part)) for part in finished)
    assert not list(out.glob("parts/.*"))
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
