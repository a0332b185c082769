"""``oled-sim collect``: record a trace from a model that generates."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.model_options import (
    decode_options,
    decode_settings,
    device_options,
    model_option,
    prompt_options,
    prompts_of,
    require_torch,
)

if TYPE_CHECKING:
    from oled_sim.collection import Job, Tally

SIGNAL_FLAGS = ("full_gate", "embedding", "cosines")

EPILOG = """\b
Examples:
  oled-sim collect --limit 4 --out my-trace
  oled-sim collect --prompts gsm8k_test.jsonl --limit 40 --threshold 0.7 --out gsm8k
  oled-sim collect --model ./LLaDA2.0-mini --device cuda --full-gate --embedding --out mini
"""


@click.command(epilog=EPILOG)
@model_option
@prompt_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Directory of the trace; an unfinished one is continued.",
)
@click.option("--overwrite", is_flag=True, help="Replace a trace that is there.")
@decode_options
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Requests that run together.",
)
@device_options
@click.option("--full-gate", is_flag=True, help="Record the mean gate over all experts.")
@click.option("--embedding", is_flag=True, help="Record the mean input embedding.")
@click.option("--cosines", is_flag=True, help="Record hidden-state cosines to earlier passes.")
@click.option("--redact-prompts", is_flag=True, help="Leave prompt token ids out of the trace.")
@click.option(
    "--stands-for",
    metavar="GEOMETRY",
    help="Published model the trace stands for [default: by size].",
)
@click.option("--collector", default="native", show_default=True, help="Collector plug-in.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def collect(**options: Any) -> None:
    """Record routing, gate scores, confidence and token state of a run, into a trace."""
    require_torch("collecting")
    # Small models run thousands of short parallel regions a second. Threads that spin between
    # them make generation many times slower as soon as anything else wants the processor.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from oled_sim.cli.files import require_folder
    from oled_sim.cli.interrupted import contents, recorded
    from oled_sim.cli.stopping import keeping
    from oled_sim.collection import collect as run
    from oled_sim.collection import make_manifest
    from oled_sim.model.loading import checkpoint_path

    require_folder(options["out"])
    signals = [name for name in SIGNAL_FLAGS if options[name]]
    job = _job(options, signals)
    manifest = make_manifest(
        Path(options["model"]).name,
        job,
        collector=options["collector"],
        weights=checkpoint_path(options["model"]),
        source=options["prompts"].name if options["prompts"] else "bundled demo prompts",
        stands_for=options["stands_for"],
        signals=[*job.collector.SIGNALS, *signals],
        redact=options["redact_prompts"],
    )
    out: Path = options["out"]
    before = contents(out)
    again = "the same command without --overwrite" if options["overwrite"] else "the same command"
    rest = f"; {again} goes on from there"
    with (
        keeping(lambda: recorded(out, before, len(job.prompts), rest)),
        _progress(len(job.prompts)) as (on_request, on_pass),
    ):
        tally = run(
            job,
            out,
            manifest,
            overwrite=options["overwrite"],
            on_request=on_request,
            on_pass=on_pass,
        )
    _print_summary(tally, out, options["as_json"])


def _job(options: dict[str, Any], signals: list[str]) -> Job:
    import torch

    from oled_sim import plugins
    from oled_sim.collection import Job
    from oled_sim.model.loading import load_model, load_tokenizer

    settings = decode_settings(options)
    prompts = prompts_of(options)
    dtype = getattr(torch, options["dtype"]) if options["dtype"] else None
    collector = plugins.load(plugins.COLLECTORS, options["collector"])
    tokenizer = load_tokenizer(options["model"])
    model = load_model(options["model"], options["device"], dtype)
    return Job(
        model=model,
        tokenizer=tokenizer,
        collector=collector(model, signals=signals, redact=options["redact_prompts"]),
        prompts=prompts,
        settings=settings,
        batch=options["batch"],
    )


@contextmanager
def _progress(requests: int) -> Iterator[tuple[Any, Any]]:
    """Show requests done, positions decoded and their rate on standard error."""
    import numpy as np
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("collecting"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
        TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=requests, tokens=0)
        tokens = 0

        def on_request(count: int) -> None:
            progress.advance(task, count)

        def on_pass(record: Any) -> None:
            nonlocal tokens
            tokens += int(np.count_nonzero(record.accepted))
            progress.update(task, tokens=tokens)

        yield on_request, on_pass


def _print_summary(tally: Tally, out: Path, as_json: bool) -> None:
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    values = {
        "out": str(out),
        "requests": tally.requests,
        "requests_already_there": tally.skipped,
        "output_tokens": tally.output_tokens,
        "denoise_passes": tally.denoise_passes,
        "commit_passes": tally.commit_passes,
        "tokens_per_denoise_pass": _number(tally.tokens_per_denoise_pass),
        "tokens_per_second": _number(tally.tokens_per_second),
        "trace_bytes": size,
    }
    if as_json:
        click.echo(json.dumps(values))
        return
    if not tally.requests:
        click.echo(f"nothing to do: all {tally.skipped} requests are in {out} already")
        return
    there = f" ({tally.skipped} were there already)" if tally.skipped else ""
    click.echo(
        f"recorded {tally.requests} requests{there}: {tally.output_tokens} tokens in"
        f" {tally.denoise_passes} denoise and {tally.commit_passes} commit passes,"
        f" {tally.tokens_per_denoise_pass:.2f} tokens per denoise pass,"
        f" {tally.tokens_per_second:.1f} tokens/s"
    )
    click.echo(
        f"trace: {out} ({size / 2**20:.2f} MiB); look into it with: oled-sim trace info {out}"
    )


def _number(value: float) -> float | None:
    """NaN has no JSON form."""
    return None if value != value else round(value, 4)
