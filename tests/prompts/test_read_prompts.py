"""Prompts are read row by row, templated, and refused with the line that is wrong."""

import gzip
import json
import lzma

import pytest

from oled_sim.errors import FileError, UsageError
from oled_sim.prompts import bundled_prompts, read_prompts

TEMPLATES = {"question": "Q: {question}\nA:", "prompt": "{prompt}"}


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as f:
        f.write(text)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.jsonl.xz"])
def test_rows_are_numbered_from_the_source_and_templated(tmp_path, name):
    path = write(tmp_path / name, [{"question": "1+1?"}, {"prompt": "def f"}, {"question": "2?"}])
    prompts = read_prompts(path, skip=1, limit=2, templates=TEMPLATES)
    assert [(p.row, p.text) for p in prompts] == [(1, "def f"), (2, "Q: 2?\nA:")]


def test_blank_lines_keep_line_numbers(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [p.row for p in read_prompts(path)] == [0, 2]


@pytest.mark.parametrize(
    ("content", "sentence", "error"),
    [
        ('{"prompt": "a"}\n{oops\n', "line 2 is not JSON", FileError),
        ("[1]\n", "line 1 is not a JSON object", FileError),
        ('{"answer": 1}\n', "line 1 has none of the fields", UsageError),
        ("", "holds no prompts", UsageError),
    ],
)
def test_a_wrong_line_is_named(tmp_path, content, sentence, error):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(error, match=sentence):
        read_prompts(path)


def test_a_missing_file_and_a_broken_archive(tmp_path):
    with pytest.raises(UsageError, match="no prompts file"):
        read_prompts(tmp_path / "none.jsonl")
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(FileError, match="cannot be read"):
        read_prompts(path)


def test_a_template_that_names_an_absent_field(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"question": "?"}])
    with pytest.raises(UsageError, match="does not fit"):
        read_prompts(path, templates={"question": "{question} {choices}"})


def test_the_bundled_prompts_are_read():
    prompts = read_prompts(bundled_prompts())
    assert len(prompts) == 18
    assert len({p.sha256 for p in prompts}) == 18
