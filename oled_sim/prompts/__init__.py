"""Prompts: reading them from JSON lines, and turning a row into text."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from oled_sim.errors import FileError, UsageError

__all__ = [
    "DEFAULT_TEMPLATES",
    "Prompt",
    "bundled_prompts",
    "make_prompt",
    "read_prompts",
    "read_templates",
]

TEMPLATES_FILE = "prompt.json"
"""In a checkpoint folder: field name to template, for prompts as the model was trained on."""

DEFAULT_TEMPLATES: dict[str, str] = {
    "prompt": "{prompt}",
    "question": "{question}",
    "text": "{text}",
}
"""Field that decides the template: the template. The first field that a row has wins."""

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its row number in the source (from 0) and its text after templating."""

    row: int
    text: str

    @property
    def sha256(self) -> str:
        """Hex digest of the text, which a trace keeps in place of it."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def bundled_prompts() -> Path:
    """Return the path of the prompts that ship with the package."""
    with as_file(files(__name__) / "demo.jsonl") as path:
        return path


def read_templates(checkpoint: Path) -> Mapping[str, str]:
    """Return the prompt templates of a checkpoint folder, else :data:`DEFAULT_TEMPLATES`.

    Raises:
        FileError: the file is there but is not a JSON object of strings.
    """
    path = checkpoint / TEMPLATES_FILE
    if not path.is_file():
        return DEFAULT_TEMPLATES
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise FileError(f"{path} is not a JSON object of templates: {error}") from None


def make_prompt(text: str, number: int, templates: Mapping[str, str]) -> Prompt:
    """Return a prompt typed by a user.

    Args:
        text: what was typed. number: which of them, from 0.
        templates: as for :func:`read_prompts`; that of the field ``prompt`` counts, or of the
            empty name, which may name the text ``prompt``, ``question`` or ``text``.

    Raises:
        UsageError: the template asks for another field.
    """
    template = templates.get("", templates.get("prompt", "{prompt}"))
    fields: dict[str, Any] = dict.fromkeys(("prompt", "question", "text"), text)
    return Prompt(number, _fill(template, fields, Path("--prompt"), number))


def read_prompts(
    path: Path,
    *,
    skip: int = 0,
    limit: int | None = None,
    templates: Mapping[str, str] = DEFAULT_TEMPLATES,
) -> list[Prompt]:
    """Read prompts from a JSON-lines file (plain, ``.gz`` or ``.xz``).

    Args:
        path: one JSON object a line.
        skip: rows to leave out at the start.
        limit: rows to read at most.
        templates: field name to :meth:`str.format` template over the row's fields; the first
            field, in this order, that a row has decides its template (the empty name fits every
            row).

    Raises:
        UsageError: no such file, nothing left of it, or a row without a known field.
        FileError: no text, or a line that is not a JSON object; the sentence names file and line.
    """
    with _open(path) as lines:
        try:
            rows = list(
                islice(_objects(lines, path), skip, None if limit is None else skip + limit)
            )
        except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
            raise FileError(f"{path} cannot be read as text: {error}") from None
    if not rows:
        raise UsageError(f"{path} holds no prompts after skipping {skip}")
    return [Prompt(row, _render(fields, templates, path, row)) for row, fields in rows]


def _open(path: Path) -> IO[str]:
    if not path.is_file():
        raise UsageError(f"no prompts file {path}: give a .jsonl file with one object a line")
    opener = _OPENERS.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8")  # type: ignore[operator,return-value]


def _objects(lines: IO[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise FileError(f"{path} line {number + 1} is not JSON: {error.msg}") from None
        if not isinstance(value, dict):
            raise FileError(f"{path} line {number + 1} is not a JSON object")
        yield number, value


def _render(fields: dict[str, Any], templates: Mapping[str, str], path: Path, row: int) -> str:
    for name, template in templates.items():
        if not name or name in fields:
            return _fill(template, fields, path, row)
    raise UsageError(
        f"{path} line {row + 1} has none of the fields {', '.join(templates)}: "
        "rename a field, or give --template"
    )


def _fill(template: str, fields: dict[str, Any], path: Path, row: int) -> str:
    try:
        return string.Formatter().vformat(template, (), fields)
    except (KeyError, IndexError, ValueError) as error:
        raise UsageError(
            f"template {template!r} does not fit {path} line {row + 1}: {error}"
        ) from None
