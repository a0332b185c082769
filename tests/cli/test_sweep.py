"""``oled-sim sweep`` from the outside, and grids in Python."""

import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from oled_sim.cli.main import main
from oled_sim.engine.budget import Budget, parse_capacities
from oled_sim.engine.rules import Rules
from oled_sim.engine.source import MemoryTrace
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy_spec import parse_policies
from oled_sim.sweep import Grid, sweep
from oled_sim.testing.by_hand import costs_by_hand
from oled_sim.testing.traces import random_request, write_trace

GEOMETRY = RoutingGeometry((1, 2, 5), 16, 2)


def made(seed):
    rng = np.random.default_rng(seed)
    return [random_request(rng, GEOMETRY, request=i, passes=8 + i, tokens=4) for i in range(5)]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    for seed, name in enumerate(("first", "second")):
        write_trace(folder / name, made(seed), GEOMETRY)
    return [str(folder / name) for name in ("first", "second")]


def call(*arguments):
    """Return exit code, stdout and stderr of ``oled-sim``."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(a) for a in arguments])
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def results(*arguments):
    code, out, err = call("sweep", *arguments, "--json")
    assert code == 0, err  # a slow machine shows progress
    return json.loads(out)["runs"]


def test_every_combination_on_every_trace(traces):
    runs = results(
        *traces, "--policy", "lru", "--policy", "ideal", "--cache", "2,4", "--cache", 8,
        "--h2d-gbs", "10,50", "--batch", "1,2",
    )  # fmt: skip
    assert [run["trace"]["name"] for run in runs] == ["first", "second"]
    for run in runs:
        found = [(r["batch"], r["link_gb_s"], r["cache"], r["spec"]) for r in run["results"]]
        assert found == [
            (b, link, c, p)
            for b in (1, 2) for link in (10, 50) for c in (2, 4, 8) for p in ("lru", "ideal")
        ]  # fmt: skip
        assert run["rules"]["batch"] == [1, 2]


def test_is_the_same_as_running_one_by_one(traces):
    (run,) = results(traces[0], "--policy", "lru", "--policy", "oled", "--cache", "3:9:6")
    for result in run["results"]:
        code, out, _ = call(
            "run", "--trace", traces[0], "--policy", result["spec"], "--cache", result["cache"],
            "--json",
        )  # fmt: skip
        assert code == 0
        (alone,) = json.loads(out)["results"]
        assert alone == result


def test_a_faster_link_moves_no_decision_of_lru(traces):
    (run,) = results(traces[0], "--policy", "lru", "--cache", 4, "--h2d-gbs", "10,20,40")
    summaries = [r["summary"] for r in run["results"]]
    assert len({s["hit_rate"] for s in summaries}) == 1
    times = [s["tpot_us"] for s in summaries]
    assert times == sorted(times, reverse=True) and len(set(times)) == 3


def test_bytes_do_not_depend_on_the_number_of_threads(traces, tmp_path):
    grid = ("--policy", "lru", "--policy", "oled", "--policy", "belady", "--cache", "1:9:2")
    seen = []
    for jobs in (1, 2, 7):
        files = [tmp_path / f"{jobs}.{form}" for form in ("parquet", "csv", "png")]
        code, out, err = call(
            "sweep", *traces, *grid, "--jobs", jobs, "--out", files[0], "--plot", files[2]
        )
        assert code == 0, err  # a slow machine shows progress
        assert call("sweep", *traces, *grid, "--jobs", jobs, "--out", files[1])[0] == 0
        seen.append((out, *(file.read_bytes() for file in files)))
    assert seen[0] == seen[1] == seen[2]


def test_files_hold_a_row_per_request(traces, tmp_path):
    path = tmp_path / "sweep.parquet"
    arguments = ("sweep", *traces, "--policy", "lru", "--cache", "2,4", "--batch", "1,3", "--out")
    assert call(*arguments, path)[0] == 0
    table = pq.read_table(path)
    assert table.num_rows == 2 * 2 * 2 * 3  # traces, capacities, batches, counted requests
    keys = ["trace", "policy", "cache", "batch", "request"]
    assert not table.to_pandas()[keys].duplicated().any()
    metadata = json.loads(table.schema.metadata[b"oled_sim.run"])
    assert list(metadata["runs"]) == ["first", "second"]
    assert call(*arguments, tmp_path / "sweep.csv")[0] == 0
    read = pd.read_csv(tmp_path / "sweep.csv")
    pd.testing.assert_frame_equal(read[keys], table.to_pandas()[keys], check_dtype=False)
    before = path.read_bytes()
    code, _, err = call(*arguments, path)
    assert (code, path.read_bytes()) == (2, before)
    assert f"{path} exists" in err and "--force" in err


def test_table_says_what_varies(traces):
    code, out, _ = call(
        "sweep", traces[0], "--policy", "lru", "--policy", "full", "--cache", "2,4",
        "--batch", "1,2", "--h2d-gbs", "10,20",
    )  # fmt: skip
    assert code == 0
    assert "batch 1, 2, 16 staging slots" in out
    rows = [line.split()[:4] for line in out.splitlines() if line.startswith(("lru", "full"))]
    assert rows[:3] == [["lru", "2", "1", "10"], ["lru", "4", "1", "10"], ["full", "16", "1", "10"]]
    assert len(rows) == 2 * 2 * 3


def test_first_failing_policy_is_the_one_that_is_named(traces, tmp_path):
    for name, at in (("early", 1), ("late", 5)):
        (tmp_path / f"{name}.py").write_text(
            "from oled_sim.policy import Policy\nfrom dataclasses import dataclass\n\n@dataclass\n"
            "class Bad(Policy):\n    '''Bad.'''\n\n    def dispatch(self, event):\n"
            f"        if event.pass_index == {at}:\n            raise ValueError('no')\n"
            "        return super().dispatch(event)\n"
        )
    specs = [str(tmp_path / "late.py"), str(tmp_path / "early.py")]
    for _ in range(3):
        code, out, err = call(
            "sweep", traces[0], "--policy", "lru", "--policy", specs[0], "--policy", specs[1],
            "--cache", 4, "--jobs", 3,
        )  # fmt: skip
        assert (code, out) == (1, "")
        assert err.startswith(f"Error: policy {specs[0]!r} at request 1, pass 5") and "\n" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cache", "4"], "no policy to run: give at least one"),
        (["--policy", "lru"], "such as --cache 40 or --cache 8:128:8"),
        (["--policy", "lru", "--cache", "8-16"], "'8-16' is no cache size"),
        (["--policy", "lru", "--cache", "8:4"], "'8:4' holds no cache size"),
        (["--policy", "lru", "--cache", "8:16:0"], "'8:16:0' holds no cache size"),
        (["--policy", "lru", "--cache", "4", "--batch", "1,x"], "'1,x' is no list of numbers"),
        (["--policy", "lru", "--cache", "4", "--batch", "0"], "a batch of 0 is impossible"),
        (["--policy", "lru", "--cache", "4", "--h2d-gbs", "fast"], "'fast' is no list of numbers"),
        (["--policy", "lru", "--cache", "4", "--h2d-gbs", "-1"], "bandwidth -1.0 GB/s is impos"),
        (["--policy", "lru", "--cache", "4", "--plot", "x.pdf"], "saved as .png or .svg"),
        (
            ["--policy", "lru", "--cache", "4", "--plot", "x.svg", "--out", "x.svg"],
            "as .parquet or .csv, not",
        ),
        (["--policy", "lru", "--cache-bytes", "9MB", "--plot", "x.svg"], "axis is slots per layer"),
        (["--policy", "lru", "--cache", "4", "--jobs", "0"], "0 is not in the range x>=1"),
    ],
)
def test_mistakes_are_one_sentence(traces, arguments, words):
    code, out, err = call("sweep", traces[0], *arguments)
    assert (code, out) == (2, "")
    assert words in err and "Traceback" not in err


def test_a_trace_given_twice_is_refused(traces):
    code, _, err = call("sweep", traces[0], traces[0], "--policy", "lru", "--cache", 4)
    assert code == 2 and "is given twice" in err


@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_traces_are_arguments_or_options(traces, command):
    first, second = traces
    common = ("--policy", "lru", "--cache", 4, "--json")
    code, out, _ = call(command, first, second, *common)
    assert code == 0 and len(json.loads(out)["runs"]) == 2
    assert call(command, "--trace", first, "--trace", second, *common)[:2] == (0, out)
    code, out, err = call(command, first, "--trace", second, *common)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"as arguments ({first}) and with --trace ({second}): name all of them in one" in err


@pytest.mark.slow
def test_the_command_itself(traces):
    command = [sys.executable, "-m", "oled_sim", "sweep", traces[0], "--policy", "lru"]
    done = subprocess.run(
        [*command, "--cache", "4:8:2", "--json"], capture_output=True, text=True, check=True
    )
    (run,) = json.loads(done.stdout)["runs"]
    assert [r["cache"] for r in run["results"]] == [4, 6, 8]


def test_each_request_is_read_once():
    reads = []

    class Counting(MemoryTrace):
        def read(self, request):
            reads.append(request)
            return super().read(request)

    grid = Grid(parse_policies(["lru", "lfu"]), [Budget(cache=c) for c in (1, 2, 3)], (10.0, 20.0))
    outputs = dict.fromkeys(range(5), 10)  # else it reads to count them
    found = sweep(
        Counting(GEOMETRY, made(0), outputs=outputs), grid, costs_by_hand(),
        Rules(history=0, warmup=0), jobs=2,
    )  # fmt: skip
    assert len(found) == 12 and reads == [0, 1, 2, 3, 4]


def test_progress_goes_to_the_end():
    steps = []
    grid = Grid(parse_policies(["lru"]), [Budget(cache=2)], batches=(1, 2))
    sweep(
        MemoryTrace(GEOMETRY, made(0)), grid, costs_by_hand(), Rules(history=0, warmup=0),
        progress=lambda done, total: steps.append((done, total)),
    )  # fmt: skip
    assert steps[-1] == (10, 10) and steps == sorted(steps)


def test_capacities():
    assert parse_capacities("8") == [8]
    assert parse_capacities("8, 16,4") == [8, 16, 4]
    assert parse_capacities("8:12") == [8, 9, 10, 11, 12]
    assert parse_capacities("8:128:40,0") == [8, 48, 88, 128, 0]
    for text in ("", "a", "8:", "-1", "1.5"):
        with pytest.raises(UsageError, match="is no cache size"):
            parse_capacities(text)
