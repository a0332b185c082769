"""Train a model from scratch.

``python -m oled_sim.model.training --recipe nano --data DATA --out DIR`` writes a checkpoint with
its tokenizer, ``training.json`` (log and measurements) and the model card. The weights are written
before evaluation starts, and now and then during training.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

from oled_sim.errors import OledSimError, UsageError
from oled_sim.model.checkpoint import SHARD_BYTES, load_checkpoint, save_checkpoint
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.loading import pick_device
from oled_sim.model.training.answering import TEMPLATES, TEMPLATES_FILE
from oled_sim.model.training.card import write_card
from oled_sim.model.training.data import Prepared, Sampler, prepare
from oled_sim.model.training.evaluate import evaluate
from oled_sim.model.training.loop import Trainer, TrainingLog
from oled_sim.model.training.objective import training_runner
from oled_sim.model.training.recipe import Recipe, describe, load_recipe
from oled_sim.model.training.report import (
    REPORT_FILE,
    environment,
    write_atomically,
    write_report,
)
from oled_sim.model.training.temperature import calibrate
from oled_sim.model.training.tokenizer import (
    EOS,
    MASK,
    load_tokenizer,
    sample_texts,
    token_id,
    train_tokenizer,
)

MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit codes as ``oled-sim``."""
    try:
        train(_parse(arguments))
    except OledSimError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Error: interrupted before or after training", file=sys.stderr)
        return 130
    return 0


def train(chosen: argparse.Namespace) -> dict[str, Any]:
    """Train as the arguments say; return the report."""
    started = time.monotonic()
    recipe, device = load_recipe(chosen.recipe), pick_device(chosen.device)
    _claim(chosen.out)
    tokenizer = _tokenizer(recipe, chosen.data)
    _check_ids(recipe, tokenizer)
    prepared = prepare(recipe.data, chosen.data, tokenizer)
    _say(started, f"data ready: {prepared.tokens()}")
    model = _new_model(recipe, device, chosen.init)
    store = _Store(chosen.out, tokenizer, chosen.shard_mib * MIB or SHARD_BYTES)
    seconds = chosen.train_seconds or recipe.train_seconds
    log = _run(
        recipe,
        model,
        prepared,
        seconds,
        lambda: store.save(model),
        lambda line: _say(started, line),
    )
    store.save(model)
    report = _report(recipe, model, prepared, log, device) | {"temperature": 1.0}
    write_report(chosen.out / REPORT_FILE, report)
    if chosen.no_evaluation:
        _say(started, f"wrote {chosen.out}")
        return report
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shipped = load_checkpoint(chosen.out, device, dtype)
    report["temperature"] = calibrate(shipped, recipe, prepared.validation)
    _say(started, f"temperature {report['temperature']}")
    store.save(shipped)
    report |= evaluate(
        shipped,
        recipe,
        prepared.validation,
        tokenizer,
        chosen.data,
        lambda line: _say(started, line),
    )
    write_report(chosen.out / REPORT_FILE, report)
    write_card(chosen.out)
    _say(started, f"wrote {chosen.out}")
    return report


class _Store:
    """The output folder of a run."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
        templates = msgspec.json.format(msgspec.json.encode(TEMPLATES), indent=2) + b"\n"
        write_atomically(folder / TEMPLATES_FILE, templates)

    def save(self, model: LLaDA2MoeModelLM) -> None:
        """Write the weights, replacing those of an earlier moment of the run."""
        save_checkpoint(model, self._folder, shard_bytes=self._shard_bytes, overwrite=True)


def _run(
    recipe: Recipe,
    model: LLaDA2MoeModelLM,
    prepared: Prepared,
    seconds: float,
    save: Callable[[], None],
    say: Callable[[str], None],
) -> TrainingLog:
    sampler = Sampler(prepared.train, recipe.data.sources, model.device)
    trainer = Trainer(recipe, training_runner(model), sampler)
    return trainer.run(seconds, lambda record: say(_line(record)), save)


def _line(record: dict[str, float]) -> str:
    speed = record["tokens"] / max(record["seconds"], 1e-9)
    return (
        f"step {record['step']:.0f}  {record['seconds']:.0f} s  loss {record['loss']:.4f}  "
        f"{speed / 1e3:.1f} k tokens/s  load max/mean {record['imbalance']:.2f}  "
        f"gradient {record['norm']:.2f}"
    )


def _report(
    recipe: Recipe,
    model: LLaDA2MoeModelLM,
    prepared: Prepared,
    log: TrainingLog,
    device: torch.device,
) -> dict[str, Any]:
    return {
        "recipe": describe(recipe),
        "environment": environment(device),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data_tokens": prepared.tokens(),
        "training": {
            "steps": log.steps,
            "tokens": log.tokens,
            "seconds": round(log.seconds, 2),
            "first_step_seconds": round(log.warmup_seconds, 2),
            "interrupted": log.interrupted,
            "epochs": log.epochs,
        },
        "curve": log.records,
    }


def _new_model(recipe: Recipe, device: torch.device, init: Path | None) -> LLaDA2MoeModelLM:
    """Return fresh weights, or those of a checkpoint of the same shape, ready to train."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if init is None:
        return LLaDA2MoeModelLM(recipe.model, recipe.seed).to(device, dtype)
    model = load_checkpoint(init, device, dtype)
    if model.config != recipe.model:
        raise UsageError(f"{init} has another configuration than recipe {recipe.name!r}")
    return model.train().requires_grad_(True)


def _tokenizer(recipe: Recipe, data: Path) -> Tokenizer:
    if recipe.tokenizer:
        return load_tokenizer(recipe.tokenizer)
    return train_tokenizer(sample_texts(recipe, data), recipe.model.vocab_size)


def _check_ids(recipe: Recipe, tokenizer: Tokenizer) -> None:
    wanted = (tokenizer.get_vocab_size(), token_id(tokenizer, MASK), token_id(tokenizer, EOS))
    model = recipe.model
    if wanted != (model.vocab_size, model.mask_token_id, model.eos_token_id):
        raise UsageError(
            f"recipe {recipe.name!r} and its tokenizer disagree: vocab_size, mask_token_id and "
            f"eos_token_id must be {wanted}"
        )


def _claim(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: name a new folder")


def _say(started: float, line: str) -> None:
    print(f"[{time.monotonic() - started:7.1f} s] {line}", file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m oled_sim.model.training", description="Train a model from scratch."
    )
    parser.add_argument("--recipe", required=True, help="a bundled recipe, or a .toml file")
    parser.add_argument("--data", type=Path, required=True, help="folder with the training text")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the model")
    parser.add_argument("--device", help="cuda or cpu (default: the best present)")
    parser.add_argument("--train-seconds", type=float, help="instead of the recipe's")
    parser.add_argument("--init", type=Path, help="checkpoint to go on from")
    parser.add_argument(
        "--no-evaluation",
        action="store_true",
        help="leave evaluation to training.evaluate; a temperature is not fitted",
    )
    parser.add_argument("--shard-mib", type=int, default=0, help="largest weight file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
