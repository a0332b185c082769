"""Train narrow-mini and record its traces: GSM8K, HumanEval and science prompts.

``python scripts/record_mini.py --data DATA --work WORK --out OUT`` needs one GPU and about 15
minutes: training, a threshold per prompt set, then all recordings side by side. Weights stay in
``WORK``; ``OUT`` gets the training report and card, logs, and the traces as two tar files in
pieces. Every step runs the package's own command lines; a step that fails or outlasts
``--stop-after`` is named, and what the others made is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SUBJECTS = (
    "college_physics",
    "college_chemistry",
    "college_biology",
    "astronomy",
    "high_school_physics",
    "high_school_chemistry",
)
"""Subjects of MMLU-STEM nearest to GPQA; the science prompts take turns among them."""

SETS = {"gsm8k": "gsm8k_test.jsonl", "humaneval": "humaneval.jsonl.gz", "science": "science.jsonl"}
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
"""Thresholds that are tried; the highest that accepts :data:`WANTED` tokens per pass is taken."""

WANTED = 2.5
SIGNALS = ("--full-gate", "--embedding", "--cosines")
BLOCK_LENGTHS = (1, 4, 8, 32, 64)
PIECE_BYTES = 15 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and the file that takes its output."""

    name: str
    arguments: tuple[str, ...]
    log: Path


def main() -> None:
    """Run all phases."""
    chosen = _parse()
    deadline = time.monotonic() + chosen.stop_after
    chosen.out.mkdir(parents=True, exist_ok=True)
    model = chosen.work / chosen.recipe
    prompts = make_prompts(chosen.data / "prompts", chosen.work / "prompts")
    run_all([training(chosen, model)], deadline, chosen.out)
    thresholds = choose_thresholds(chosen, model, prompts, deadline)
    traces = chosen.work / "traces"
    recordings = main_recordings(chosen, model, prompts, thresholds)
    others = other_recordings(chosen, model, prompts, thresholds)
    steps = [
        collecting(chosen, name, arguments, traces / name)
        for name, arguments in (recordings | others).items()
    ]
    run_all([*steps, evaluation(chosen, model)], deadline, chosen.out)
    pack(traces, recordings, chosen.out / "traces-main.tar")
    pack(traces, others, chosen.out / "traces-more.tar")
    for file in ("training.json", "MODEL_CARD.md", "loss.png", "config.json", "prompt.json"):
        if (model / file).exists():
            shutil.copy(model / file, chosen.out)
    say("done")


def make_prompts(source: Path, folder: Path) -> dict[str, Path]:
    """Put the three sets in one folder; science rows are rewritten with their choices."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (source / "mmlu_stem.jsonl").open(encoding="utf-8")]
    lines = "".join(json.dumps(row) + "\n" for row in science_rows(rows))
    (folder / SETS["science"]).write_text(lines, encoding="utf-8")
    for name in ("gsm8k", "humaneval"):
        shutil.copy(source / SETS[name], folder)
    return {name: folder / file for name, file in SETS.items()}


def science_rows(rows: Sequence[Mapping[str, object]]) -> Iterable[dict[str, object]]:
    """Yield the rows of :data:`SUBJECTS` in turn, choices behind the question, upstream's row."""
    by_subject = [[(n, r) for n, r in enumerate(rows) if r["type"] == s] for s in SUBJECTS]
    for turn in zip(*by_subject, strict=False):
        for number, row in turn:
            choices = row["choices"]
            assert isinstance(choices, list)
            lettered = " ".join(
                f"({letter}) {c}" for letter, c in zip("ABCD", choices, strict=True)
            )
            yield {"question": f"{row['question']}\n{lettered}", "mmlu_stem_row": number}


def training(chosen: argparse.Namespace, model: Path) -> Step:
    """Return the training run."""
    arguments = (
        "-m", "oled_sim.model.training", "--recipe", chosen.recipe, "--data", str(chosen.data),
        "--out", str(model), "--no-evaluation", "--train-seconds", str(chosen.train_seconds),
    )  # fmt: skip
    return Step("training", arguments, chosen.out / "training.log")


def evaluation(chosen: argparse.Namespace, model: Path) -> Step:
    """Return the evaluation of the trained model, which also writes the card."""
    arguments = (
        "-m", "oled_sim.model.training.evaluate", "--recipe", chosen.recipe,
        "--data", str(chosen.data), "--model", str(model),
    )  # fmt: skip
    return Step("evaluation", arguments, chosen.out / "evaluation.log")


def collecting(
    chosen: argparse.Namespace, name: str, arguments: Sequence[str], trace: Path
) -> Step:
    """Return one recording; all requests of up to ``--batch`` run together."""
    command = (
        "-m", "oled_sim", "collect", *arguments, "--batch", str(chosen.batch), "--redact-prompts",
        "--ignore-eos", "--out", str(trace), "--overwrite", "--json",
    )  # fmt: skip
    return Step(name, command, chosen.work / "logs" / f"{name}.json")


def choose_thresholds(
    chosen: argparse.Namespace, model: Path, prompts: Mapping[str, Path], deadline: float
) -> dict[str, float]:
    """Return the threshold of each set; what was measured goes to ``thresholds.json``."""
    steps = {}
    for name, path in prompts.items():
        for threshold in THRESHOLDS:
            arguments = _prompting(path, model, threshold, min(12, chosen.requests))
            arguments += ["--max-new-tokens", str(min(96, chosen.new_tokens))]
            label = f"try-{name}-{threshold}"
            trace = chosen.work / "tries" / label
            steps[name, threshold] = collecting(chosen, label, arguments, trace)
    run_all(list(steps.values()), deadline, chosen.out)
    measured = {key: tokens_per_pass(step.log) for key, step in steps.items()}
    picked = {name: pick({t: measured[name, t] for t in THRESHOLDS}) for name in prompts}
    table = {n: {str(t): measured[n, t] for t in THRESHOLDS} for n in prompts}
    report = {"tokens_per_denoise_pass": table, "chosen": picked}
    (chosen.out / "thresholds.json").write_text(json.dumps(report, indent=1) + "\n")
    say(f"thresholds {report}")
    return picked


def tokens_per_pass(log: Path) -> float:
    """Read the figure that a recording printed; 0 where it failed."""
    try:
        return float(json.loads(log.read_text())["tokens_per_denoise_pass"] or 0.0)
    except (OSError, ValueError, KeyError):
        return 0.0


def pick(measured: Mapping[float, float]) -> float:
    """Return the highest threshold with :data:`WANTED` tokens per pass, else the lowest."""
    enough = [threshold for threshold, tokens in measured.items() if tokens >= WANTED]
    return max(enough, default=min(measured))


def main_recordings(
    chosen: argparse.Namespace,
    model: Path,
    prompts: Mapping[str, Path],
    thresholds: Mapping[str, float],
) -> dict[str, list[str]]:
    """Return the recordings of the three sets at block length 16, base signals."""
    tokens = ["--max-new-tokens", str(chosen.new_tokens)]
    return {
        f"mini-{name}": [*_prompting(path, model, thresholds[name], chosen.requests), *tokens]
        for name, path in prompts.items()
    }


def other_recordings(
    chosen: argparse.Namespace,
    model: Path,
    prompts: Mapping[str, Path],
    thresholds: Mapping[str, float],
) -> dict[str, list[str]]:
    """Return the recordings of a few requests: all signals, block lengths, rule 2.1."""
    few = min(8, chosen.requests)
    tokens = ["--max-new-tokens", str(chosen.new_tokens)]
    found = {}
    for name, path in prompts.items():
        base = [*_prompting(path, model, thresholds[name], few), *tokens]
        found[f"mini-{name}-signals"] = [*base, *SIGNALS]
    base = [*_prompting(prompts["gsm8k"], model, thresholds["gsm8k"], few), *tokens]
    for length in BLOCK_LENGTHS:
        found[f"mini-gsm8k-block{length}"] = [*base, "--block-length", str(length)]
    found["mini-gsm8k-editing"] = [*base, "--rule", "2.1"]
    return found


def _prompting(path: Path, model: Path, threshold: float, limit: int) -> list[str]:
    limits = ["--threshold", str(threshold), "--limit", str(limit)]
    return ["--prompts", str(path), "--model", str(model), *limits]


def run_all(steps: Sequence[Step], deadline: float, out: Path) -> None:
    """Run steps side by side until the deadline; say how each ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "1" if len(steps) > 1 else "8"}
    running = {}
    for step in steps:
        step.log.parent.mkdir(parents=True, exist_ok=True)
        errors = (out / f"{steps[0].name}.errors.log").open("ab")
        command = [sys.executable, *step.arguments]
        running[step.name] = subprocess.Popen(
            command, stdout=step.log.open("wb"), stderr=errors, env=environment
        )
    say(f"started {', '.join(running)}")
    for name, process in running.items():
        say(f"{name}: {_outcome(process, deadline)}")


def _outcome(process: subprocess.Popen[bytes], deadline: float) -> str:
    try:
        return f"exit code {process.wait(max(1.0, deadline - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        process.terminate()
        return "stopped: out of time"


def pack(traces: Path, names: Iterable[str], target: Path) -> None:
    """Write the traces that exist to a tar file, in pieces of :data:`PIECE_BYTES`."""
    with tarfile.open(target, "w") as tar:
        for name in names:
            if (traces / name).exists():
                tar.add(traces / name, arcname=name)
    data = target.read_bytes()
    target.unlink()
    for number, first in enumerate(range(0, len(data), PIECE_BYTES)):
        piece = target.with_name(f"{target.name}.{number:02}")
        piece.write_bytes(data[first : first + PIECE_BYTES])


def say(line: str) -> None:
    """Print a line with the time of day in seconds."""
    print(f"[{time.monotonic():9.1f}] {line}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="narrow-mini")
    parser.add_argument("--train-seconds", type=float, default=600.0)
    parser.add_argument("--stop-after", type=float, default=890.0, help="seconds")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
