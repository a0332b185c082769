"""Byte-level BPE tokenizer: trained from the corpus, and used to encode it.

Every digit is a token of its own, so that numbers are copied and computed digit by digit.

``python -m oled_sim.model.training.tokenizer --recipe nano --data DATA --out tokenizer.json``
trains the tokenizer of a recipe.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from oled_sim.errors import UsageError
from oled_sim.model.training.corpus import held_out, read_source
from oled_sim.model.training.recipe import Recipe, load_recipe

EOS, BOS, ROLE_END, MASK = "<|endoftext|>", "<|startoftext|>", "<|role_end|>", "<|mask|>"
SPECIAL = (EOS, BOS, ROLE_END, MASK)
"""Special tokens, with ids 0 to 3; end-of-text is also the padding."""

ASSETS = Path(__file__).parent.parent / "assets"
SOURCE_CHARACTERS = 4_000_000
"""Characters of each source that the merges are learned from: no source drowns the others."""

_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words with their leading space, single digits, runs of punctuation, line ends, indentation."""


def train_tokenizer(texts: Iterator[str] | Sequence[str], vocabulary: int) -> Tokenizer:
    """Learn byte-level BPE merges until ``vocabulary`` tokens, :data:`SPECIAL` included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample_texts(recipe: Recipe, data: Path) -> Iterator[str]:
    """Yield training documents of each source up to :data:`SOURCE_CHARACTERS`, in random order."""
    for source in recipe.data.sources:
        documents = read_source(source, data)
        random.Random(recipe.seed).shuffle(documents)
        room = SOURCE_CHARACTERS
        for document in documents:
            if room > 0 and not held_out(document, recipe.data.validation_share):
                room -= len(document.text)
                yield document.text


def load_tokenizer(name: str) -> Tokenizer:
    """Read the tokenizer of a bundled model by name, or a ``tokenizer.json`` by path.

    Raises:
        UsageError: it is missing, damaged, or lacks a special token.
    """
    path = Path(name) if name.endswith(".json") else ASSETS / name / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"cannot read tokenizer {path}: {error}") from None
    missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
    if missing:
        raise UsageError(f"tokenizer {path} lacks {', '.join(missing)}: train it with this module")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise UsageError(f"the tokenizer has no token {token}")
    return found


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.int32]]:
    """Return the token ids of each text, without special tokens (runs on all cores)."""
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(item.ids, np.int32) for item in encoded]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the tokenizer of a recipe and write it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    if chosen.out.exists():
        raise UsageError(f"{chosen.out} exists: name a new file")
    recipe = load_recipe(chosen.recipe)
    tokenizer = train_tokenizer(sample_texts(recipe, chosen.data), recipe.model.vocab_size)
    tokenizer.save(str(chosen.out))


if __name__ == "__main__":
    main()
