"""Options of commands that run a model: which one, on what prompts, how it decodes, and where."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.options import FloatRange, options
from oled_sim.errors import OledSimError

if TYPE_CHECKING:
    from oled_sim.model.decoding import DecodeSettings
    from oled_sim.prompts import Prompt

model_option = click.option(
    "--model",
    default="nano",
    show_default=True,
    metavar="NAME|PATH",
    help="Bundled model, or folder of a LLaDA2 checkpoint.",
)

prompt_options = options(
    click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="JSON lines, plain, .gz or .xz [default: bundled prompts].",
    ),
    click.option(
        "--template",
        metavar="TEXT",
        help="Prompt template over a row's fields, such as 'Question: {question}'.",
    ),
    click.option("--skip", type=click.IntRange(min=0), default=0, help="Rows to leave out first."),
    click.option("--limit", type=click.IntRange(min=1), help="Rows to use at most."),
)
"""Rows of a file as prompts, as ``prompts``, ``template``, ``skip`` and ``limit``."""

decode_options = options(
    click.option("--block-length", type=click.IntRange(min=1), default=16, show_default=True),
    click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True),
    click.option(
        "--threshold",
        type=FloatRange(0, 1),
        default=0.7,
        show_default=True,
        help="Confidence above which a masked position is accepted.",
    ),
    click.option(
        "--steps",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Denoising steps per block that rule 2.0 spreads its quota over.",
    ),
    click.option(
        "--rule",
        type=click.Choice(["2.0", "2.1"]),
        default="2.0",
        show_default=True,
        help="LLaDA2 decoding rule; 2.1 edits decoded tokens.",
    ),
    click.option("--editing-threshold", type=FloatRange(0, 1), default=0.9, show_default=True),
    click.option("--max-post-steps", type=click.IntRange(min=0), default=16, show_default=True),
    click.option("--temperature", type=FloatRange(min=0), default=0.0, show_default=True),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
    click.option("--ignore-eos", is_flag=True, help="Never choose end-of-text: all new tokens."),
)
"""Fields of :class:`~oled_sim.model.decoding.DecodeSettings`, by their names."""

device_options = options(
    click.option(
        "--device", metavar="NAME", help="cpu, cuda or cuda:N [default: cuda if present]."
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16"]),
        help="[default: bfloat16 on cuda, float32 on cpu]",
    ),
)
"""Where a model runs and its number format, as ``device`` and ``dtype``."""

_DECODING = (
    "block_length", "max_new_tokens", "threshold", "steps", "rule", "editing_threshold",
    "max_post_steps", "temperature", "seed", "ignore_eos",
)  # fmt: skip


def require_torch(doing: str) -> None:
    """Refuse to go on without the ``torch`` extra; ``doing`` is what needs it."""
    missing = [m for m in ("torch", "safetensors", "tokenizers") if find_spec(m) is None]
    if missing:
        raise OledSimError(f"{doing} needs {', '.join(missing)}: pip install 'oled-sim[torch]'")


def decode_settings(given: dict[str, Any]) -> DecodeSettings:
    """Return how to decode, from :data:`decode_options`."""
    from oled_sim.model.decoding import DecodeSettings

    return DecodeSettings(**{name: given[name] for name in _DECODING})


def prompts_of(given: dict[str, Any], typed: tuple[str, ...] = ()) -> list[Prompt]:
    """Return the prompts that :data:`prompt_options` ask for, or those that were ``typed``."""
    from oled_sim.model.loading import checkpoint_path
    from oled_sim.prompts import bundled_prompts, make_prompt, read_prompts, read_templates

    templates = read_templates(checkpoint_path(given["model"]))
    if given["template"]:
        templates = {"": given["template"]}
    if typed:
        return [make_prompt(text, i, templates) for i, text in enumerate(typed)]
    path = given["prompts"] or bundled_prompts()
    return read_prompts(path, skip=given["skip"], limit=given["limit"], templates=templates)
