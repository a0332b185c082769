import numpy as np
import pytest

from oled_sim.errors import UsageError
from oled_sim.model.generate import Generation, PassRecord
from oled_sim.model.training.answering import decoding_figures, extract_result, read_questions
from oled_sim.trace.schema import Kind


def record(row, kind, start, accepted):
    flags = np.array(accepted, np.bool_)
    count = len(flags)
    return PassRecord(
        row=row,
        forward=0,
        kind=kind,
        block=0,
        context=0,
        positions=np.arange(start, start + count, dtype=np.int32),
        token_ids=np.zeros(count, np.int64),
        state=np.zeros(count, np.uint8),
        confidence=np.zeros(count, np.float32),
        accepted=flags,
        edited=np.zeros(count, np.bool_),
        written=np.zeros(count, np.int64),
        first=0,
        last=count,
        time_us=0.0,
    )


def test_figures_count_output_up_to_the_end_of_text():
    # Prompt of 2; output of 3 tokens at positions 2, 3, 4. Positions 5 and up are padding.
    records = [
        record(0, Kind.PREFILL, 0, [0, 0, 1, 0]),
        record(0, Kind.DENOISE, 0, [0, 0, 0, 1]),
        record(0, Kind.COMMIT, 0, [0, 0, 0, 0]),
        record(0, Kind.DENOISE, 4, [1, 1, 1, 0]),
        record(0, Kind.DENOISE, 4, [0, 0, 0, 1]),
        record(0, Kind.COMMIT, 4, [0, 0, 0, 0]),
    ]
    figures = decoding_figures(records, [2], [Generation(tokens=(7, 8, 0), ended=True, passes=6)])
    assert figures["output_tokens"] == 3
    assert figures["denoise_passes"] == 3
    assert figures["tokens_per_denoise_pass"] == pytest.approx(2 / 3)  # positions 3 and 4
    assert figures["tokens_per_pass"] == pytest.approx(3 / 4)
    assert figures["ended"] == 1.0


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("He has 4.\nAnswer: 18", "18"),
        ("Answer: $1,250", "1250"),
        ("Answer: 3\nAnswer: -4.5", "-4.5"),
        ("Answer: 18.", "18"),
        ("no result", None),
    ],
)
def test_results_are_read_from_the_last_answer(text, result):
    assert extract_result(text) == result


def test_questions_are_laid_out_as_in_training(data):
    questions = read_questions(data / "prompts/gsm8k_test.jsonl", 2)
    assert [q.row for q in questions] == [0, 1]
    assert questions[0].prompt == (
        "Question: Emma has 40 bags of 50 stones. How many stones are there together?\nSteps:"
    )
    assert questions[0].result == "2000"


@pytest.mark.parametrize("content", ["not json", '{"question": "x"}', "[]"])
def test_damaged_questions_are_one_sentence(tmp_path, content):
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="cannot read GSM8K questions"):
        read_questions(path, 1)
