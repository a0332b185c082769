"""``oled-sim generate``: a model that generates with offloaded experts, under a policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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
from oled_sim.cli.options import cost_options, options

if TYPE_CHECKING:
    from oled_sim.costs.lanes import LaneCosts
    from oled_sim.engine.runner import Contender
    from oled_sim.offloaded.job import Job, Outcome

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim generate --cache 40 --prompt "Question: What is 3 + 4?" --max-new-tokens 32
  oled-sim generate --policy lru --cache 40 --limit 3 --check-forced --record my-run
  oled-sim generate --model ./LLaDA2.0-mini --policy oled --cache 40 --profile h200.toml \\
      --prompts gsm8k_test.jsonl --limit 8 --out figures.parquet
"""

policy_options = options(
    click.option(
        "--policy", "policies", multiple=True, default=("oled",), show_default=True,
        metavar="SPEC",
        help="One policy, as for `oled-sim run`; none that looks into the future.",
    ),
    click.option(
        "--cache", type=click.IntRange(min=0), metavar="C",
        help="Average number of resident experts per MoE layer.",
    ),
    click.option(
        "--scope", type=click.Choice(["layer", "global"]), default="layer", show_default=True,
        help="One pool per layer, or one for all.",
    ),
    click.option(
        "--staging", type=click.IntRange(min=1), default=16, show_default=True, metavar="N",
        help="Slots where transfers land, on top of the cache.",
    ),
    click.option(
        "--warmup", type=click.IntRange(min=0), metavar="N",
        help="Requests that come first and are not counted. Default: 1, but 0 if it is the only"
        " one.",
    ),
    click.option("--cold", is_flag=True, help="Empty the cache before every request."),
    click.option(
        "--confidence", type=click.Choice(["previous", "end"]), default="previous",
        show_default=True, help="Which confidence the policy sees.",
    ),
    click.option(
        "--workers", type=click.IntRange(min=1), metavar="N",
        help="CPU threads that compute experts. Default: 3/4 of the cores beside a GPU, else"
        " half of them.",
    ),
)  # fmt: skip
"""The policy, its cache and the rules of the run."""


@click.command(epilog=EPILOG)
@model_option
@click.option(
    "--prompt", "typed", multiple=True, metavar="TEXT",
    help="A prompt; repeatable. Default: those of --prompts.",
)  # fmt: skip
@prompt_options
@policy_options
@cost_options
@decode_options
@device_options
@click.option(
    "--no-compare", is_flag=True,
    help="Compare with no fully resident run. Without --check-forced there is none then, and the"
    " device need not hold all experts.",
)  # fmt: skip
@click.option(
    "--check-forced", is_flag=True,
    help="Run once more with the resident run's routes and acceptances; tokens must be its own."
    " Makes the resident run even with --no-compare.",
)  # fmt: skip
@click.option(
    "--record", type=click.Path(path_type=Path), metavar="DIR", help="Write the run as a trace."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE",
    help="Write one row per request, measured and predicted: .parquet or .csv.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite files, and a trace, that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def generate(typed: tuple[str, ...], as_json: bool, out: Path | None, **given: Any) -> None:
    """Generate text with experts in host memory and a cache of them on the device.

    The model's own gate decides what is routed where, a policy what is resident, copied or computed
    by the CPU, as in a simulation; one request at a time. The run is compared with one of the same
    model that has all experts resident, and its trace is simulated: decisions must be equal event
    by event, and the predicted time stands beside the measured one. Times leave out what decisions
    take, which is shown apart.
    """
    _check(given, typed, out)
    require_torch("generating")
    # Threads that spin between a small model's short parallel regions make it many times slower
    # as soon as anything else wants the processor, and CPU workers do.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    job = _job(given, typed)
    with _progress(job) as on_pass:
        outcome = _run(job, on_pass)
    from oled_sim.cli.generate_table import print_json, print_outcome, write

    texts = _texts(job, outcome)
    try:
        if out is not None:
            write(out, job, outcome)
    finally:  # a disk that is full takes the file, not the results
        (print_json if as_json else print_outcome)(job, outcome, texts)
    _refuse(outcome)


def _check(given: dict[str, Any], typed: tuple[str, ...], out: Path | None) -> None:
    """Find out before anything is loaded whether the call makes sense."""
    from oled_sim.cli.files import TABLE, check_files, require_folder, require_parent
    from oled_sim.errors import UsageError

    check_files({"--out": out}, forms={"--out": TABLE}, force=given["force"])
    record: Path | None = given["record"]
    if record is not None and not given["force"] and record.is_dir() and any(record.iterdir()):
        raise UsageError(
            f"{record} is not empty: give --record another directory, or --force to replace it"
        )
    if record is not None:
        require_parent(record)
        require_folder(record)
    if len(given["policies"]) > 1:
        raise UsageError("a model generates under one policy: give --policy once")
    rows = {"--prompts": given["prompts"], "--skip": given["skip"], "--limit": given["limit"]}
    for option, value in rows.items():
        if typed and value:
            raise UsageError(f"{option} chooses rows of a file: leave it out with --prompt")


def _job(given: dict[str, Any], typed: tuple[str, ...]) -> Job:
    from oled_sim.cli.cores import require_cores
    from oled_sim.engine.rules import Rules
    from oled_sim.errors import UsageError
    from oled_sim.geometry import GEOMETRIES
    from oled_sim.hardware.identity import default_workers, share_cores
    from oled_sim.hardware.place import find_place
    from oled_sim.model.loading import checkpoint_path, load_tokenizer
    from oled_sim.offloaded.job import Job
    from oled_sim.offloaded.plan import Plan

    dtype = {None: None, "float32": "fp32", "bfloat16": "bf16"}[given["dtype"]]
    place = find_place(given["device"], dtype)
    workers = given["workers"] or default_workers(place.device)
    require_cores(workers)
    share_cores(place.device, workers)
    prompts = prompts_of(given, typed)
    if given["warmup"] is not None and given["warmup"] >= len(prompts):
        raise UsageError(
            f"--warmup {given['warmup']} of {len(prompts)} requests leaves none to count: lower it,"
            " or give more prompts"
        )
    tokenizer = load_tokenizer(given["model"])
    costs = _costs(given, checkpoint_path(given["model"]))
    plan = Plan(
        contender=_contender(given),
        costs=costs,
        rules=Rules(
            scope=given["scope"], staging=given["staging"], warmup=given["warmup"], history=0,
            cold=given["cold"], confidence=given["confidence"],
        ),
        settings=decode_settings(given),
        prompts=[tokenizer.encode(prompt.text) for prompt in prompts],
        workers=workers,
    )  # fmt: skip
    return Job(
        model=given["model"],
        place=place,
        plan=plan,
        prompts=prompts,
        source=_source(given, typed),
        compare=not given["no_compare"],
        check_forced=given["check_forced"],
        record=given["record"],
        overwrite=given["force"],
        stands_for=given["geometry"] if given["geometry"] in GEOMETRIES else None,
        profile=given["profile"],
    )


def _source(given: dict[str, Any], typed: tuple[str, ...]) -> str:
    if typed:
        return "typed"
    return given["prompts"].name if given["prompts"] else "bundled demo prompts"


def _contender(given: dict[str, Any]) -> Contender:
    from oled_sim.cli.simulating import budgets_for
    from oled_sim.contenders import contenders
    from oled_sim.errors import UsageError
    from oled_sim.model.config import LLaDA2Config
    from oled_sim.model.loading import checkpoint_path
    from oled_sim.policy_spec import parse_policies

    (spec,), cache = given["policies"], given["cache"]
    policies = parse_policies([spec])
    if len(policies) != 1:
        raise UsageError(f"{spec} names {len(policies)} policies, and a model generates under one")
    if cache is None and any(p.residency == "budget" for p in policies.values()):
        raise UsageError("no cache size to run: give --cache, such as --cache 40")
    budgets = budgets_for(policies, () if cache is None else (str(cache),), ())
    path = checkpoint_path(given["model"])
    config = LLaDA2Config.from_file(path if path.is_dir() else path.parent)
    (contender,) = contenders(policies, budgets, config.num_experts)
    return contender


def _costs(given: dict[str, Any], path: Path) -> LaneCosts:
    """Return what the policy decides by: for the profile's geometry, or the model's size."""
    from oled_sim.collection import geometry_of
    from oled_sim.costs.lanes import LaneCosts, load_costs
    from oled_sim.costs.store import load_profile
    from oled_sim.geometry import find_geometry
    from oled_sim.model.config import LLaDA2Config

    profile, extrapolate = given["profile"], given["extrapolate"]
    if profile is not None and given["geometry"] is None:
        return LaneCosts(load_profile(profile), extrapolate)
    config = LLaDA2Config.from_file(path if path.is_dir() else path.parent)
    name = given["geometry"] or geometry_of(config)
    return load_costs(find_geometry(name), profile, extrapolate=extrapolate)


@contextmanager
def _progress(job: Job) -> Iterator[Callable[[str], None]]:
    """Show on standard error which run is under way, and its passes."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.description} run: {task.completed} passes"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def on_pass(phase: str) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=None)
            bar.advance(tasks[phase])

        yield on_pass


def _run(job: Job, on_pass: Callable[[str], None]) -> Outcome:
    from oled_sim.cli.interrupted import contents, recorded
    from oled_sim.cli.progress import kernels_of
    from oled_sim.cli.stopping import keeping
    from oled_sim.engine.jit import is_compiled
    from oled_sim.offloaded.job import run_job

    if not all(map(is_compiled, kernels_of([job.plan.contender.policy]))):
        click.echo("Compiling kernels once, about half a minute", err=True)
    before = contents(job.record)
    with keeping(lambda: recorded(job.record, before, len(job.prompts), ", all readable")):
        return run_job(job, on_pass)


def _texts(job: Job, outcome: Outcome) -> list[str]:
    from oled_sim.model.loading import load_tokenizer

    tokenizer = load_tokenizer(job.model)
    return [tokenizer.decode(live.recording.generation.tokens) for live in outcome.done]


def _refuse(outcome: Outcome) -> None:
    """Fail if something that must be equal was not, or could not be compared."""
    from oled_sim.cli.generate_table import divergence_text
    from oled_sim.errors import MeasurementError

    if not all(outcome.forced):
        first = divergence_text(outcome.forced_divergences[0])
        raise MeasurementError(
            f"with the resident run's routes and acceptances tokens should be its own, but {first}"
        )
    if outcome.agreement is None:
        raise MeasurementError(f"no prediction: {outcome.no_prediction}")
    decisions = outcome.agreement.decisions
    if not decisions.identical and not decisions.prefetching:
        raise MeasurementError(
            f"the simulation of the run's trace decided otherwise ({decisions.first_difference}):"
            " please report it with the trace (--record)"
        )
