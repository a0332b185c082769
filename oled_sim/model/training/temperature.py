"""One temperature for the shipped model, fitted on held-out text.

A model that passed many times through little text is too sure of itself. A single temperature
repairs that (Guo et al., "On calibration of modern neural networks", 2017). Decoding has no such
setting for confidence, so it is folded into the weights: logits are linear in the weight of the
final norm. It is fitted on held-out windows that the evaluation leaves out.

``python -m oled_sim.model.training.temperature --model DIR --recipe nano --data DATA --out NEW``
does so for a saved checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from oled_sim.errors import UsageError
from oled_sim.model.checkpoint import load_checkpoint, save_checkpoint
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.training.data import Batch, prepare, to_device
from oled_sim.model.training.layout import lay_out
from oled_sim.model.training.objective import Runner, evaluation_runner
from oled_sim.model.training.packing import Windows
from oled_sim.model.training.recipe import Recipe, load_recipe
from oled_sim.model.training.tokenizer import load_tokenizer

RANGE = (0.5, 3.0)
"""Temperatures that are considered."""

_PASSES = 2
_CHUNK = 8192


def calibrate(model: LLaDA2MoeModelLM, recipe: Recipe, validation: Mapping[str, Windows]) -> float:
    """Fit the temperature on the source that the recipe names, and fold it into ``model``.

    Returns:
        The temperature; 1 where the recipe names no source.
    """
    chosen = recipe.evaluation
    if not chosen.calibrate_on:
        return 1.0
    batch = to_device(fitting_windows(recipe, validation), model.device)
    hidden, targets = masked_states(
        evaluation_runner(model), batch, block_length=chosen.block_length, seed=recipe.seed
    )
    temperature = fit_temperature(hidden, model.lm_head.weight, targets)
    fold_temperature(model, temperature)
    return temperature


def fitting_windows(recipe: Recipe, validation: Mapping[str, Windows]) -> Windows:
    """Return the held-out windows that the evaluation does not use.

    Raises:
        UsageError: there is none.
    """
    name, count = recipe.evaluation.calibrate_on, recipe.evaluation.windows
    if name not in validation or len(validation[name]) <= count:
        raise UsageError(
            f"calibrate_on {name!r} has no held-out windows beyond the {count} of the evaluation: "
            "evaluate fewer windows, or hold out more"
        )
    return validation[name].tail(count)


@torch.no_grad()
def masked_states(
    runner: Runner, batch: Batch, *, block_length: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return final hidden states [R, H] and tokens [R] of masked positions, any noise level."""
    length = torch.full((len(batch.tokens),), block_length, device=batch.tokens.device)
    layout = lay_out(batch.starts, length)
    generator = torch.Generator(batch.tokens.device).manual_seed(seed)
    states, targets = [], []
    for _ in range(_PASSES):
        level, draw = (
            torch.rand(batch.tokens.shape, generator=generator, device=batch.tokens.device)
            for _ in range(2)
        )
        masked = draw < level.gather(1, layout.block)
        noisy = batch.tokens.masked_fill(masked, runner.model.config.mask_token_id)
        hidden = runner.hidden(noisy.unsqueeze(1), batch.tokens, layout).squeeze(1)
        states.append(hidden[masked & batch.real])
        targets.append(batch.tokens[masked & batch.real])
    return torch.cat(states), torch.cat(targets)


@torch.no_grad()
def fit_temperature(hidden: Tensor, head: Tensor, targets: Tensor) -> float:
    """Return the temperature in :data:`RANGE` of least cross-entropy.

    Args:
        hidden: [R, H]. head: [V, H]. targets: int64 [R].
    """

    def nats(temperature: float) -> float:
        parts = zip(hidden.split(_CHUNK), targets.split(_CHUNK), strict=True)
        losses = (
            functional.cross_entropy(
                functional.linear(h, head).float() / temperature, t, reduction="sum"
            )
            for h, t in parts
        )
        return float(torch.stack(list(losses)).sum())

    return round(_minimum(nats, *RANGE), 3)


@torch.no_grad()
def fold_temperature(model: LLaDA2MoeModelLM, temperature: float) -> None:
    """Divide all logits of ``model`` by ``temperature``, in place."""
    model.model.norm.weight.div_(temperature)


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a function with a single one, by golden section, to 1/400."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 0.0025:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Fold a fitted temperature into a copy of a saved checkpoint, and print it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    recipe = load_recipe(chosen.recipe)
    model = load_checkpoint(chosen.model, "cpu", torch.float32)
    prepared = prepare(recipe.data, chosen.data, load_tokenizer(recipe.tokenizer))
    print(f"temperature {calibrate(model, recipe, prepared.validation)}")
    save_checkpoint(model, chosen.out)


if __name__ == "__main__":
    main()
