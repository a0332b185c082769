"""A corpus of the layout that the trainer reads, made of a few generated documents."""

import json
import lzma
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="training needs the torch extra")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "prompts").mkdir()
    (folder / "corpus").mkdir()
    rows = [_row(a, b) for a in range(2, 32) for b in range(3, 13)]
    with lzma.open(folder / "prompts/gsm8k_train.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    test = (folder / "prompts/gsm8k_test.jsonl").open("w")
    with test:
        test.writelines(json.dumps(_row(a, 50)) + "\n" for a in range(40, 45))
    with lzma.open(folder / "corpus/maths.txt.xz", "wt", newline="") as file:
        file.writelines(f"Question: {a} + 1\nAnswer: {a + 1}\n\f\n" for a in range(100))
    return folder


NAMES = ("Ann", "Ben", "Carla", "David", "Emma", "Frank")
THINGS = ("nuts", "stones", "pencils", "marbles", "stickers", "oranges", "candles")


def _row(a: int, b: int) -> dict[str, str]:
    name, things = NAMES[a % 6], THINGS[b % 7]
    return {
        "question": f"{name} has {a} bags of {b} {things}. How many {things} are there together?",
        "answer": f"{name} has {a}*{b} = <<{a}*{b}={a * b}>>{a * b} {things}.\n#### {a * b}",
    }
