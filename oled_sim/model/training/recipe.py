"""Training recipes: TOML files read strictly into frozen, typed values.

A recipe says everything that decides a trained model except the data folder, the device and
the time limit: shapes, sources and their mixture, noise, optimiser, evaluation. Bundled recipes
are named; any other is given by path.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from oled_sim.errors import CheckpointError, UsageError
from oled_sim.model.config import LLaDA2Config

RECIPES = Path(__file__).parent / "recipes"
Format = Literal["documents", "gsm8k", "python"]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of text and its share of the training windows.

    Attributes:
        format: ``documents`` (xz text, a form feed line after each), ``gsm8k`` (xz JSON lines
            with question and answer) or ``python`` (the interpreter's standard library).
        file: path below the data folder; empty for ``python``.
        containing, lacking: keep only documents with, or without, this text; empty keeps all.
        weight: share of windows at the start and at the end of training, linear in between;
            shares are relative to the sum over sources.
        licence: named in the model card.
        join: up to this many documents follow each other in one, a blank line between: a model
            trained on them goes on after an answer. Each number from 1 is as frequent.
        max_characters: Python files are cut at top-level statements into pieces of this size.
    """

    name: str
    format: Format
    weight: tuple[float, float]
    licence: str
    file: str = ""
    containing: str = ""
    lacking: str = ""
    join: int = 1
    max_characters: int = 1600


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Windows of packed documents.

    Attributes:
        window: tokens in a window.
        pad_multiple: every document is padded with end-of-text to a multiple of this.
        validation_share: share of documents held out, chosen by a hash of their content.
    """

    sources: tuple[Source, ...]
    window: int
    pad_multiple: int
    validation_share: float


class Noise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a window is corrupted; every block draws for itself.

    Attributes:
        copies: noisy copies of a window that share one clean copy.
        complementary: every second copy masks what the one before left visible.
        block_lengths: pairs (block length, share of windows).
        level: range of the masking probability, drawn uniformly per block.
        prefix_share: share of blocks that show a prefix of random length and mask the rest,
            the state that decoding from left to right passes through.
        edit_share: share of blocks whose visible tokens also count in the loss, some of them
            replaced by others: teaches LLaDA2.1's editing.
        edit_rate: probability that a visible token of such a block is replaced.
    """

    copies: int
    complementary: bool
    block_lengths: tuple[tuple[int, float], ...]
    level: tuple[float, float]
    prefix_share: float
    edit_share: float
    edit_rate: float


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimiser and schedule; the schedule follows elapsed time.

    Attributes:
        matrices: ``muon`` or ``adamw`` for the weight matrices of the layers; embeddings,
            head, router and norms always take AdamW.
        matrix_rate, rate: peak learning rates of the matrices and of the rest.
        warmup: share of the time in which the rate rises linearly.
        decay_from: share of the time after which it falls linearly to zero.
        clip: largest global norm of a gradient.
        bias_rate: step of the router bias, against the sign of an expert's excess load.
    """

    matrices: Literal["muon", "adamw"]
    matrix_rate: float
    rate: float
    betas: tuple[float, float]
    weight_decay: float
    warmup: float
    decay_from: float
    clip: float
    bias_rate: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured after training.

    Attributes:
        windows: validation windows per source.
        strata: noise levels per window of the ELBO.
        block_length: of the ELBO, of calibration and of decoding.
        thresholds: of acceptance.
        prompts: GSM8K test questions to answer.
        new_tokens: generated per prompt.
        samples: of these answers that the card shows, the first ones.
        calibrate_on: source whose further validation windows fit the temperature of the shipped
            model (:mod:`oled_sim.model.training.temperature`); empty leaves it at 1.
        prompt_file: path of the test questions below the data folder.
    """

    windows: int
    strata: int
    block_length: int
    thresholds: tuple[float, ...]
    prompts: int
    new_tokens: int
    samples: int
    calibrate_on: str = ""
    prompt_file: str = "prompts/gsm8k_test.jsonl"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a trained model.

    Attributes:
        model: shapes and constants; token ids follow the tokenizer.
        train_seconds: wall-clock time of the training loop, first compilation excluded.
        batch_windows: windows per step.
        seed: of initial weights, data order and noise.
        tokenizer: name of the bundled asset, or path of a ``tokenizer.json``; empty trains one.
    """

    name: str
    seed: int
    train_seconds: float
    batch_windows: int
    tokenizer: str
    model: LLaDA2Config
    data: Data
    noise: Noise
    optimizer: Optimizer
    evaluation: Evaluation

    def __post_init__(self) -> None:
        longest = max(length for length, _ in self.noise.block_lengths)
        _require(self.data.window % self.data.pad_multiple == 0, "window is no multiple of pad")
        _require(self.data.window % 128 == 0, "window is no multiple of 128, an attention tile")
        _require(longest <= self.data.window, f"a block of {longest} exceeds the window")
        _require(self.noise.copies > 0, "copies is not positive")
        _require(0 < self.data.validation_share < 1, "validation_share is not between 0 and 1")
        _require(len(self.data.sources) > 0, "there is no source")
        _require(min(s.join for s in self.data.sources) > 0, "join is not positive")


def load_recipe(name: str) -> Recipe:
    """Read a bundled recipe by name, or any recipe by the path of its ``.toml`` file.

    Raises:
        UsageError: no such recipe, or one that is not valid; the sentence says which value.
    """
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        with path.open("rb") as file:
            return msgspec.convert(tomllib.load(file), Recipe)
    except OSError:
        raise UsageError(_unknown(name)) from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, CheckpointError) as error:
        raise UsageError(f"recipe {path} is not valid: {error}") from None


def describe(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain values, for logs."""
    return msgspec.to_builtins(recipe)


def _unknown(name: str) -> str:
    known = sorted(path.stem for path in RECIPES.glob("*.toml"))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"cannot read recipe {name!r}: {hint}bundled are {', '.join(known)}"


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
