"""`oled-sim generate`, end to end on a tiny checkpoint."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import msgspec
import pyarrow.parquet as pq
import pytest

from oled_sim.cli.main import main
from oled_sim.costs.store import save_profile
from oled_sim.costs.synthetic import affine_profile
from oled_sim.geometry import find_geometry
from oled_sim.offloaded import job
from oled_sim.offloaded.recording import record_resident
from oled_sim.trace import open_trace

QUICK = [
    "--block-length", "8", "--max-new-tokens", "16", "--threshold", "0.05", "--device", "cpu",
    "--workers", "1", "--staging", "4",
]  # fmt: skip


def call(*args):
    """Run the command in this process; return its exit code."""
    try:
        main([str(a) for a in args])
    except SystemExit as stop:
        return stop.code or 0
    return 0


def test_a_run_with_everything(tmp_path, checkpoint, capsys):
    trace, out = tmp_path / "t", tmp_path / "figures.parquet"
    code = call(
        "generate", "--model", checkpoint, "--cache", 5, "--prompt", "What is 3 + 4?",
        "--prompt", "Count: ", "--check-forced", "--record", trace, "--out", out, "--json", *QUICK,
    )  # fmt: skip
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["forced_identical"] == [True, True]
    assert found["decisions"]["identical"] and found["decisions"]["events"] > 20
    assert found["measured"]["summary"]["hit_rate"] == found["predicted"]["summary"]["hit_rate"]
    assert found["measured"]["summary"]["tpot_us"] > 0 and found["decide_us"] > 0
    assert len(found["requests"]) == 2 and not found["predicts_this_model"]
    assert found["copied_bytes"] % found["expert_bytes"] == 0
    assert call("trace", "validate", trace) == 0
    manifest = open_trace(trace).manifest
    assert [r.output_tokens for r in manifest.requests] == [
        len(r["tokens"]) for r in found["requests"]
    ]
    assert "3 + 4" not in (trace / "manifest.json").read_text()
    rows = pq.read_table(out).to_pylist()
    assert {row["source"] for row in rows} == {"measured", "predicted"}
    capsys.readouterr()
    assert call("run", "--trace", trace, "--policy", "oled", "--cache", 5, "--history", 0,
                "--staging", 4, "--json") == 0  # fmt: skip
    again = json.loads(capsys.readouterr().out)["results"][0]
    assert again["summary"] == found["predicted"]["summary"]


def test_what_people_read(tmp_path, checkpoint, capsys):
    base = ["generate", "--model", checkpoint, "--policy", "lru", "--cache", 5, *QUICK]
    assert call(*base, "--limit", 2, "--no-compare") == 0
    said = capsys.readouterr().out
    for words in ("request 1", "measured", "predicted", "equal in all", "1 warm-up + 1 counted",
                  "Predicted times are those of llada2.0-mini"):  # fmt: skip
        assert words in said
    assert "Resident run" not in said
    assert "Weights are float32, 4 bytes each, and those of llada2.0-mini have 2" in " ".join(
        said.split()
    )
    assert call(*base, "--prompt", "a", "--check-forced") == 0
    said = capsys.readouterr().out
    assert "Resident run: the same tokens" in said
    assert "Forced run: the same tokens in 1 of 1" in said


def test_a_model_without_its_experts_on_the_device_says_the_same(checkpoint, capsys):
    base = ["generate", "--model", checkpoint, "--cache", 5, "--prompt", "Count: ", "--json"]
    texts = []
    for more in ([], ["--no-compare"]):
        assert call(*base, *more, *QUICK) == 0
        texts.append(json.loads(capsys.readouterr().out)["requests"][0]["tokens"])
    assert texts[0] == texts[1]


def test_tokens_that_differ_in_a_forced_run_are_an_error(checkpoint, capsys, monkeypatch):
    def perturbed(model, *args):
        weight = model.lm_head.weight
        before = weight.clone()
        weight.copy_(weight.flip(0))
        try:
            return record_resident(model, *args)
        finally:
            weight.copy_(before)

    monkeypatch.setattr(job, "record_resident", perturbed)
    code = call(
        "generate", "--model", checkpoint, "--cache", 5, "--prompt", "a", "--check-forced", *QUICK
    )
    assert code == 1
    caught = capsys.readouterr()
    assert "tokens should be its own, but request 0 diverges by token at pass 0" in caught.err
    assert "Forced run: the same tokens in 0 of 1" in caught.out


CAPRICE = """
import random
from dataclasses import dataclass
import numpy as np
from oled_sim.policy import Policy

@dataclass
class Caprice(Policy):
    def score(self, layer, event):
        return np.array([random.random() for _ in range(self.experts)])
"""


def test_decisions_that_cannot_be_repeated_are_an_error(tmp_path, checkpoint, capsys):
    file = tmp_path / "caprice.py"
    file.write_text(CAPRICE)
    code = call(
        "generate", "--model", checkpoint, "--policy", file, "--cache", 5, "--prompt", "a",
        "--no-compare", *QUICK,
    )  # fmt: skip
    assert code == 1
    caught = capsys.readouterr()
    assert "decided otherwise" in caught.err and "events differ" in caught.out


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["--model", "nanno"], 2, "no model 'nanno'"),
        (["--policy", "belady"], 2, "looks into the future"),
        (["--policy", "oledd"], 2, "oled"),
        (["--prompt", "a", "--limit", "2"], 2, "leave it out with --prompt"),
        (["--max-new-tokens", "300"], 2, "shorten the prompt or generate less"),
        (["--geometry", "llada3"], 2, "unknown geometry 'llada3'"),
        (["--device", "tpu"], 2, "tpu"),
        (["--out", "figures.png"], 2, ".parquet"),
        (["--warmup", "1", "--limit", "1"], 2, "none to count: lower it, or give more prompts"),
        (["--policy", "lru", "--policy", "lfu"], 2, "give --policy once"),
        (["--record", "/proc/x/t"], 2, "/proc/x is no folder: create it first"),
    ],
)
def test_a_mistake_gets_a_sentence(tmp_path, checkpoint, capsys, args, code, sentence):
    base = ["generate", "--model", checkpoint, "--cache", 5, *QUICK]
    assert call(*base, "--record", tmp_path / "t", *args) == code
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error
    assert not (tmp_path / "t").exists()


def test_a_cache_has_to_be_given(checkpoint, capsys):
    assert call("generate", "--model", checkpoint, "--prompt", "a", *QUICK) == 2
    error = capsys.readouterr().err
    assert "--cache 40" in error and "8:128:8" not in error


def test_nothing_is_overwritten_unasked(tmp_path, checkpoint, capsys):
    base = ["generate", "--model", checkpoint, "--cache", 5, "--prompt", "a", "--no-compare",
            "--record", tmp_path / "t", *QUICK]  # fmt: skip
    assert call(*base) == 0
    before = (tmp_path / "t" / "manifest.json").read_bytes()
    assert call(*base) == 2
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "t" / "manifest.json").read_bytes() == before
    assert call(*base, "--force") == 0


def profile_without(path, table, **points):
    """Write a profile with fewer points of one table, named as the file."""
    profile = affine_profile(find_geometry("llada2.0-mini"))
    grid = msgspec.structs.replace(getattr(profile, table), **points)
    save_profile(msgspec.structs.replace(profile, **{table: grid}), path)
    return path


@pytest.mark.parametrize(
    ("table", "points", "sentence"),
    [
        ("dense", {"columns": [0, 8]}, "covers 0 to 8 context, not 24: allow"),
        ("dense", {"rows": [1, 15]}, "covers 1 to 15 tokens, not 16: allow"),
        ("gate", {"points": [1, 15]}, "covers 1 to 15 tokens, not 16: allow"),
    ],
)
def test_a_profile_that_may_not_reach_is_refused_before_the_run(
    tmp_path, checkpoint, capsys, table, points, sentence
):
    """Of 14 prompt tokens the first 8 are a block; 16 new ones end within the block from 24."""
    profile = profile_without(tmp_path / "p.toml", table, **points)
    base = ["generate", "--model", checkpoint, "--cache", 5, "--prompt", "What is 3 + 4?",
            "--no-compare", "--profile", profile, "--record", tmp_path / "t", *QUICK]  # fmt: skip
    assert call(*base) == 1
    said = capsys.readouterr()
    assert f"may lead beyond the profile: table {table}" in said.err and sentence in said.err
    assert said.out == "" and not (tmp_path / "t").exists()
    assert call(*base, "--extrapolate") == 0
    assert "predicted" in capsys.readouterr().out


def test_a_profile_that_just_reaches_is_enough(tmp_path, checkpoint, capsys):
    profile = profile_without(tmp_path / "p.toml", "dense", rows=[8, 16], columns=[0, 24])
    code = call("generate", "--model", checkpoint, "--cache", 5, "--prompt", "What is 3 + 4?",
                "--no-compare", "--ignore-eos", "--profile", profile, *QUICK)  # fmt: skip
    assert code == 0 and "predicted" in capsys.readouterr().out


def test_a_run_without_a_prediction_keeps_what_was_measured(tmp_path, checkpoint, capsys):
    """How many experts run where is known only afterwards."""
    profile = profile_without(tmp_path / "p.toml", "gpu_experts", rows=[1, 2])
    trace, out = tmp_path / "t", tmp_path / "figures.parquet"
    base = ["generate", "--model", checkpoint, "--cache", 5, "--prompt", "a", "--no-compare",
            "--profile", profile, *QUICK]  # fmt: skip
    assert call(*base, "--record", trace, "--out", out) == 1
    said = capsys.readouterr()
    for words in ("request 0: 16 tokens", "measured", "no prediction: table gpu_experts"):
        assert words in said.out
    assert "predicted" not in said.out and "no prediction: table gpu_experts" in said.err
    assert [row["source"] for row in pq.read_table(out).to_pylist()] == ["measured"]
    (command,) = re.findall(rf"Trace: {trace}; simulate it with: oled-sim (.*)", said.out)
    assert call(*shlex.split(command)) == 0
    capsys.readouterr()
    assert call(*base, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"] is None and found["decisions"] is None
    assert found["no_prediction"].startswith("table gpu_experts")
    assert found["measured"]["summary"]["tpot_us"] > 0 and found["requests"][0]["tokens"]


@pytest.mark.slow
def test_an_interrupt_leaves_finished_requests(tmp_path, checkpoint):
    prompts, out = tmp_path / "many.jsonl", tmp_path / "t"
    prompts.write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(400)))
    command = [
        sys.executable, "-m", "oled_sim", "generate", "--model", str(checkpoint), "--cache", "5",
        "--prompts", str(prompts), "--no-compare", "--record", str(out), *QUICK,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while len(list(out.glob("routing/*.parquet"))) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f" of 400 requests are in {out}, all readable" in error
    assert "Error: generate stopped: " in error and "Traceback" not in error
    assert call("trace", "validate", out) == 0


def test_help_is_there(capsys):
    assert call("generate", "--help") == 0
    said = capsys.readouterr().out
    assert "Examples:" in said and "--check-forced" in said
    assert "Makes the resident run even" in " ".join(said.split())


def test_more_workers_than_cores_are_refused(checkpoint, capsys):
    """They would poll each other's cores away, and hardly get on."""
    assert call("generate", "--model", checkpoint, "--cache", 5, "--workers", 9999) == 2
    assert "exceeds this machine's" in capsys.readouterr().err
