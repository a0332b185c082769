"""``oled-sim compare`` from the outside, and its intervals."""

import json
import subprocess
import sys

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sweep import GEOMETRY, call, made

from oled_sim.comparison import paired_ratio
from oled_sim.testing.traces import write_trace


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    for seed, name in enumerate(("first", "second")):
        write_trace(folder / name, made(seed), GEOMETRY)
    return [str(folder / name) for name in ("first", "second")]


class TestInterval:
    def test_of_two_requests_by_hand(self):
        # Ratios of a resample: (1 + 1) / 2 = 1 with chance 1/4, 2 with 1/2, 3 with 1/4: both ends
        # of the middle 95 % are the extremes.
        found = paired_ratio(np.array([1.0, 3.0]), np.array([1.0, 1.0]))
        assert (found.value, found.low, found.high, found.requests) == (2, 1, 3, 2)

    def test_pairs_stay_together(self):
        # Twice as slow on every request, however much requests differ: no doubt at all.
        theirs = np.array([1.0, 10.0, 100.0])
        found = paired_ratio(2 * theirs, theirs)
        assert (found.value, found.low, found.high) == (2, 2, 2)

    def test_is_a_ratio_of_means(self):
        assert paired_ratio(np.array([1.0, 3.0]), np.array([1.0, 7.0])).value == 4 / 8

    def test_one_request_gives_none(self):
        found = paired_ratio(np.array([3.0, np.nan, 1.0]), np.array([2.0, 2.0, np.nan]))
        assert (found.value, found.requests) == (1.5, 1)
        assert np.isnan([found.low, found.high]).all()

    def test_no_request_gives_nothing(self):
        found = paired_ratio(np.array([np.nan]), np.array([1.0]))
        assert np.isnan(found.value) and found.requests == 0

    def test_seeds_draw_other_resamples(self):
        ours, theirs = np.random.default_rng(0).random((2, 30))
        assert paired_ratio(ours, theirs, seed=1) != paired_ratio(ours, theirs, seed=2)

    @settings(max_examples=examples(20), deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=2, max_size=8))
    def test_holds_the_ratio_and_lies_within_the_extremes(self, pairs):
        ours, theirs = np.array(pairs).T
        found = paired_ratio(ours, theirs, seed=3)
        each = ours / theirs
        slack = 1e-12
        assert each.min() * (1 - slack) <= found.low <= found.high <= each.max() * (1 + slack)
        assert found == paired_ratio(ours, theirs, seed=3)


def rows_of(*arguments):
    code, out, err = call("compare", *arguments, "--json")
    assert code == 0, err  # a slow machine shows progress
    return json.loads(out)


def test_rows_are_those_of_separate_runs(traces):
    found = rows_of(traces[0], "--policy", "lru", "--cache", "2,6", "--history", 0)
    assert (found["against"], found["seed"]) == ("ideal", 0)
    (rows,) = found["rows"].values()
    assert [(r["spec"], r["cache"]) for r in rows] == [
        ("lru", 2), ("ideal", 2), ("lru", 6), ("ideal", 6),
    ]  # fmt: skip
    for row in rows:
        code, out, _ = call(
            "run", "--trace", traces[0], "--history", 0, "--policy", row["spec"], "--cache",
            row["cache"], "--json",
        )  # fmt: skip
        assert code == 0
        summary = json.loads(out)["results"][0]["summary"]
        for name in ("tpot_us", "utilization", "hit_rate", "effective_transfer_ratio"):
            assert row[name] == pytest.approx(summary[name], rel=1e-12)
        assert row["requests"] == 4
    for lru, ideal in (rows[:2], rows[2:]):
        assert lru["tpot_ratio"] == pytest.approx(lru["tpot_us"] / ideal["tpot_us"], rel=1e-12)
        assert lru["low"] <= lru["tpot_ratio"] <= lru["high"]
        assert ideal["tpot_ratio"] == ideal["low"] == ideal["high"] == 1


def test_several_traces_are_pooled_too(traces):
    found = rows_of(*traces, "--policy", "lru", "--cache", 4)["rows"]
    assert list(found) == ["first", "second", "all traces"]
    assert [rows[0]["requests"] for rows in found.values()] == [3, 3, 6]
    single = [found[name][0]["tpot_us"] for name in ("first", "second")]
    assert found["all traces"][0]["tpot_us"] == pytest.approx(sum(single) / 2)


def test_a_policy_of_one_budget_stands_beside_every_cache(traces):
    (rows,) = rows_of(traces[0], "--policy", "full", "--cache", "2,6")["rows"].values()
    assert [(r["spec"], r["cache"], r["own_budget"]) for r in rows] == [
        ("ideal", 2, False), ("full", 2, True), ("ideal", 6, False), ("full", 6, True),
    ]  # fmt: skip
    assert rows[1]["tpot_us"] == rows[3]["tpot_us"]
    assert rows[1]["tpot_ratio"] < rows[3]["tpot_ratio"]


def test_against_another_policy(traces):
    common = (traces[0], "--policy", "ideal", "--cache", 4, "--against", "lru", "--seed", 7)
    found = rows_of(*common)
    assert (found["against"], found["seed"]) == ("lru", 7)
    ideal, lru = found["rows"]["first"]
    assert ideal["tpot_ratio"] < lru["tpot_ratio"] == 1
    assert rows_of(*common) == found


def test_table_says_what_intervals_rest_on(traces):
    grid = ("--policy", "lru", "--policy", "full", "--cache", "2,4", "--batch", "1,2")
    code, out, err = call("compare", *traces, *grid)
    assert code == 0, err  # a slow machine shows progress
    assert out.count("bootstrap over 3 requests in pairs, 10,000 resamples, seed 0; so few") == 2
    assert out.count("bootstrap over 6 requests in pairs") == 1
    assert "all traces: requests of first, second pooled" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("lru")]
    assert len(rows) == 3 * 4 and rows[0][:3] == ["lru", "2", "1"] and rows[0][5:8][1] == "to"
    lone = [line.split()[1:3] for line in out.splitlines() if line.startswith("full")]
    assert lone == [[c, "†"] for c in "24" * 6] and "† ran with a budget of its own" in out
    _, out, _ = call("compare", traces[0], "--policy", "lru", "--cache", 2, "--requests", 1)
    assert "Intervals need two requests or more; here is 1." in out and "n/a" in out


def test_plot(traces, tmp_path):
    path = tmp_path / "ratio.svg"
    arguments = ("compare", *traces, "--policy", "lru", "--cache", "2,4", "--plot", path)
    assert call(*arguments)[0] == 0
    before = path.read_bytes()
    assert b"<svg" in before
    code, _, err = call(*arguments)
    assert code == 2 and f"{path} exists" in err
    assert call(*arguments, "--force")[0] == 0 and path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cache", "4"], "no policy to run"),
        (["--policy", "lru"], "no cache size to run"),
        (["--policy", "lru", "--cache", "4", "--against", "full"], "runs with one budget only"),
        (["--policy", "lru", "--cache", "4", "--against", "idael"], "did you mean 'ideal'"),
        (["--policy", "lru", "--cache", "4", "--plot", "x.pdf"], "saved as .png or .svg"),
    ],
)
def test_mistakes_are_one_sentence(traces, arguments, words):
    code, out, err = call("compare", traces[0], *arguments)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("Error: ") and err.count("\n") == 1


def test_without_a_trace_it_says_what_is_missing():
    code, _, err = call("compare", "--policy", "lru", "--cache", 4)
    assert code == 2 and "no trace to compare policies on: name at least one" in err


@pytest.mark.slow
def test_the_command_itself(traces):
    command = [sys.executable, "-m", "oled_sim", "compare", traces[0], "--policy", "lru"]
    done = subprocess.run([*command, "--cache", "4"], capture_output=True, text=True, check=True)
    assert "× ideal" in done.stdout and "95 % interval" in done.stdout
