"""`oled-sim collect`, end to end on a tiny checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from oled_sim.cli.main import main
from oled_sim.trace import open_trace

QUICK = ["--block-length", "8", "--max-new-tokens", "16", "--threshold", "0.01", "--device", "cpu"]


def call(*args):
    """Run the command in this process; return its exit code."""
    try:
        main([str(a) for a in args])
    except SystemExit as stop:
        return stop.code or 0
    return 0


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": f"What is {n} + 1?"}) + "\n" for n in range(5)))
    return path


def test_a_recorded_trace_is_valid_and_says_how_it_was_made(tmp_path, checkpoint, prompts, capsys):
    out = tmp_path / "t"
    code = call(
        "collect", "--model", checkpoint, "--prompts", prompts, "--skip", 1, "--limit", 3,
        "--batch", 2, "--full-gate", "--cosines", "--embedding", "--redact-prompts",
        "--out", out, "--json", *QUICK,
    )  # fmt: skip
    assert code == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["requests"] == 3 and summary["tokens_per_denoise_pass"] >= 1
    manifest = open_trace(out).manifest
    assert [r.prompt_row for r in manifest.requests] == [1, 2, 3]
    assert sum(r.output_tokens for r in manifest.requests) == summary["output_tokens"]
    assert set(manifest.signals) >= {"full_gate", "cosines", "embedding", "confidence"}
    assert manifest.stands_for == "llada2.0-mini" and manifest.prompts.redacted
    assert manifest.decode.block_length == 8 and manifest.runtime.batch_size == 2
    assert "What is" not in (out / "manifest.json").read_text()
    assert call("trace", "validate", out) == 0


def test_a_finished_trace_is_left_alone_and_a_longer_one_continued(
    tmp_path, checkpoint, prompts, capsys
):
    base = ["collect", "--model", checkpoint, "--prompts", prompts, "--out", tmp_path / "t", *QUICK]
    assert call(*base, "--limit", 2) == 0
    before = (tmp_path / "t" / "manifest.json").read_bytes()
    capsys.readouterr()
    assert call(*base, "--limit", 2) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "t" / "manifest.json").read_bytes() == before
    assert call(*base, "--limit", 4, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["requests_already_there"]) == (2, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--threshold", "0.5"], "another 'decode'"),
        (["--skip", "1"], "answers another prompt"),
    ],
)
def test_another_job_does_not_mix_into_a_trace(
    tmp_path, checkpoint, prompts, capsys, change, sentence
):
    base = ["collect", "--model", checkpoint, "--prompts", prompts, "--limit", 2]
    assert call(*base, "--out", tmp_path / "t", *QUICK) == 0
    assert call(*base, "--out", tmp_path / "t", *QUICK, *change) == 1
    assert sentence in capsys.readouterr().err
    assert call(*base, "--out", tmp_path / "t", *QUICK, *change, "--overwrite") == 0


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["--model", "nanno"], 2, "no model 'nanno'"),
        (["--prompts", "absent.jsonl"], 2, "no prompts file"),
        (["--max-new-tokens", "300"], 2, "shorten the prompt or generate less"),
        (["--stands-for", "llada3"], 2, "unknown geometry 'llada3'"),
        (["--collector", "hf"], 2, "collector 'hf' records a model that you run yourself"),
        (["--device", "tpu"], 2, "tpu"),
        (["--limit", "0"], 2, "--limit"),
        (["--collector", "nativ"], 2, "did you mean 'native'"),
    ],
)
def test_a_mistake_gets_a_sentence_and_leaves_nothing(
    tmp_path, checkpoint, prompts, capsys, args, code, sentence
):
    out = tmp_path / "t"
    base = ["collect", "--model", checkpoint, "--prompts", prompts, "--out", out, *QUICK]
    assert call(*base, *args) == code
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error
    assert not out.exists()


def test_another_folder_is_not_touched(tmp_path, checkpoint, prompts, capsys):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("words")
    code = call(
        "collect", "--model", checkpoint, "--prompts", prompts, "--out", out, "--overwrite", *QUICK
    )
    assert code == 2 and "no trace" in capsys.readouterr().err
    assert (out / "thesis.txt").read_text() == "words"


@pytest.mark.slow
def test_an_interrupted_run_continues(tmp_path, checkpoint):
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(400)))
    out = tmp_path / "t"
    command = [
        sys.executable, "-m", "oled_sim", "collect", "--model", str(checkpoint),
        "--prompts", str(prompts), "--out", str(out), *QUICK,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # Whoever runs the tests in the background has it ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while len(list(out.glob("routing/*.parquet"))) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    done = len(open_trace(out).requests)
    said = f"Error: collect stopped: {done} of 400 requests are in {out}; the same command goes on"
    assert said in error and "Traceback" not in error
    assert 0 < done < 400
    assert call(*command[3:], "--limit", done + 2) == 0
    assert len(open_trace(out).requests) == done + 2
