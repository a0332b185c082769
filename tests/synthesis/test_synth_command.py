"""``oled-sim synth``."""

import json

import pytest
from click.testing import CliRunner
from synthetic_recipes import small_recipe

from oled_sim.cli.synth import synth
from oled_sim.synthesis.generate import write_synthetic
from oled_sim.trace import open_trace

SMALL = ["--model", "fitted", "--requests", "2", "--output-tokens", "20", "--jobs", "1"]


def run(*arguments):
    return CliRunner().invoke(synth, [str(a) for a in arguments])


def test_writes_a_marked_trace_for_each_relation(tmp_path):
    result = run(*SMALL, "--full-gate", "--embedding", "--out", tmp_path / "t", "--json")
    assert result.exit_code == 0, result.output
    summaries = json.loads(result.stdout)["traces"]
    assert [s["coupling"] for s in summaries] == ["measured", "none", "positive"]
    for summary in summaries:
        trace = open_trace(summary["out"])
        assert trace.manifest.origin == summary["origin"] == "synthetic"
        assert summary["coupling"] in trace.manifest.notes
        assert {"full_gate", "embedding"} <= trace.signals
        assert sum(request.events for request in trace) == summary["events"]


def test_nothing_is_overwritten_unasked(tmp_path):
    arguments = [*SMALL, "--coupling", "none", "--out", tmp_path / "t"]
    assert run(*arguments).exit_code == 0
    again = run(*arguments)
    assert again.exception is not None
    assert "not empty" in str(again.exception)
    assert run(*arguments, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "gsm8"], "did you mean 'gsm8k'"),
        (["--model", "gpt"], "unknown model 'gpt'"),
        ([], "no place for the traces"),
    ],
)
def test_mistakes_get_a_sentence(arguments, message):
    assert message in str(run(*arguments).exception)


def test_the_report_holds_all_figures(tmp_path):
    result = run("--model", "fitted", "--report", "--requests", "2", "--coupling", "none", "--json")
    assert result.exit_code == 0, result.output
    (lines,) = json.loads(result.stdout)["couplings"].values()
    kinds = {line["kind"] for line in lines}
    assert {"fitted", "held out"} <= kinds
    assert {"lru_20", "reuse_next", "activated", "gate_first"} <= {x["statistic"] for x in lines}
    table = run("--model", "fitted", "--report", "--requests", "2", "--coupling", "none")
    assert "held out" in table.output


def test_the_same_bytes_on_any_number_of_processes(tmp_path):
    recipe = small_recipe()
    one = write_synthetic(tmp_path / "one", recipe, 3, jobs=1)
    two = write_synthetic(tmp_path / "two", recipe, 3, jobs=2)
    assert one == two
    assert (tmp_path / "one/manifest.json").read_bytes() == (
        tmp_path / "two/manifest.json"
    ).read_bytes()


def test_the_first_run_says_that_it_compiles(tmp_path, monkeypatch):
    arguments = [*SMALL, "--coupling", "none", "--out", tmp_path / "t", "--overwrite"]
    run(*arguments)
    assert "Compiling" not in run(*arguments).stderr
    monkeypatch.setattr("oled_sim.cli.progress.is_compiled", lambda kernel: False)
    result = run(*arguments)
    assert result.stderr == "Compiling kernels once, about half a minute\n"
    assert "Compiling" not in result.stdout
