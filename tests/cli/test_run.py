"""``oled-sim run`` from the outside."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import oled_sim
from oled_sim.cli.main import main
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace

GEOMETRY = RoutingGeometry((1, 2, 5), 16, 2)
REQUESTS = 5


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(0)
    requests = [
        random_request(rng, GEOMETRY, request=i, passes=10, tokens=4) for i in range(REQUESTS)
    ]
    path = tmp_path_factory.mktemp("run") / "made-up"
    write_trace(path, requests, GEOMETRY)
    return str(path)


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


def test_one_table_of_policies_and_capacities(trace):
    code, out, err = run(
        "--trace", trace, "--policy", "lru", "--policy", "oled", "--policy", "ideal",
        "--cache", 2, "--cache", 4,
    )  # fmt: skip
    assert code == 0, err  # a slow machine shows progress
    rows = [line.split()[:2] for line in out.splitlines() if line.split()[1:2] in (["2"], ["4"])]
    assert rows == [[p, c] for c in "24" for p in ("lru", "oled", "ideal*")]
    for word in ("TPOT", "TTFT", "util", "hit", "H2D", "CPU", "busy", "critical", "GPU GiB"):
        assert word in out
    assert "made-up (synthetic, model random): 1 history + 1 warm-up + 3 counted requests" in out
    assert "3 MoE layers (1..5) × 16 experts, top-2" in out  # routing geometry
    assert "llada2.0-mini: 6 MiB per expert" in out  # cost geometry
    assert "h200-llada2.0-mini" in out  # profile
    assert "scope layer, batch 1, 16 staging slots" in out


def test_references_run_once_with_a_budget_of_their_own(trace):
    common = ("--trace", trace, "--policy", "full", "--policy", "no-cache", "--json")
    code, out, _ = run(*common, "--policy", "lru", "--cache", 2, "--cache", 4)
    assert code == 0
    found = json.loads(out)["results"]
    rows = [(r["spec"], r["cache"], r["summary"]["hit_rate"] in (0, 1)) for r in found]
    assert rows == [("lru", 2, False), ("lru", 4, False), ("full", 16, True), ("no-cache", 0, True)]
    full, empty = (r["summary"] for r in found[2:])
    assert (full["hit_rate"], empty["hit_rate"]) == (1.0, 0.0)
    assert full["demand_per_pass"] == 0 and empty["peak_resident_bytes"] == 0
    assert full["tpot_us"] < found[1]["summary"]["tpot_us"] < empty["tpot_us"]
    # By themselves they need no cache size.
    assert json.loads(run(*common)[1])["results"] == found[2:]


def test_json_is_all_of_stdout(trace):
    code, out, _ = run("--trace", trace, "--policy", "lru", "--cache", 4, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["routing_geometry"] == {"layers": [1, 2, 5], "experts": 16, "top_k": 2}
    assert found["cost_geometry"]["expert_bytes"] == 6 * 2**20
    assert found["splits"] == {"history": [0], "warmup": [1], "counted": [2, 3, 4]}
    (result,) = found["results"]
    assert (result["spec"], result["cache"], result["slots"]) == ("lru", 4, 12)
    assert [r["request"] for r in result["requests"]] == [2, 3, 4]
    summary = result["summary"]
    tpot = np.mean([r["tpot_us"] for r in result["requests"]])
    assert summary["tpot_us"] == pytest.approx(tpot)
    assert summary["tpot_p99_us"] is None  # fewer than 100 requests
    hits = sum(r["hits"] for r in result["requests"])
    assert summary["hit_rate"] == hits / sum(r["activations"] for r in result["requests"])


def test_same_command_same_bytes(trace):
    arguments = ("--trace", trace, "--policy", "oled", "--cache", 4, "--json")
    assert run(*arguments) == run(*arguments)


def test_rules_reach_the_engine(trace):
    common = ("--trace", trace, "--policy", "lru", "--json")
    code, out, _ = run(
        *common, "--cache-bytes", "72MiB", "--scope", "global", "--batch", 2, "--staging", 3,
        "--batch-mode", "barrier", "--warmup", 0, "--history", 0, "--cold",
        "--confidence", "current", "--requests", 4,
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert found["rules"] == {
        "scope": "global", "batch": 2, "batch_mode": "barrier", "staging": 3, "warmup": 0,
        "history": 0, "cold": True, "confidence": "current", "requests": 4,
    }  # fmt: skip
    assert found["splits"]["counted"] == [0, 1, 2, 3]
    (result,) = found["results"]
    assert (result["slots"], result["cache"], result["cache_bytes"]) == (12, None, 72 * 2**20)
    assert result["causal"] is False


def test_batch_modes_differ_and_say_which(trace):
    common = ("--trace", trace, "--policy", "lru", "--cache", 4, "--batch", 2, "--history", 0)
    found = {}
    for mode in ("lockstep", "barrier", "refill"):
        code, out, _ = run(*common, "--batch-mode", mode, "--json")
        assert code == 0
        (result,) = json.loads(out)["results"]
        assert [r["request"] for r in result["requests"]] == [1, 2, 3, 4]
        found[mode] = result["summary"]["tpot_us"]
    assert len(set(found.values())) > 1
    _, out, _ = run(*common, "--batch-mode", "barrier")
    assert "batch 2 (barrier), 16 staging slots" in out and "batch TPOT" in out


def test_out_writes_one_row_per_policy_cache_and_request(trace, tmp_path):
    path = tmp_path / "results.parquet"
    arguments = (
        "--trace", trace, "--policy", "lru", "--policy", "lfu:count=tokens", "--cache", 2,
        "--cache", 4, "--out", path,
    )  # fmt: skip
    assert run(*arguments)[0] == 0
    table = pq.read_table(path)
    assert table.num_rows == 2 * 2 * 3
    assert set(table["policy"].to_pylist()) == {"lru", "lfu:count=tokens"}
    assert set(table["cache"].to_pylist()) == {2, 4}
    metadata = json.loads(table.schema.metadata[b"oled_sim.run"])
    assert metadata["policies"]["lfu:count=tokens"]["count"] == "tokens"
    assert metadata["trace"]["name"] == "made-up"
    before = path.read_bytes()
    code, _, err = run(*arguments)
    assert (code, path.read_bytes()) == (2, before)
    assert f"{path} exists" in err and "--force" in err
    assert run(*arguments, "--force")[0] == 0
    assert path.read_bytes() == before  # the same run writes the same bytes
    assert [p.name for p in tmp_path.iterdir()] == ["results.parquet"]


def test_out_writes_csv_too(trace, tmp_path):
    path = tmp_path / "results.csv"
    assert run("--trace", trace, "--policy", "lru", "--cache", 2, "--out", path)[0] == 0
    assert path.read_text().splitlines()[1].startswith('"made-up","lru",2,,')


def test_events_writes_one_row_per_event(trace, tmp_path):
    path = tmp_path / "events.parquet"
    arguments = ("--trace", trace, "--policy", "lru", "--policy", "oled", "--cache", 4)
    assert run(*arguments, "--events", path)[0] == 0
    table = pq.read_table(path).to_pydict()
    # Warm-up and counted requests, 10 passes of 3 layers each, two policies.
    assert len(table["layer"]) == 2 * 4 * 10 * 3
    hits, late = np.array(table["hits"]), np.array(table["late"])
    misses = np.array(table["demand"]) + np.array(table["cpu_misses"])
    assert (hits + late + misses == np.array(table["activated"])).all()
    assert set(table["split"]) == {"warmup", "counted"}
    assert set(table["layer"]) == {1, 2, 5}


def test_failed_run_leaves_no_file(trace, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from dataclasses import dataclass\nfrom oled_sim.policy import Policy\n\n@dataclass\n"
        "class Bad(Policy):\n    '''Bad.'''\n\n    def dispatch(self, event):\n"
        "        if event.pass_index == 3:\n            raise ValueError('no')\n"
        "        return super().dispatch(event)\n"
    )
    code, out, err = run(
        "--trace", trace, "--policy", bad, "--cache", 4, "--events", tmp_path / "e.parquet",
        "--out", tmp_path / "r.parquet",
    )  # fmt: skip
    assert (code, out) == (1, "")
    assert "request 1, pass 3, layer 1: dispatch() raised ValueError: no" in err
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".py"] in ([], ["__pycache__"])


def test_user_policy_from_a_file(trace, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\nimport numpy as np\n"
        "from oled_sim.policy import Policy, param\n\n@dataclass\nclass Mine(Policy):\n"
        "    '''Keeps low ids.'''\n\n    sign: float = param(1.0, 'direction')\n\n"
        "    def score(self, layer, event):\n        return -self.sign * np.arange(self.experts)\n"
    )
    code, out, _ = run("--trace", trace, "--policy", f"{path}:sign=-1", "--cache", 4, "--json")
    assert code == 0
    assert json.loads(out)["results"][0]["parameters"] == {"sign": -1.0}


NANO = Path(oled_sim.__file__).parent / "model" / "assets" / "nano" / "config.json"
"""A geometry that no profile was measured for."""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--cache", 4], 2, "no policy to run: give at least one"),
        (["--policy", "lru"], 2, "no cache size to run: give --cache"),
        (["--policy", "lru", "--cache", -1], 2, "'-1' is no cache size"),
        (["--policy", "lru", "--cache-bytes", "lots"], 2, "'lots' is not a size"),
        (["--policy", "olde", "--cache", 4], 2, "unknown policy 'olde': did you mean 'oled'"),
        (["--policy", "lru:x=1", "--cache", 4], 2, "no parameter 'x'"),
        (["--policy", "lru", "--cache", 4, "--batch", 0], 2, "a batch of 0 is impossible"),
        (
            ["--policy", "lru", "--cache", 4, "--batch-mode", "refill", "--cold"],
            2,
            "impossible while others run: use another --batch-mode",
        ),
        (["--policy", "lru", "--cache", 4, "--staging", 0], 2, "0 staging slots cannot work"),
        (["--policy", "lru", "--cache", 4, "--warmup", 9], 2, "leaves none to count"),
        (["--policy", "lru", "--cache", 4, "--geometry", "llada2.0-mino"], 2, "did you mean"),
        (["--policy", "lru", "--cache", 4, "--geometry", NANO], 2, "give one with --profile"),
        (["--policy", "lru", "--cache", 4, "--profile", "no.toml"], 2, "no.toml"),
        (["--policy", "lru", "--cache", 4, "--out", "/nowhere/x.parquet"], 2, "is no folder"),
    ],
)
def test_mistakes_are_one_sentence(trace, arguments, code, words):
    found, out, err = run("--trace", trace, *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert err.startswith("Error: ") and err.count("\n") == 1
    assert "Traceback" not in err


def test_missing_trace_is_one_sentence():
    code, out, err = run("--trace", "nano-gsm9k", "--policy", "lru", "--cache", 4)
    assert (code, out) == (2, "")
    assert "no trace 'nano-gsm9k'" in err


def test_missing_signal_is_one_sentence(tmp_path):
    rng = np.random.default_rng(1)
    signals = ("ids", "token_state")
    requests = [random_request(rng, GEOMETRY, request=i, signals=signals) for i in range(3)]
    write_trace(tmp_path / "bare", requests, GEOMETRY, signals=signals)
    code, out, err = run("--trace", tmp_path / "bare", "--policy", "oled", "--cache", 4)
    assert (code, out) == (1, "")
    assert "policy 'oled' needs the signal 'confidence'" in err
    assert run("--trace", tmp_path / "bare", "--policy", "lru", "--cache", 4)[0] == 0


PROBE = """
import sys
import oled_sim.cli.run, oled_sim.cli.sweep, oled_sim.cli.compare, oled_sim.cli.curve
heavy = {"torch", "numba", "numpy", "pyarrow", "rich"} & set(sys.modules)
print(sorted(heavy))
"""


def test_help_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"


def test_a_run_does_not_import_torch(trace):
    program = (
        "import sys\nfrom oled_sim.cli.main import main\n"
        f"main(['run', '--trace', {trace!r}, '--policy', 'oled', '--cache', '4', '--json'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
