"""The files of ``oled-sim run``: event tables and timelines."""

import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from oled_sim.cli.main import main
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace

GEOMETRY = RoutingGeometry((1, 2, 5), 16, 2)
POLICY = """
from dataclasses import dataclass

from oled_sim.policy import Policy, Prefetch


@dataclass
class Ahead(Policy):
    '''Prefetches for the next layer what this one activates.'''

    def place(self, setting):
        self.layers = len(setting.routing.layers)

    def prefetch(self, event):
        following = (event.layer + 1) % self.layers
        return [Prefetch(following, int(e), 1.0) for e in event.experts]
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(0)
    requests = [random_request(rng, GEOMETRY, request=i, passes=10, tokens=4) for i in range(6)]
    path = tmp_path_factory.mktemp("run") / "made-up"
    write_trace(path, requests, GEOMETRY)
    return path


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    path = tmp_path_factory.mktemp("policies") / "ahead.py"
    path.write_text(POLICY)
    return path


def run(*arguments):
    """Return exit code, stdout and stderr of ``oled-sim run``."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(["run", *map(str, arguments)])
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def run_with_events(path, *arguments):
    """Return (rows of the event table, the run's JSON)."""
    code, out, err = run(*arguments, "--events", path, "--json")
    assert code == 0, err  # a slow machine shows progress
    return pd.read_parquet(path), json.loads(out)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A trace whose requests have 4 to 16 passes."""
    rng = np.random.default_rng(5)
    requests = [
        random_request(rng, GEOMETRY, request=i, passes=4 + 5 * i % 13, tokens=4) for i in range(7)
    ]
    path = tmp_path_factory.mktemp("uneven") / "uneven"
    write_trace(path, requests, GEOMETRY)
    return str(path)


@pytest.mark.parametrize("mode", ["lockstep", "barrier", "refill"])
def test_event_rows_of_a_batch_add_up_to_the_run(uneven, ahead, tmp_path, mode):
    rules = ("--batch", 3, "--batch-mode", mode, "--history", 1)
    check_event_rows(uneven, ahead, tmp_path / "e", rules)
    rows = pd.read_parquet(tmp_path / "e")
    counted = rows[(rows["split"] == "counted") & (rows["policy"] == "oled")]
    number = counted.drop_duplicates(["pass_start_us"])["pass"]
    # One batch after another, but one alone if the next request takes a finished one's place.
    assert (number == 0).sum() == (1 if mode == "refill" else 2)


@pytest.mark.parametrize("rules", [(), ("--scope", "global"), ("--batch", 2), ("--cold",)])
def test_event_rows_add_up_to_the_run(trace, ahead, tmp_path, rules):
    check_event_rows(trace, ahead, tmp_path / "e", rules)


def check_event_rows(trace, ahead, path, rules):
    rows, found = run_with_events(
        path, "--trace", trace, "--policy", "oled", "--policy", ahead, "--cache", 3, *rules
    )
    counted = rows[(rows["split"] == "counted") & (rows["kind"] != "prefill")]
    passes = counted.drop_duplicates(["policy", "request", "pass"])
    for result in found["results"]:
        summary = result["summary"]
        own = counted[counted["policy"] == result["spec"]]
        total = own.select_dtypes("number").sum()
        of_pass = passes[passes["policy"] == result["spec"]]
        pass_total = of_pass.select_dtypes("number").sum()
        assert len(of_pass) == summary["passes"]
        assert total["hits"] / total["activated"] == summary["hit_rate"]
        assert total["reused"] / total["followed"] == summary["effective_transfer_ratio"]
        assert total["demand"] / len(of_pass) == summary["demand_per_pass"]
        cpu = total["cpu_misses"] + total["cpu_hits"]
        assert cpu / len(of_pass) == summary["cpu_per_pass"]
        for name in ("demand_bytes", "cpu_bytes", "useful", "late"):
            assert total[name] == summary[name]
        for name in ("prefetched", "wasted"):
            assert pass_total[f"pass_{name}"] == summary[name]
        for name in ("useful", "late"):
            assert pass_total[f"pass_{name}"] == total[name]
        for lane in ("gpu", "h2d", "cpu"):
            for kind in ("busy", "critical"):
                name = f"{lane}_{kind}_us"
                mean = pass_total[f"pass_{name}"] / len(of_pass)
                assert mean == pytest.approx(summary[name])
                # What is left is the start of the pass and the LM head.
                assert total[name] <= pass_total[f"pass_{name}"] * (1 + 1e-9)
        length = (of_pass["pass_end_us"] - of_pass["pass_start_us"]).mean()
        assert length == pytest.approx(summary["pass_us"])
    prefetching = counted[counted["policy"] == str(ahead)]
    assert prefetching["pass_prefetched"].sum() > 0


def test_event_rows_say_where_they_belong_and_when_they_ran(trace, tmp_path):
    rows, found = run_with_events(
        tmp_path / "e", "--trace", trace, "--policy", "lru", "--cache", 4, "--history", 0
    )
    assert list(dict.fromkeys(rows["request"])) == [0, 1, 2, 3, 4, 5]
    assert rows["split"].tolist() == ["warmup"] * 30 + ["counted"] * 150
    assert rows["layer"].tolist() == [1, 2, 5] * 60
    assert rows["pass"].tolist() == np.repeat(list(range(10)) * 6, 3).tolist()
    assert set(rows["kind"]) <= {"prefill", "denoise", "commit"}
    assert (rows["kind"] == "prefill").sum() == 6 * 3
    assert rows.groupby("request")["block"].is_monotonic_increasing.all()
    assert (rows["requests"] == 1).all()
    misses = rows["demand"] + rows["cpu_misses"]
    assert (rows["hits"] + rows["late"] + misses == rows["activated"]).all()
    assert (rows["demand_bytes"] == rows["demand"] * 6 * 2**20).all()
    times = ["pass_start_us", "start_us", "gate_us", "lanes_end_us", "end_us", "pass_end_us"]
    assert (np.diff(rows[times]) >= 0).all()
    length = rows["end_us"] - rows["start_us"]
    critical = rows[["gpu_critical_us", "h2d_critical_us", "cpu_critical_us"]].sum(axis=1)
    assert np.allclose(critical, length)
    # Nothing works on the CPU here, and a copy of 6 MiB takes as long for each miss.
    assert (rows["cpu_busy_us"] == 0).all()
    copies = rows[rows["demand"] > 0]
    assert np.allclose(copies["h2d_busy_us"] / copies["demand"], 122, rtol=0.2)
    metadata = json.loads(pq.read_schema(tmp_path / "e").metadata[b"oled_sim.run"])
    assert metadata["policies"] == {"lru": found["results"][0]["parameters"]}
    assert metadata["rules"] == found["rules"] and metadata["profile"] == found["profile"]


def test_events_of_a_batch_count_its_requests(tmp_path):
    rng = np.random.default_rng(3)
    requests = [random_request(rng, GEOMETRY, request=i, passes=4 + 3 * i) for i in range(3)]
    write_trace(tmp_path / "t", requests, GEOMETRY)
    rows, _ = run_with_events(
        tmp_path / "e", "--trace", tmp_path / "t", "--policy", "lru", "--cache", 4, "--batch", 3,
        "--history", 0, "--warmup", 0,
    )  # fmt: skip
    # Requests of 4, 7 and 10 passes, three layers each.
    assert rows["requests"].tolist() == [3] * 12 + [2] * 9 + [1] * 9
    assert (rows["request"] == 0).all()


def test_every_documented_column_is_there_and_every_column_is_documented(trace, tmp_path):
    from pathlib import Path

    page = Path(__file__).parents[2] / "docs" / "events.md"
    cells = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| `")]
    documented = [name.strip("` ") for cell in cells for name in cell.split(",")]
    rows, _ = run_with_events(tmp_path / "e", "--trace", trace, "--policy", "lru", "--cache", 4)
    assert documented == list(rows.columns)


def timeline(path):
    """Return (processes, slices) of a timeline."""
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    tracks = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    begins = [p.track_event for p in trace.packet if p.track_event.type == 1]
    return [t.process.process_name for t in tracks if t.HasField("process")], begins


def test_timeline_shows_the_first_counted_request_of_every_run(trace, tmp_path):
    path = tmp_path / "lanes.pftrace"
    arguments = (
        "--trace", trace, "--policy", "lru", "--policy", "oled", "--cache", 2, "--cache-bytes",
        "72MiB", "--timeline", path,
    )  # fmt: skip
    code, out, err = run(*arguments)
    assert code == 0, err  # a slow machine shows progress
    assert "TPOT" in out
    processes, slices = timeline(path)
    assert processes == [
        "lru (cache 2)",
        "oled (cache 2)",
        "lru (cache 75497472 bytes)",
        "oled (cache 75497472 bytes)",
    ]
    before = path.read_bytes()
    code, _, err = run(*arguments)
    assert (code, path.read_bytes()) == (2, before)
    assert f"{path} exists" in err and "--force" in err
    assert run(*arguments, "--force")[0] == 0
    assert path.read_bytes() == before  # the same run writes the same bytes
    assert run(*arguments, "--force", "--timeline-requests", 2)[0] == 0
    assert 1.5 * len(slices) < len(timeline(path)[1]) < 2.5 * len(slices)
    assert [p.name for p in tmp_path.iterdir()] == ["lanes.pftrace"]


def test_timeline_changes_no_result(trace, tmp_path):
    arguments = ("--trace", trace, "--policy", "oled", "--cache", 4, "--json")
    assert run(*arguments, "--timeline", tmp_path / "t")[1] == run(*arguments)[1]


def test_all_files_of_one_run(trace, tmp_path):
    code, _, _ = run(
        "--trace", trace, "--policy", "lru", "--cache", 4, "--timeline", tmp_path / "t",
        "--events", tmp_path / "e", "--out", tmp_path / "r",
    )  # fmt: skip
    assert code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e", "r", "t"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--timeline", "{}/nowhere/x"], "nowhere is no folder: create it first"),
        (["--timeline", "{}"], "is a folder: give the name of a file"),
        (["--timeline", "{}/x", "--timeline-requests", 0], "a timeline of 0 requests is empty"),
        (["--timeline", "{}/x", "--events", "{}/x"], "name the same file: give each its own"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_file(trace, tmp_path, arguments, words):
    given = [str(a).format(tmp_path) for a in arguments]
    code, out, err = run("--trace", trace, "--policy", "lru", "--cache", 4, *given)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("Error: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_perfetto_only_the_timeline_is_refused(trace, tmp_path):
    program = (
        "import sys\nsys.modules['perfetto'] = None\nfrom oled_sim.cli.main import main\n"
        "main(['run', *sys.argv[1:]])"
    )
    plain = [sys.executable, "-c", program, "--trace", str(trace), "--policy", "lru"]
    plain += ["--cache", "4"]
    subprocess.run([*plain, "--json"], check=True, capture_output=True)
    done = subprocess.run(
        [*plain, "--timeline", str(tmp_path / "t")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: a timeline needs the packages perfetto and protobuf")
    assert done.stderr.count("\n") == 1
