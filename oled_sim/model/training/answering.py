"""Answers to GSM8K test questions: tokens per pass, share of right results, samples."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from oled_sim.errors import UsageError
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import Generation, PassRecord, generate
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.training.tokenizer import encode
from oled_sim.trace.schema import Kind

TEMPLATES = {"question": "Question: {question}\nSteps:", "prompt": "{prompt}"}
"""Prompt layout by the field of a row: that of the training text for word problems; program
heads as they are. Ships as ``prompt.json`` beside the weights."""

TEMPLATES_FILE = "prompt.json"


@dataclass(frozen=True, slots=True)
class Question:
    """A GSM8K row: its number in the file, the laid-out prompt, and the right result."""

    row: int
    prompt: str
    result: str


def read_questions(path: Path, count: int) -> list[Question]:
    """Return the first ``count`` rows of a GSM8K file.

    Raises:
        UsageError: the file is missing or is not GSM8K.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:count]
        rows = [json.loads(line) for line in lines]
        return [
            Question(
                number,
                TEMPLATES["question"].format(question=row["question"]),
                row["answer"].rpartition("#### ")[2],
            )
            for number, row in enumerate(rows)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read GSM8K questions from {path}: {error}") from None


def answer(
    model: LLaDA2MoeModelLM,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    settings: DecodeSettings,
) -> tuple[dict[str, Any], list[str]]:
    """Answer all questions as one batch; return figures and the generated texts.

    Figures count output tokens alone, up to and including the first end-of-text:
    ``tokens_per_denoise_pass`` relates those accepted by denoising passes to such passes
    (prefill, which also accepts tokens, and commit left out); ``tokens_per_pass`` relates all
    output tokens to prefill and denoising passes.
    """
    prompts = [ids.tolist() for ids in encode(tokenizer, [q.prompt for q in questions])]
    records: list[PassRecord] = []
    results = generate(model, prompts, settings, records.append)
    texts = [tokenizer.decode(list(result.tokens)) for result in results]
    figures = decoding_figures(records, [len(prompt) for prompt in prompts], results)
    right = [q.result == extract_result(text) for q, text in zip(questions, texts, strict=True)]
    return figures | {"right_results": float(np.mean(right))}, texts


def extract_result(text: str) -> str | None:
    """Return what follows the last ``Answer:``, without thousands separators, or None."""
    found = re.findall(r"Answer: *\$?([-\d.,/]*\d)", text)
    return found[-1].replace(",", "") if found else None


def decoding_figures(
    records: Sequence[PassRecord], prompt_lengths: Sequence[int], results: Sequence[Generation]
) -> dict[str, Any]:
    """Return the figures of :func:`answer` from the passes of all requests."""
    ends = np.add(prompt_lengths, [len(result.tokens) for result in results])
    accepted = dict.fromkeys(Kind, 0)
    passes = dict.fromkeys(Kind, 0)
    for record in records:
        passes[record.kind] += 1
        output = record.positions < ends[record.row]
        accepted[record.kind] += int((record.accepted & output).sum())
    decoding = passes[Kind.PREFILL] + passes[Kind.DENOISE]
    return {
        "requests": len(results),
        "output_tokens": sum(accepted.values()),
        "denoise_passes": passes[Kind.DENOISE],
        "tokens_per_denoise_pass": accepted[Kind.DENOISE] / max(1, passes[Kind.DENOISE]),
        "tokens_per_pass": sum(accepted.values()) / max(1, decoding),
        "ended": float(np.mean([result.ended for result in results])),
    }
