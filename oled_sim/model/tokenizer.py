"""The tokenizer of a checkpoint: ``tokenizer.json`` read by the ``tokenizers`` library."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from oled_sim.errors import CheckpointError, UsageError

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "prompt_template.txt"
PROMPT_FIELD = "{prompt}"


class Tokenizer:
    """Text to token ids and back, with the prompt template of the checkpoint, if it has one.

    A template is a text file that holds ``{prompt}`` once.

    Attributes:
        template: text around a prompt; ``{prompt}`` alone where the checkpoint has no template.
    """

    def __init__(self, core: tokenizers.Tokenizer, template: str = PROMPT_FIELD) -> None:
        if template.count(PROMPT_FIELD) != 1:
            raise UsageError(f"a prompt template holds {PROMPT_FIELD} exactly once")
        self._core = core
        self.template = template

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, ``prompt_template.txt``.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        folder = Path(folder)
        return cls(_read_core(folder / TOKENIZER_FILE), _read_template(folder / TEMPLATE_FILE))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without the template."""
        return self._core.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the token ids of ``prompt`` inside the template."""
        return self.encode(self.template.replace(PROMPT_FIELD, prompt))

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


def _read_template(file: Path) -> str:
    if not file.is_file():
        return PROMPT_FIELD
    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None
    if template.count(PROMPT_FIELD) != 1:
        raise CheckpointError(f"{file} must hold {PROMPT_FIELD} exactly once")
    return template
