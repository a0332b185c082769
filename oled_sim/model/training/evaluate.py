"""Everything that is measured of a trained model, on text it has not seen.

``python -m oled_sim.model.training.evaluate --model DIR --recipe nano --data DATA`` repeats it
for a saved checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer

from oled_sim.model.checkpoint import load_checkpoint
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.loading import pick_device
from oled_sim.model.training.answering import answer, read_questions
from oled_sim.model.training.balance import imbalance
from oled_sim.model.training.calibration import decode_with_truth
from oled_sim.model.training.card import write_card
from oled_sim.model.training.data import Batch, mixture, prepare, to_device
from oled_sim.model.training.likelihood import elbo_nats_per_token
from oled_sim.model.training.objective import Runner, evaluation_runner
from oled_sim.model.training.packing import Windows
from oled_sim.model.training.recipe import Recipe, load_recipe
from oled_sim.model.training.report import (
    REPORT_FILE,
    environment,
    read_report,
    write_report,
)
from oled_sim.model.training.tokenizer import load_tokenizer

SAMPLE_THRESHOLD = 0.7
STEPS = 32
"""Denoising steps per block of LLaDA2.0's rule."""


def evaluate(
    model: LLaDA2MoeModelLM,
    recipe: Recipe,
    validation: Mapping[str, Windows],
    tokenizer: Tokenizer,
    data: Path,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure a model in evaluation mode; ``say`` gets a line per finished part.

    Returns:
        ``evaluation`` (where and how), ``elbo_nats_per_token``, ``router``, ``acceptance``,
        ``answers`` and ``samples``.
    """
    runner = evaluation_runner(model)
    batches = {
        name: to_device(windows.head(recipe.evaluation.windows), model.device)
        for name, windows in validation.items()
    }
    report: dict[str, Any] = {"evaluation": environment(model.device)}
    report["evaluation"] |= msgspec.to_builtins(recipe.evaluation)
    report["elbo_nats_per_token"] = measure_elbo(runner, recipe, batches)
    say(f"elbo, nats per token: {report['elbo_nats_per_token']}")
    report["router"] = router_loads(runner)
    say(f"router, largest over mean load: {report['router']}")
    report["acceptance"] = measure_acceptance(runner, recipe, batches)
    say(f"acceptance on held-out text: {_brief(report['acceptance'])}")
    report["answers"], report["samples"] = measure_answers(model, recipe, tokenizer, data)
    say(f"answers: {report['answers']}")
    return report


def measure_elbo(runner: Runner, recipe: Recipe, batches: Mapping[str, Batch]) -> dict[str, float]:
    """Return nats per token by source, and their mean under the mixture of the whole run."""
    chosen = recipe.evaluation
    by_source = {
        name: elbo_nats_per_token(
            runner,
            batch,
            block_length=chosen.block_length,
            strata=chosen.strata,
            seed=recipe.seed,
        )
        for name, batch in batches.items()
    }
    shares = mixture(recipe.data.sources, 0.5)
    values = [by_source[source.name] for source in recipe.data.sources]
    rounded = {name: round(value, 4) for name, value in by_source.items()}
    return rounded | {"mixture": round(float(np.dot(shares, values)), 4)}


def router_loads(runner: Runner) -> dict[str, float]:
    """Return largest over mean expert load per layer, of all passes so far; start anew."""
    ratios = imbalance(runner.loads).tolist()
    runner.loads.zero_()
    layers = runner.model.config.moe_layers
    return {str(layer): round(ratio, 3) for layer, ratio in zip(layers, ratios, strict=True)}


def measure_acceptance(
    runner: Runner, recipe: Recipe, batches: Mapping[str, Batch]
) -> dict[str, dict[str, Any]]:
    """Return acceptance and calibration by threshold and source (``all``: summed)."""
    length = recipe.evaluation.block_length
    report: dict[str, dict[str, Any]] = {}
    for threshold in recipe.evaluation.thresholds:
        counts = {
            name: decode_with_truth(runner, batch, block_length=length, threshold=threshold)
            for name, batch in batches.items()
        }
        summed = sum(counts.values(), start=next(iter(counts.values())).zero())
        report[str(threshold)] = {n: c.summary() for n, c in (counts | {"all": summed}).items()}
    return report


def measure_answers(
    model: LLaDA2MoeModelLM, recipe: Recipe, tokenizer: Tokenizer, data: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return figures by threshold, and the first answers as samples (row and text)."""
    chosen = recipe.evaluation
    questions = read_questions(data / chosen.prompt_file, chosen.prompts)
    figures, samples = {}, []
    for threshold in sorted({*chosen.thresholds, SAMPLE_THRESHOLD}):
        settings = DecodeSettings(
            block_length=chosen.block_length,
            max_new_tokens=chosen.new_tokens,
            threshold=threshold,
            steps=STEPS,
        )
        figures[str(threshold)], texts = answer(model, tokenizer, questions, settings)
        if threshold == SAMPLE_THRESHOLD:
            pairs = zip(questions, texts, strict=True)
            samples = [{"row": q.row, "text": text} for q, text in pairs][: chosen.samples]
    return figures, samples


def _brief(acceptance: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    keys = ("tokens_per_pass", "confidence", "accuracy")
    return {
        threshold: {name: [round(s[key], 3) for key in keys] for name, s in by_source.items()}
        for threshold, by_source in acceptance.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate a saved checkpoint anew; update its report and card."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device")
    sizes = ("windows", "strata", "prompts")
    for name in sizes:
        parser.add_argument(f"--{name}", type=int, help="instead of the recipe's")
    chosen = parser.parse_args(arguments)
    recipe, device = load_recipe(chosen.recipe), pick_device(chosen.device)
    changes = {name: value for name in sizes if (value := getattr(chosen, name))}
    evaluation = msgspec.structs.replace(recipe.evaluation, **changes)
    recipe = msgspec.structs.replace(recipe, evaluation=evaluation)
    tokenizer = load_tokenizer(str(chosen.model / "tokenizer.json"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_checkpoint(chosen.model, device, dtype)
    prepared = prepare(recipe.data, chosen.data, tokenizer)
    report = read_report(chosen.model / REPORT_FILE)
    found = evaluate(model, recipe, prepared.validation, tokenizer, chosen.data, print)
    write_report(chosen.model / REPORT_FILE, report | found)
    write_card(chosen.model)


if __name__ == "__main__":
    main()
