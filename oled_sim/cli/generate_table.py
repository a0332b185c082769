"""What ``oled-sim generate`` prints and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec
import pyarrow as pa

from oled_sim import __version__
from oled_sim.cli.run_table import (
    budget_text,
    copies_per_pass,
    milliseconds,
    number,
    percent,
)
from oled_sim.cli.tables import print_notes, print_table, table_console
from oled_sim.engine.results import request_table, write_table
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Result
from oled_sim.errors import ProfileError
from oled_sim.geometry import GEOMETRIES
from oled_sim.hardware.shapes import cost_geometry
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.loading import checkpoint_path
from oled_sim.offloaded.divergence import Divergence
from oled_sim.offloaded.job import Job, Outcome

LEGEND = (
    "TPOT, TTFT: ms, means over requests, without decisions. p50: ms per decode pass (denoise or"
    " commit). util: |R ∩ A| / slots at the gate; hit: |R ∩ A| / |A|. H2D: experts copied per"
    " decode pass; CPU: experts computed there. busy: ms per decode pass that the GPU/H2D/CPU lane"
    " works."
)


def print_outcome(job: Job, outcome: Outcome, texts: Sequence[str]) -> None:
    """Print the texts, then figures beside those of the simulation, then what was compared."""
    for n, text in enumerate(texts):
        click.echo(f"── request {n}: {len(outcome.done[n].recording.generation.tokens)} tokens")
        click.echo(text.strip("\n"))
    click.echo()
    for name, value in _facts(job, outcome).items():
        click.echo(f"{name:<11}{value}")
    console = table_console()
    names = ("", "TPOT", "TTFT", "p50", "util", "hit", "H2D", "CPU", "busy GPU/H2D/CPU")
    rows = [_row(source, result) for source, result in _results(outcome)]
    print_table(console, names, rows, left=("",))
    print_notes(console, [LEGEND, *(_notes(job) if outcome.agreement else ())])
    for line in _findings(job, outcome):
        click.echo(line)


def _results(outcome: Outcome) -> list[tuple[str, Result]]:
    """Return what was measured and, if there is such, what is predicted."""
    found = [("measured", outcome.result)]
    if outcome.agreement is not None:
        found.append(("predicted", outcome.agreement.predicted))
    return found


def _facts(job: Job, outcome: Outcome) -> dict[str, str]:
    plan, cost = job.plan, job.plan.costs.geometry
    counted = len(outcome.result.requests)
    return {
        "Model": f"{Path(job.model).name}, {job.place.dtype} on {job.place.device},"
        f" experts of {_size(outcome.expert_bytes)}",
        "Policy": f"{plan.contender.spec}, cache {budget_text(plan.contender.budget)}, scope"
        f" {plan.rules.scope}, {plan.rules.staging} staging slots, {plan.workers} CPU workers",
        "Requests": f"{len(outcome.done) - counted} warm-up + {counted} counted",
        "Costs": f"{cost.name}, profile {plan.costs.profile.name}: what the policy decides by",
        "Decisions": f"{outcome.decide_us:.0f} µs per decode pass, not in the times below",
        "Copied": f"{_size(outcome.copied_bytes)} in all",
    }


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _row(name: str, result: Result) -> list[str]:
    s = result.summary
    busy = "/".join(milliseconds(t) for t in (s.gpu_busy_us, s.h2d_busy_us, s.cpu_busy_us))
    return [
        name, milliseconds(s.tpot_us), milliseconds(s.ttft_us), milliseconds(s.pass_p50_us),
        percent(s.utilization), percent(s.hit_rate, 2), number(copies_per_pass(s), 1),
        number(s.cpu_per_pass, 1), busy,
    ]  # fmt: skip


def predicts_this_model(job: Job) -> bool:
    """Whether the profile is of the model's own size, so that its times are comparable at all."""
    path = checkpoint_path(job.model)
    config = LLaDA2Config.from_file(path if path.is_dir() else path.parent)
    profiled = job.plan.costs.geometry
    return cost_geometry(config, job.place.item_bytes, profiled.name) == profiled


def _notes(job: Job) -> Iterator[str]:
    if not predicts_this_model(job):
        name = job.plan.costs.geometry.name
        yield (
            f"Predicted times are those of {name} on the profile's machine, not of this model on"
            " this one: to compare them, give --profile one of this model's size and --dtype."
        )

    cost, item = job.plan.costs.geometry, job.place.item_bytes
    if item != cost.weight_bytes:
        dtype = str(job.place.dtype).removeprefix("torch.")
        yield (
            f"Weights are {dtype}, {item} bytes each, and those of {cost.name} have"
            f" {cost.weight_bytes}: an expert of the same size moves {item / cost.weight_bytes:g}"
            " times the bytes that are predicted."
        )


def _findings(job: Job, outcome: Outcome) -> Iterator[str]:
    yield _agreement(outcome)
    if outcome.compared:
        same = sum(n == 0 for n in outcome.tokens_differing)
        yield f"Resident run: the same tokens in {same} of {len(outcome.done)} requests"
        yield from (f"  {divergence_text(found)}" for found in outcome.divergences)
    if job.check_forced:
        same = sum(outcome.forced)
        yield f"Forced run: the same tokens in {same} of {len(outcome.forced)} requests"
    if job.record is not None:
        yield f"Trace: {job.record}; simulate it with: {_command(job, outcome)}"


def _agreement(outcome: Outcome) -> str:
    if outcome.agreement is None:
        return f"no prediction: {outcome.no_prediction}"
    found = outcome.agreement.decisions
    if found.identical:
        return (
            f"Simulation of the trace: decisions, hits, misses and bytes equal in all"
            f" {found.events} events"
        )
    if found.prefetching:
        return (
            f"Simulation of the trace: hits {100 * found.hits_error:+.2f} %, bytes"
            f" {100 * found.bytes_error:+.2f} %, late share {100 * found.late_predicted:.2f} %"
            f" predicted and {100 * found.late_measured:.2f} % measured; when prefetches arrive"
            f" differs, and with it {found.differing} of {found.events} events"
        )
    return f"Simulation of the trace: {found.differing} of {found.events} events differ"


def divergence_text(found: Divergence) -> str:
    """Return a divergence as a sentence."""
    where = f"pass {found.pass_index} ({found.kind})"
    where += f", layer {found.layer}" if found.layer is not None else ""
    return (
        f"request {found.request} diverges by {found.cause} at {where}, position"
        f" {found.position}: {found.what}; margin {found.margin:.3g}"
    )


def _command(job: Job, outcome: Outcome) -> str:
    """Return the command that simulates the trace under the same rules.

    The profile is named if ``run`` knows its geometry by name, and extrapolated where it did not
    reach, since the same again would fail again.
    """
    plan, usual = job.plan, Rules(history=0)
    words = [f"oled-sim run --trace {job.record} --policy {plan.contender.spec}"]
    words += [f"--cache {budget_text(plan.contender.budget)} --history 0"]
    for name in ("scope", "staging", "warmup", "confidence"):
        value = getattr(plan.rules, name)
        words += [f"--{name} {value}"] if value != getattr(usual, name) else []
    words += ["--cold"] if plan.rules.cold else []
    cost, beyond = plan.costs.geometry, isinstance(outcome.no_prediction, ProfileError)
    if job.profile and GEOMETRIES.get(cost.name) == cost:
        words += [f"--geometry {cost.name} --profile {job.profile}"]
        words += ["--extrapolate"] if plan.costs.extrapolate or beyond else []
    return " ".join(words)


def _document(job: Job, outcome: Outcome, texts: Sequence[str]) -> dict[str, Any]:
    plan, agreement = job.plan, outcome.agreement
    return {
        "version": __version__,
        "model": Path(job.model).name,
        "device": str(job.place.device),
        "dtype": str(job.place.dtype).removeprefix("torch."),
        "policy": plan.contender.spec,
        "cache": plan.contender.budget.cache,
        "rules": asdict(plan.rules),
        "decoding": asdict(plan.settings),
        "workers": plan.workers,
        "cost_geometry": plan.costs.geometry.name,
        "profile": plan.costs.profile.name,
        "predicts_this_model": predicts_this_model(job),
        "expert_bytes": outcome.expert_bytes,
        "copied_bytes": outcome.copied_bytes,
        "decide_us": outcome.decide_us,
        "measured": outcome.result.to_dict(),
        "predicted": agreement and agreement.predicted.to_dict(),
        "no_prediction": None if agreement else str(outcome.no_prediction),
        "decisions": agreement
        and {**asdict(agreement.decisions), "identical": agreement.decisions.identical},
        "requests": [
            {
                "text": text,
                "tokens": list(live.recording.generation.tokens),
                "passes": live.trace.passes,
                "decide_us": live.decide_us.tolist(),
            }
            for text, live in zip(texts, outcome.done, strict=True)
        ],
        "tokens_differing": outcome.tokens_differing if outcome.compared else None,
        "divergences": [asdict(found) for found in outcome.divergences],
        "forced_divergences": [asdict(found) for found in outcome.forced_divergences],
        "forced_identical": outcome.forced if job.check_forced else None,
        "trace": None if job.record is None else str(job.record),
    }


def print_json(job: Job, outcome: Outcome, texts: Sequence[str]) -> None:
    """Print everything as one JSON object; NaN (0/0) becomes null."""
    click.echo(msgspec.json.encode(_document(job, outcome, texts)).decode())


def write(path: Path, job: Job, outcome: Outcome) -> None:
    """Write a row per counted request, ``source`` measured or, if there is such, predicted."""
    name = str(job.record or "")
    tables = []
    for source, result in _results(outcome):
        table = request_table([result], name)
        tables.append(table.add_column(0, "source", pa.array([source] * len(table))))
    about = _document(job, outcome, [""] * len(outcome.done))
    kept = {key: about[key] for key in ("version", "model", "device", "dtype", "profile")}
    write_table(path, pa.concat_tables(tables), kept)
