"""``oled-sim curve`` from the outside."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from test_sweep import GEOMETRY, call, made

from oled_sim.testing.traces import write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("curve") / "made-up"
    write_trace(path, made(3), GEOMETRY)
    return str(path)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_agrees_with_a_sweep(trace, scope):
    rules = ("--scope", scope, "--history", 0, "--policy", "lru", "--policy", "lfu")
    code, out, err = call("curve", trace, *rules, "--json")
    assert code == 0, err  # a slow machine shows progress
    (run,) = json.loads(out)["runs"]
    code, out, _ = call("sweep", trace, *rules, "--cache", "0:16", "--json")
    assert code == 0
    results = json.loads(out)["runs"][0]["results"]
    for curve in run["curves"]:
        mine = [r["summary"] for r in results if r["spec"] == curve["spec"]]
        assert curve["cache"] == list(range(17))
        assert [s["hit_rate"] for s in mine] == curve["hit_rate"]
        assert [s["hit_rate_with_prefill"] for s in mine] == curve["hit_rate_with_prefill"]


def test_table_shows_every_cache_size_or_those_asked_for(trace):
    code, out, _ = call("curve", trace, "--policy", "lru", "--policy", "lfu")
    assert code == 0
    lines = out.splitlines()
    assert lines[3].split() == ["cache", "lru", "lru", "all", "lfu", "lfu", "all"]
    assert [line.split()[0] for line in lines[4:21]] == [str(c) for c in range(17)]
    assert lines[4].split()[1:] == ["0.00%"] * 4 and lines[20].split()[1:] == ["100.00%"] * 4
    assert "Profile" not in out and "Costs" not in out  # hits depend on neither
    _, out, _ = call("curve", trace, "--policy", "lru", "--cache", "4:16:6")
    assert [line.split()[0] for line in out.splitlines()[4:-1]] == ["4", "10", "16"]


def test_files(trace, tmp_path):
    common = ("curve", trace, "--policy", "lru", "--out")
    assert call(*common, tmp_path / "c.parquet", "--plot", tmp_path / "c.png")[0] == 0
    table = pq.read_table(tmp_path / "c.parquet").to_pandas()
    assert table["cache"].tolist() == list(range(17))
    assert (np.diff(table["hits"]) >= 0).all()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert call(*common, tmp_path / "c.csv")[0] == 0
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "c.csv"), table)
    code, _, err = call(*common, tmp_path / "c.csv")
    assert code == 2 and "c.csv exists" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no policy to run"),
        (["--policy", "oled"], "policy 'oled' is no stack policy"),
        (["--policy", "lru:dispatch=load"], "run it with each: oled-sim sweep"),
        (["--policy", "lru", "--cache", "x"], "'x' is no cache size"),
        (["--policy", "lru", "--plot", "x.gif"], "saved as .png or .svg"),
    ],
)
def test_mistakes_are_one_sentence(trace, arguments, words):
    code, out, err = call("curve", trace, *arguments)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("Error: ") and err.count("\n") == 1


@pytest.mark.slow
def test_the_command_itself(trace):
    command = [sys.executable, "-m", "oled_sim", "curve", trace, "--policy", "lru", "--cache", "16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "16  100.00%  100.00%" in done.stdout
