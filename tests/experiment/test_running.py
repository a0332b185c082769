"""Experiments are measured once, kept point by point, and give the same bytes however they ran."""

import json
from dataclasses import replace

import pandas as pd
import pytest
from counting import Counted, counting

from oled_sim.errors import UsageError
from oled_sim.experiment import (
    Experiment,
    Inputs,
    RunPoint,
    Store,
    SyntheticTrace,
    run_experiments,
)
from oled_sim.experiment.running import TOGETHER, in_one_go


def measured(log):
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def content(folder):
    files = (f for f in folder.rglob("*") if f.is_file())
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}


def test_rows_stand_in_the_order_of_the_points(tmp_path):
    (found,) = run_experiments([counting(tmp_path / "log")], "quick", tmp_path / "out")
    table = pd.read_parquet(found.table)
    assert table["number"].tolist() == [3, 3, 1, 1, 2, 2]
    assert table["square"].tolist() == [9, 9, 1, 1, 4, 4]
    assert (found.points, found.measured) == (3, 3)


def test_nothing_is_measured_twice(tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    run_experiments([counting(log)], "quick", out)
    before = content(out)
    (again,) = run_experiments([counting(log)], "quick", out)
    assert again.measured == 0
    assert measured(log) == [3, 1, 2]
    assert content(out) == before


def test_a_new_point_alone_is_measured(tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    run_experiments([counting(log)], "quick", out)
    run_experiments([counting(log, (3, 4))], "quick", out)
    assert measured(log) == [3, 1, 2, 4]


def test_an_interrupt_keeps_what_is_finished(tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_experiments([counting(log, failing=[2])], "quick", out)
    assert measured(log) == [3, 1]
    assert not (out / "counting.parquet").exists()
    run_experiments([counting(log)], "quick", out)
    assert measured(log) == [3, 1, 2]
    run_experiments([counting(tmp_path / "other")], "quick", tmp_path / "at once")
    assert content(out) == content(tmp_path / "at once")


@pytest.mark.parametrize("spec", ["mine.py", "grid.toml:mine"])
def test_a_policy_file_that_has_changed_is_measured_again(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    mine, grid = tmp_path / "mine.py", tmp_path / "grid.toml"
    code = "from oled_sim.policies.lru import LRU\n\nclass Mine(LRU):\n    {}\n"
    table = '[[policy]]\nname = "lfu"\nlabel = "mine"\ncount = "{}"\n'

    def part(body, count):
        mine.write_text(code.format(body))
        grid.write_text(table.format(count))
        return Store(tmp_path / "out").part(RunPoint("nano-gsm8k", policy=spec, cache=4))

    assert part("pass", "tokens") == part("pass", "tokens") != part("...", "event")


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_number_of_processes(tmp_path):
    for jobs in (1, 2):
        run_experiments([counting(tmp_path / "log")], "quick", tmp_path / str(jobs), jobs=jobs)
    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_experiments_share_points(tmp_path):
    log = tmp_path / "log"
    two = [counting(log, (1, 2), name="first"), counting(log, (2, 3), name="second")]
    found = run_experiments(two, "quick", tmp_path / "out")
    assert measured(log) == [1, 2, 3]
    assert [pd.read_parquet(f.table)["number"].tolist() for f in found] == [
        [1, 1, 2, 2],
        [2, 2, 3, 3],
    ]


def test_manifest_says_what_the_table_came_from(tmp_path):
    (found,) = run_experiments([counting(tmp_path / "log")], "quick", tmp_path / "out")
    manifest = json.loads(found.table.with_suffix(".manifest.json").read_text())
    assert manifest["command"] == "oled-sim experiment counting --quick"
    assert [p["number"] for p in manifest["points"]] == [3, 1, 2]
    assert set(manifest["traces"]) == {"nano-gsm8k"}
    assert len(manifest["traces"]["nano-gsm8k"]["sha256"]) == 64
    parts = {f.stem for f in (tmp_path / "out" / "parts").iterdir()}
    assert set(manifest["parts"]) == parts


RUN = RunPoint("nano-gsm8k", policy="lru", cache=16, requests=4)


@pytest.mark.parametrize(
    "change",
    [
        {"trace": "nano-humaneval"},
        {"policy": "lfu"},
        {"cache": 17},
        {"batch": 2},
        {"link_gb_s": 12.0},
        {"requests": 5},
    ],
)
def test_every_field_decides_about_the_part(tmp_path, change):
    store = Store(tmp_path)
    assert store.key(replace(RUN, **change)) != store.key(RUN)


def test_the_profile_decides_about_the_part(tmp_path):
    from oled_sim.costs.store import load_profile, save_profile

    store, file = Store(tmp_path), tmp_path / "mine.toml"
    save_profile(load_profile("h200-llada2.0-mini"), file)
    point = replace(RUN, profile=str(file))
    before = store.key(point)
    file.write_text(file.read_text().replace("workers = 12", "workers = 11"))
    assert Store(tmp_path).key(point) != before


def test_a_run_is_the_one_that_the_engine_makes(tmp_path):
    from oled_sim.engine.runner import simulate
    from oled_sim.policy_spec import parse_policy
    from oled_sim.run_inputs import costs_for, source_for
    from oled_sim.trace import open_trace

    one = Experiment("one", "", "", lambda size: [RUN], lambda table: None)
    (found,) = run_experiments([one], "full", tmp_path)
    table = pd.read_parquet(found.table)
    trace, policy = open_trace("nano-gsm8k"), parse_policy("lru")
    costs = costs_for(trace, None, None, False)
    result = simulate(source_for(trace, [policy]), policy, costs, 16, RUN.rules)
    assert table["tpot_us"].tolist() == [r.tpot_us for r in result.requests]
    assert table["hits"].tolist() == [r.hits for r in result.requests]
    assert set(table["profile_status"]) == {"measured"}
    assert set(table["origin"]) == {"real"}


def test_a_missing_profile_is_said_before_anything_is_measured(tmp_path):
    log = tmp_path / "log"
    points = [Counted("nano-gsm8k", 1, str(log)), replace(RUN, profile="h200-llada9")]
    mixed = Experiment("mixed", "", "", lambda size: points, lambda table: None)
    with pytest.raises(UsageError, match="unknown profile 'h200-llada9'"):
        run_experiments([mixed], "quick", tmp_path / "out")
    assert measured(log) == []


def test_a_grid_holds_a_point_once(tmp_path):
    with pytest.raises(UsageError, match="a point twice"):
        counting(tmp_path / "log", (1, 1)).grid("quick")
    with pytest.raises(UsageError, match="no points"):
        counting(tmp_path / "log", ()).grid("quick")


def test_a_table_that_is_no_result_is_left_alone(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "counting.parquet").write_text("mine")
    with pytest.raises(UsageError, match="no result of an experiment"):
        run_experiments([counting(tmp_path / "log")], "quick", out)
    assert (out / "counting.parquet").read_text() == "mine"
    assert measured(tmp_path / "log") == []


SHORT = SyntheticTrace("llada2.0-mini", "gsm8k", requests=1, output_tokens=16)


def test_a_synthetic_trace_is_made_once_and_the_same(tmp_path):
    inputs = Inputs(tmp_path / "a")
    assert inputs.missing([SHORT, SHORT, "nano-gsm8k"]) == [SHORT]
    inputs.make(SHORT)
    assert inputs.missing([SHORT]) == []
    other = Inputs(tmp_path / "b")
    other.make(SHORT)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert inputs.open(SHORT).manifest.origin == "synthetic"


def test_a_file_in_the_place_of_a_synthetic_trace_is_found_before_it_is_made(tmp_path):
    place = Inputs(tmp_path / "traces").path(SHORT)
    place.parent.mkdir()
    place.write_text("mine")
    grid = [RunPoint(SHORT, policy="lru", cache=4, profile="h200-llada2.0-mini")]
    one = replace(counting(tmp_path / "log"), points=lambda size: grid)
    with pytest.raises(UsageError, match=f"{place} is a file in the place of a synthetic trace"):
        run_experiments([one], "quick", tmp_path)
    assert [*place.parent.iterdir()] == [place]


def test_a_trace_that_another_process_has_made_is_taken(tmp_path):
    inputs = Inputs(tmp_path)
    path = inputs.make(SHORT)
    before = content(tmp_path)
    assert inputs.make(SHORT) == path
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"requests": 2},
        {"output_tokens": 32},
        {"block_length": 8},
        {"signals": ("embedding",)},
    ],
)
def test_every_setting_of_a_synthetic_trace_decides_about_its_folder(tmp_path, change):
    inputs = Inputs(tmp_path)
    assert inputs.path(replace(SHORT, **change)) != inputs.path(SHORT)


def many():
    """Runs that share the trace, and some that do not."""
    same = [replace(RUN, policy=p, cache=c) for p in ("lru", "oled", "full") for c in (8, 16)]
    unlike = [
        replace(RUN, trace="nano-humaneval"), replace(RUN, batch=2), replace(RUN, history=0),
        replace(RUN, extrapolate=True),
    ]  # fmt: skip
    return [*same, replace(RUN, link_gb_s=16.0), *unlike]


def test_runs_that_differ_in_policy_cache_and_link_are_measured_in_one_go():
    pieces = in_one_go(many(), jobs=1)
    assert sorted(point for piece in pieces for point in map(repr, piece)) == sorted(
        map(repr, many())
    )
    assert all(len({point.group() for point in piece}) == 1 for piece in pieces)
    assert [len(piece) for piece in pieces] == [2, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("jobs", [1, 3])
def test_pieces_stay_small_enough_to_resume_and_to_share_out(jobs):
    points = [replace(RUN, cache=c) for c in range(1, 200)]
    pieces = in_one_go(points, jobs)
    assert max(map(len, pieces)) == TOGETHER
    few = in_one_go(points[:12], jobs)
    assert len(few) >= 4 * jobs


def test_runs_in_one_go_are_those_that_run_alone(tmp_path):
    points = many()[:7]
    together = RunPoint.measure_group(points, Inputs(tmp_path))
    assert together == [point.measure(Inputs(tmp_path)) for point in points]


def parts(out):
    return {file.stem for file in (out / "parts").iterdir()}


def test_parts_that_no_table_holds_any_more_are_deleted(tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    run_experiments([counting(log, (1, 2)), counting(log, (2, 3), name="other")], "quick", out)
    (out / "parts" / "mine.parquet").write_text("mine")
    keys = {n: Store(out).key(Counted("nano-gsm8k", n, str(log))) for n in (1, 2, 3, 4)}
    run_experiments([counting(log, (4,))], "full", out)  # another size leaves the parts alone
    assert parts(out) == {*keys.values(), "mine"}
    run_experiments([counting(log, (1, 2))], "quick", out)
    run_experiments([counting(log, (4,))], "quick", out)
    assert parts(out) == {keys[2], keys[3], keys[4], "mine"}  # 2 is part of the other table
    assert pd.read_parquet(out / "other.parquet")["number"].tolist() == [2, 2, 3, 3]


def test_a_damaged_manifest_names_nothing(tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    run_experiments([counting(log, (1,))], "quick", out)
    (out / "counting.manifest.json").write_text("{")
    before = parts(out)
    run_experiments([counting(log, (2,))], "quick", out)
    assert before < parts(out)


def test_a_column_that_the_first_row_lacks_is_kept(tmp_path):
    store, point = Store(tmp_path), Counted("nano-gsm8k", 1, "")
    store.keep(point, [{"request": 0}, {"request": 1, "late": 2.5}, {"late": 1.5}])
    table = pd.read_parquet(store.part(point))
    assert table["late"].isna().tolist() == [True, False, False]
    assert table["late"].sum() == 4.0
    assert table["request"].isna().tolist() == [False, False, True]
