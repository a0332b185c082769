"""``oled-sim bounds`` from the outside."""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import numpy as np
import pytest

from oled_sim.cli.main import main
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_manifest, random_request, write_trace

GEOMETRY = RoutingGeometry((1, 2, 5), 12, 2)
BOUNDS = ["ideal", "ideal:total", "belady, one pool", "belady, best split", "belady",
          "LRU, best split"]  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(3)
    requests = [random_request(rng, GEOMETRY, request=i, passes=12, tokens=3) for i in range(4)]
    path = tmp_path_factory.mktemp("bounds") / "made-up"
    write_trace(path, requests, GEOMETRY)
    return str(path)


def bounds(*arguments):
    """Return exit code, stdout and stderr of ``oled-sim bounds``."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(["bounds", *map(str, arguments)])
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def as_json(*arguments):
    code, out, err = bounds(*arguments, "--json")
    assert code == 0, err  # a slow machine shows progress
    return json.loads(out)


def test_bounds_and_gaps_side_by_side(trace):
    code, out, err = bounds(trace, "--cache", 4, "--policy", "lru", "--policy", "oled")
    assert code == 0, err  # a slow machine shows progress
    first = [line.split("  ")[0] for line in out.splitlines()]
    assert [name for name in first if name in BOUNDS] == BOUNDS * 2  # figures, then gaps
    assert [name for name in first if name in ("lru", "oled")] == ["lru", "oled"]
    assert "Cache 4 experts per layer" in out and "docs/bounds.md" in out
    assert "made-up (synthetic, model random): 1 history + 1 warm-up + 2 counted requests" in out


def test_every_budget_is_a_comparison_of_its_own(trace):
    found = as_json(trace, "--cache", 2, "--cache", 5, "--cache-bytes", "60MiB", "--policy", "lru")
    sizes = [(c["cache"], c["cache_bytes"]) for c in found["comparisons"]]
    assert sizes == [(2, None), (5, None), (None, 60 << 20)]
    for comparison, slots in zip(found["comparisons"], (6, 15, 10), strict=True):
        assert [row["name"] for row in comparison["bounds"]] == BOUNDS
        assert [row["slots"] for row in comparison["bounds"]] == [slots] * 6
        assert comparison["most_hits_in_one_pool"] is None  # experts are of one size
        assert [row["name"] for row in comparison["policies"]] == ["lru"]


def test_the_order_of_the_bounds(trace):
    found = as_json(trace, "--cache", 4, "--history", 0, "--warmup", 0, "--policy", "lru",
                    "--policy", "lru:dispatch=load", "--policy", "oled")  # fmt: skip
    (comparison,) = found["comparisons"]
    rows = {row["name"]: row for row in comparison["bounds"] + comparison["policies"]}
    hits = {n: sum(r["hits"] + r["prefill_hits"] for r in row["requests"])
            for n, row in rows.items()}  # fmt: skip
    # Every request is counted, with prefill, so these are the hits of the whole run.
    assert hits["lru"] <= hits["belady"] <= hits["belady, best split"] <= hits["belady, one pool"]
    assert hits["lru"] <= hits["LRU, best split"] <= hits["belady, best split"]
    assert hits["oled"] <= hits["belady, one pool"] <= hits["ideal:total"]
    assert hits["belady"] <= hits["ideal"] <= hits["ideal:total"]
    tpot = {n: row["summary"]["tpot_us"] for n, row in rows.items()}
    assert tpot["ideal:total"] <= tpot["ideal"] * 1.01 <= min(tpot["lru"], tpot["belady"]) * 1.02


def test_gaps_are_differences_and_ratios(trace):
    (comparison,) = as_json(trace, "--cache", 3, "--policy", "lru")["comparisons"]
    (lru,) = comparison["policies"]
    for bound in comparison["bounds"]:
        gap, best = lru["gaps"][bound["name"]], bound["summary"]
        assert gap["hit_rate"] == best["hit_rate"] - lru["summary"]["hit_rate"]
        assert gap["tpot"] == lru["summary"]["tpot_us"] / best["tpot_us"]


def test_scopes(trace):
    (comparison,) = as_json(trace, "--cache", 3, "--scope", "global", "--policy", "lru")[
        "comparisons"
    ]
    scopes = {row["name"]: row["scope"] for row in comparison["bounds"]}
    assert scopes["belady, one pool"] == "global" and scopes["belady"] == "layer"
    assert comparison["policies"][0]["scope"] == "global"
    splits = {row["name"]: row["layer_slots"] for row in comparison["bounds"]}
    assert sum(splits["belady, best split"]) == sum(splits["LRU, best split"]) == 9
    assert splits["belady"] is None


def test_bounds_alone(trace):
    code, out, _ = bounds(trace, "--cache", 3, "--cold", "--batch", 2, "--batch-mode", "barrier")
    assert code == 0
    assert "gap to" not in out and "ideal:total" in out


def test_references_stand_beside_every_budget(trace):
    found = as_json(trace, "--cache", 2, "--cache", 5, "--policy", "full", "--policy", "lru")
    for comparison in found["comparisons"]:
        assert [row["name"] for row in comparison["policies"]] == ["lru", "full"]


def test_experts_of_different_size(tmp_path):
    rng = np.random.default_rng(4)
    requests = [random_request(rng, GEOMETRY, request=i, passes=12, tokens=3) for i in range(4)]
    sizes = (2 << 20, 3 << 20, 6 << 20)
    manifest = random_manifest(GEOMETRY, expert_bytes=sizes)
    path = tmp_path / "sizes"
    write_trace(path, requests, GEOMETRY, manifest=manifest)
    (comparison,) = as_json(path, "--cache-bytes", "40MiB", "--policy", "lru")["comparisons"]
    (pool,) = [row for row in comparison["bounds"] if row["name"] == "belady, one pool"]
    assert pool["run"]["hits"] <= comparison["most_hits_in_one_pool"] < pool["run"]["activations"]
    code, out, _ = bounds(path, "--cache-bytes", "40MiB")
    assert code == 0 and "is a heuristic" in out and "a fractional bound" in out


def test_one_request_alone(trace):
    (comparison,) = as_json(trace, "--cache", 3, "--request", 2, "--policy", "lru")["comparisons"]
    (lru,) = comparison["policies"]
    assert [r["request"] for r in lru["requests"]] == [2]
    assert 0 < comparison["least_work_us"] <= lru["run"]["copies_us"] + lru["run"]["cpu_us"]
    code, out, _ = bounds(trace, "--cache", 3, "--request", 2, "--policy", "lru")
    assert code == 0 and "0 history + 0 warm-up + 1 counted" in out
    work = out[out.index("work for misses") :].splitlines()
    assert [line.split("  ")[0] for line in work[1:4]] == ["least possible", "belady", "lru"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no cache size: give --cache"),
        (["--cache", "-1"], "'-1' is no cache size"),
        (["--cache", "4", "--policy", "lruu"], "did you mean 'lru'?"),
        (["--cache", "4", "--warmup", "9"], "leaves none to count"),
        (["--cache", "4", "--request", "2", "--history", "1"], "leave out --warmup, --history"),
        (["--cache", "4", "--request", "9"], "the trace has no request 9: it has 0 to 3"),
    ],
)
def test_a_mistake_is_one_sentence(trace, arguments, words):
    code, out, err = bounds(trace, *arguments)
    assert (code, out) == (2, "")
    assert words in err and len(err.splitlines()) == 1


def test_no_such_trace():
    code, _, err = bounds("no-such-trace", "--cache", 4)
    assert code != 0 and len(err.splitlines()) == 1
