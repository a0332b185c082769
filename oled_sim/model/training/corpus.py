"""Text for training: documents of each source, and which of them are held out."""

from __future__ import annotations

import hashlib
import json
import lzma
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oled_sim.errors import UsageError
from oled_sim.model.training.recipe import Format, Source

NOT_PROSE = {
    *("dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"),
    *("test", "tests", "tkinter", "turtledemo"),
}
"""Folders of the standard library that are tests, tables, other people's packages, or GUI."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the unit that must not be divided between training and validation."""

    text: str
    unit: str


def read_source(source: Source, data: Path) -> list[Document]:
    """Return the documents of ``source`` that its filters keep, in the order of the file.

    Raises:
        UsageError: the file is missing or damaged.
    """
    try:
        documents = _READERS[source.format](data / source.file, source)
        return [document for document in documents if _kept(document.text, source)]
    except (OSError, lzma.LZMAError, EOFError, ValueError, KeyError) as error:
        raise UsageError(
            f"cannot read the text of source {source.name!r} from {data / source.file}: {error}"
        ) from None


def held_out(document: Document, share: float) -> bool:
    """Whether the document belongs to validation: a hash of its unit, so order plays no part."""
    digest = hashlib.sha256(document.unit.encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def gsm8k_text(question: str, answer: str) -> str:
    """Lay out a GSM8K row like the worked arithmetic; calculator notes stay in the steps."""
    steps, _, result = answer.rpartition("\n#### ")
    return f"Question: {question}\nSteps: {steps}\nAnswer: {result}"


def split_python(text: str, limit: int) -> Iterator[str]:
    """Cut a Python file between top-level statements into pieces of up to ``limit`` characters.

    A longer statement stays whole.
    """
    piece = ""
    for statement in _statements(text):
        if piece and len(piece) + len(statement) > limit:
            yield piece.strip("\n")
            piece = ""
        piece += statement
    if piece.strip():
        yield piece.strip("\n")


def _statements(text: str) -> Iterator[str]:
    """Yield runs of lines that start at column 0 after a blank line."""
    start, blank = 0, False
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if blank and line[:1] not in " \t\n#)]}\"'":
            yield "".join(lines[start:number])
            start = number
        blank = not line.strip()
    yield "".join(lines[start:])


def _documents(path: Path, source: Source) -> Iterator[Document]:
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        for text in file.read().split("\n\f\n")[:-1]:
            yield Document(text, text)


def _gsm8k(path: Path, source: Source) -> Iterator[Document]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield Document(gsm8k_text(row["question"], row["answer"]), row["question"])


def _python(path: Path, source: Source) -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if NOT_PROSE.isdisjoint(name.parts) and (text := _decode(file)) is not None:
            for piece in split_python(text, source.max_characters):
                yield Document(piece, str(name))


def _decode(file: Path) -> str | None:
    """Return the text of a UTF-8 file without form feeds; None for other encodings."""
    try:
        return file.read_text(encoding="utf-8").replace("\f", "")
    except UnicodeDecodeError:
        return None


def _kept(text: str, source: Source) -> bool:
    return source.containing in text and not (source.lacking and source.lacking in text)


_READERS: dict[Format, Callable[[Path, Source], Iterator[Document]]] = {
    "documents": _documents,
    "gsm8k": _gsm8k,
    "python": _python,
}
