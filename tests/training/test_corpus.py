import lzma
from pathlib import Path

import pytest

from oled_sim.errors import UsageError
from oled_sim.model.training.corpus import (
    Document,
    gsm8k_text,
    held_out,
    read_source,
    split_python,
)
from oled_sim.model.training.recipe import Source


def source(**fields) -> Source:
    return Source(name="s", weight=(1.0, 1.0), licence="MIT", **fields)


def test_gsm8k_rows_take_the_layout_of_worked_arithmetic():
    text = gsm8k_text("How many?", "She has 48/2 = <<48/2=24>>24.\nThat is 24.\n#### 24")
    assert text == (
        "Question: How many?\nSteps: She has 48/2 = <<48/2=24>>24.\nThat is 24.\nAnswer: 24"
    )


def test_documents_are_filtered_by_content(data):
    path = "corpus/maths.txt.xz"
    every = read_source(source(format="documents", file=path), data)
    with_seven = read_source(source(format="documents", file=path, containing="7"), data)
    without = read_source(source(format="documents", file=path, lacking="7"), data)
    assert len(every) == 100
    assert every[0].text == "Question: 0 + 1\nAnswer: 1"
    assert len(with_seven) + len(without) == 100
    assert all("7" in document.text for document in with_seven)
    assert not any("7" in document.text for document in without)


def test_standard_library_has_code_and_no_tests():
    documents = read_source(source(format="python"), Path())
    units = {Path(document.unit).parts[0] for document in documents}
    assert {"json", "argparse.py"} <= units
    assert not units & {"test", "site-packages", "lib2to3"}


def test_python_files_are_cut_between_top_level_statements():
    text = "import a\n\ndef f():\n    x = 1\n\n    return x\n\n\n@wrap\ndef g():\n    pass\n"
    pieces = list(split_python(text, 20))
    assert pieces == [
        "import a",
        "def f():\n    x = 1\n\n    return x",
        "@wrap\ndef g():\n    pass",
    ]
    assert list(split_python(text, 10_000)) == [text.strip("\n")]
    assert list(split_python("", 10)) == []


def test_holding_out_depends_on_the_unit_alone():
    documents = [Document(str(i), f"unit {i // 2}") for i in range(2000)]
    flags = [held_out(document, 0.25) for document in documents]
    assert flags[::2] == flags[1::2]  # documents of one unit stay together
    assert 400 < sum(flags) < 600  # 2000 * 0.25 = 500
    assert [held_out(document, 0.25) for document in reversed(documents)] == flags[::-1]


@pytest.mark.parametrize("content", [None, b"not xz", lzma.compress(b"{}")[:-4]])
def test_missing_or_damaged_text_is_one_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "x.xz").write_bytes(content)
    with pytest.raises(UsageError, match="cannot read the text of source 's'") as caught:
        read_source(source(format="gsm8k", file="x.xz"), tmp_path)
    assert "\n" not in str(caught.value)
