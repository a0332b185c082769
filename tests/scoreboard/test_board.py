"""Claims judged by tables, and the scoreboard as text, table and command."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from oled_sim.cli.main import cli
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.experiment import experiment_names
from oled_sim.planning import accuracy
from oled_sim.scoreboard.board import judge_all, load_claims, machine_of, replay_table
from oled_sim.scoreboard.claim import REPLAYS, Claim
from oled_sim.scoreboard.table import board_table
from oled_sim.scoreboard.text import Coverage, counts, figure, markdown
from oled_sim.scoreboard.verdict import Verdict, exactly


def gain(panel):
    return panel.mean("tpot_us", policy="lru") / panel.mean("tpot_us", policy="oled")


CLAIM = Claim(
    "gain", "5.2", "OLED | gain", exactly(2.0, no_effect=1), "×", "fig12", gain,
    names=("policy",), constructed=("synthetic",), replayed=True, why="Because.",
)  # fmt: skip


def table(ratio, origin="real", profile="h200-llada2.0-mini", policies=("lru", "oled")):
    """Return three requests on which LRU takes ``ratio`` times as long."""
    return pd.DataFrame(
        {
            "origin": origin,
            "profile": profile,
            "trace": f"{origin}-trace",
            "policy": policy,
            "request": i,
            "tpot_us": (ratio if policy == "lru" else 1.0) * (i + 1),
        }
        for policy in policies
        for i in range(3)
    )


def judged(*parts, claim=CLAIM, **tables):
    (found,) = judge_all([claim], {"fig12": pd.concat(parts), **tables}, seed=0)
    return found


def test_every_evidence_and_machine_has_a_reading():
    board = judged(
        table(2.0, "synthetic"),
        table(1.0),
        table(1.9, profile="paper-testbed-llada2.0-mini"),
    )
    readings = {(r.evidence, r.machine): r.verdict for r in board.readings}
    assert readings == {
        ("synthetic", "h200"): Verdict.BY_CONSTRUCTION,
        ("real", "h200"): Verdict.NOT_REPRODUCED,
        ("real", "paper-testbed"): Verdict.REPRODUCED,
    }


def test_what_was_built_into_synthetic_traces_is_judged_on_real_ones():
    board = judged(table(2.0, "synthetic"), table(1.0))
    assert board.verdict("h200") is Verdict.NOT_REPRODUCED
    assert judged(table(2.0, "synthetic")).verdict("h200") is Verdict.BY_CONSTRUCTION


def test_else_synthetic_traces_come_first_and_replays_last():
    claim = dataclasses.replace(CLAIM, constructed=())
    replays = {REPLAYS: table(1.0, "measured")}
    both = judged(table(2.0, "synthetic"), table(1.0), claim=claim, **replays)
    assert both.verdict("h200") is Verdict.REPRODUCED
    assert [r.evidence for r in both.readings] == ["synthetic", "real", "measured"]
    (alone,) = judge_all([claim], replays, seed=0)
    assert alone.verdict("h200") is Verdict.NOT_REPRODUCED


def test_a_missing_setting_or_table_gives_no_reading():
    assert judged(table(2.0, policies=("lru",))).verdict("h200") is Verdict.NOT_TESTABLE
    (found,) = judge_all([CLAIM], {}, seed=0)
    assert found.verdict("") is Verdict.NOT_TESTABLE
    without_column = table(2.0).drop(columns="tpot_us")
    assert judged(without_column).readings == ()


def test_other_errors_of_a_statistic_are_not_swallowed():
    def broken(panel):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        judged(table(2.0), claim=dataclasses.replace(CLAIM, statistic=broken))


def test_machine_of():
    names = pd.DataFrame({"profile": ["h200-llada2.0-mini", "paper-testbed-llada2.0-flash", None]})
    assert machine_of(names).tolist() == ["h200", "paper-testbed", ""]
    assert machine_of(pd.DataFrame({"a": [1]})).tolist() == [""]


def points(**more):
    columns = {"decide_mean_us": 1.0, "decode_passes": 2, "output_tokens": 3}
    rows = [("lru", "mini-gsm8k", 20.0), ("oled", "mini-gsm8k", 10.0)]
    found = pd.DataFrame(rows, columns=["policy", "trace", "measured_tpot_us"])
    return found.assign(cache=40, **columns, **more)


def test_replays_are_read_like_an_experiment():
    replays = replay_table([("h200-llada2.0-mini", points())])
    assert set(replays["model"]) == {"llada2.0-mini"}
    (found,) = judge_all([CLAIM], {REPLAYS: replays}, seed=0)
    assert [(r.evidence, r.machine, r.estimate.value) for r in found.readings] == [
        ("measured", "h200", 2.0)
    ]
    with pytest.raises(MeasurementError, match="cache"):
        replay_table([("h200-llada2.0-mini", points().drop(columns="cache"))])


def test_markdown_holds_every_figure_and_escapes_bars():
    text = markdown([judged(table(2.0, "synthetic"), table(1.9))])
    assert "OLED \\| gain" in text
    assert "2.00× (2.00–2.00) □" in text
    assert "1.90× (1.90–1.90) ●" in text
    assert text.splitlines()[0].startswith("| costs of | ● reproduced")
    assert "| reproduced | Because. |" in text


def test_markdown_says_how_much_was_measured():
    text = markdown([judged(table(2.0))], [Coverage("fig12", 60, 1216), Coverage("fig13", 1, 2)])
    assert text.endswith("of the grids: fig12 60 of 1,216, fig13 1 of 2.\n")
    assert "grids" not in markdown([judged(table(2.0))])


def test_counts_add_up():
    board = [judged(table(2.0)), judged(table(1.0))]
    found = counts(board, "h200")
    assert (found[Verdict.REPRODUCED], found[Verdict.NOT_REPRODUCED]) == (1, 1)
    assert sum(found.values()) == 2


def test_a_row_per_reading_and_one_for_a_claim_without():
    untested = dataclasses.replace(CLAIM, key="x", experiment=None)
    rows = board_table([judged(table(2.0)), *judge_all([untested], {}, seed=0)]).to_pylist()
    assert [(r["key"], r["evidence"], r["verdict"]) for r in rows] == [
        ("gain", "real", "reproduced"),
        ("x", None, "not testable here"),
    ]


def test_a_claim_that_tables_do_not_tell_says_so():
    claim = dataclasses.replace(CLAIM, why="Their traces differ.")
    (untold,) = judge_all([claim], {}, seed=0)
    assert untold.why == "No table of this run has the settings that it compares."
    (untestable,) = judge_all([dataclasses.replace(claim, experiment=None)], {}, seed=0)
    assert untestable.why == "Their traces differ."
    assert dataclasses.replace(judged(table(2.0)), claim=claim).why == "Their traces differ."


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (-0.5, "−0.50"), (-0.001, "0.00")],
)
def test_figures(value, text):
    assert figure(value) == text


def test_registered_claims_are_whole():
    claims = load_claims()
    assert len(claims) > 40
    for claim in claims:
        assert claim.text and claim.section, claim.key
        assert claim.experiment is not None or claim.why, claim.key
        if not claim.stated.numeric:
            assert claim.stated.text, claim.key


def test_claims_name_experiments_that_are_there():
    wanted = {claim.experiment for claim in load_claims()} - {None}
    assert wanted <= set(experiment_names())


def test_the_command_judges_what_is_there(tmp_path, monkeypatch):
    rows = [
        {
            "origin": "real", "profile": "h200-llada2.0-mini", "model": "llada2.0-mini",
            "data_set": "gsm8k", "trace": "t", "policy": policy, "cache": 40, "request": i,
            "tpot_us": tpot * (1 + i), "utilization": used,
        }
        for policy, tpot, used in (
            ("moe-infinity", 40.0, 0.4), ("finemoe", 20.0, 0.5), ("ktransformers", 60.0, 0.3),
            ("oled", 10.0, 0.8),
        )
        for i in range(3)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "fig12.parquet")
    monkeypatch.setattr(accuracy, "results_folder", lambda: tmp_path / "nothing")
    arguments = ["reproduce", "--no-run", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    verdicts = json.loads(result.stdout)["verdicts"]["h200"]
    assert verdicts["strongest-average"] == "reproduced"  # 2.00 for 1.95
    assert verdicts["gain-most"] == "in direction"  # 6.0 for 7.93
    assert verdicts["gain-flash"] == "not testable here"
    written = pq.read_table(tmp_path / "reproduction.parquet").to_pandas()
    row = written.set_index("key").loc["used-oled"]
    assert row["value"] == pytest.approx(80.0)
    assert np.isclose([row["low"], row["high"]], 80.0).all()
    first = (tmp_path / "reproduction.md").read_bytes()
    again = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert "strongest-average" in again.stdout
    assert (tmp_path / "reproduction.md").read_bytes() == first


def test_a_folder_without_tables_is_refused(tmp_path):
    arguments = ["reproduce", "--no-run", "--out", str(tmp_path / "mistyped")]
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, UsageError)
    assert "holds no table of an experiment" in str(result.exception)
    assert not (tmp_path / "mistyped").exists()
