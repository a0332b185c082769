"""The tokenizer of a checkpoint: ``tokenizer.json`` read by the ``tokenizers`` library."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from oled_sim.errors import CheckpointError, UsageError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Text to token ids and back; special tokens written out in a text become their ids."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read ``tokenizer.json`` in ``folder``.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return cls(_read_core(Path(folder) / TOKENIZER_FILE))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; nothing is added."""
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ``ids``."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int:
        """Return the id of one token, such as ``<|mask|>``.

        Raises:
            UsageError: the vocabulary has no such token.
        """
        if (found := self._core.token_to_id(token)) is None:
            raise UsageError(f"the tokenizer has no token {token!r}")
        return found


def _read_core(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise CheckpointError(f"no {file}: the checkpoint comes without its tokenizer")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from None
