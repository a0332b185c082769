"""``oled-sim plan``: the smallest expert cache that meets a target, and what it costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.options import policy_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oled_sim.geometry import CostGeometry
    from oled_sim.planning.answer import Answer, Question
    from oled_sim.policy import Policy

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

DEFAULT_POLICIES = ("lru", "lru:dispatch=load", "oled", "oled:slack=0.5")
"""Fast to simulate: `oled:exact` is 1 % faster than the last one and takes 20 times as long."""

EPILOG = """\b
Examples:
  oled-sim plan --model llada2.0-mini --gpu-memory 12GiB --target-tpot 25ms
  oled-sim plan --model llada2.0-flash --gpu-memory 96GB --target-tpot 50ms --plot plan.png
  oled-sim plan --model config.json --profile mine.toml --trace my-trace --target-tpot 40ms --json
"""


@click.command(epilog=EPILOG)
@click.option(
    "--model",
    required=True,
    metavar="NAME_OR_PATH",
    help="llada2.0-mini, llada2.0-flash, the folder of a checkpoint, its config.json, or a .toml of"
    " sizes.",
)
@click.option("--target-tpot", "target", required=True, metavar="TIME", help="Such as 50ms.")
@click.option(
    "--gpu-memory", metavar="SIZE", help="Such as 32GiB. Default: that of the profile's GPU."
)
@click.option(
    "--profile",
    metavar="NAME_OR_FILE",
    help="Hardware profile: a bundled name or a .toml file. Default: the model's.",
)
@click.option(
    "--trace",
    "given",
    metavar="PATH_OR_NAME",
    help="Whose routing to simulate. Default: a bundled one for mini, a synthetic one for flash.",
)
@policy_option
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    metavar="N",
    help="Tokens of prompt and output of a request, which the KV cache must hold.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="B",
    help="Requests that run together.",
)
@click.option(
    "--staging",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="N",
    help="Slots where transfers land, on top of the cache.",
)
@click.option(
    "--reserve",
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Memory left to driver, workspaces and allocator.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Use only the first N requests of the trace.",
)
@click.option("--extrapolate", is_flag=True, help="Allow counts outside the profiled range.")
@click.option(
    "--validation",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Results of `oled-sim validate` to say how far predictions may be off. Default: those in"
    " benchmarks/results of a checkout.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw TPOT against GPU memory, as .png or .svg.",
)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def plan(
    model: str, target: str, gpu_memory: str | None, profile: str | None, given: str | None,
    policies: tuple[str, ...], context: int, batch: int, staging: int, reserve: str,
    requests: int, extrapolate: bool, validation: Path | None, as_json: bool,
    plot: Path | None, force: bool,
) -> None:  # fmt: skip
    """Say how many experts to keep on the GPU, and with which policy, to meet a target.

    Simulates policies with cache sizes up to the most that fits, and answers with the smallest
    that meets the target on average, what GPU memory is spent on, and how sure that is.
    """
    from oled_sim.cli.files import FIGURE, check_files
    from oled_sim.cli.grids import encode
    from oled_sim.cli.progress import progress
    from oled_sim.costs.lanes import load_costs
    from oled_sim.engine.budget import parse_bytes
    from oled_sim.planning.accuracy import find_validations
    from oled_sim.planning.answer import Question, answer
    from oled_sim.policy_spec import parse_policies

    question = Question(
        model=_model(model),
        policies=_deployable(parse_policies(policies or DEFAULT_POLICIES)),
        target_us=parse_time_us(target),
        context=context,
        batch=batch,
        staging=staging,
        reserve_bytes=parse_bytes(reserve),
        trace=given,
        requests=requests,
        validation=validation,
    )
    check_files({"--plot": plot}, forms={"--plot": FIGURE}, force=force)
    if validation is not None:
        find_validations(validation)
    costs = load_costs(question.model, profile, extrapolate=extrapolate)
    memory = _bytes(gpu_memory) if gpu_memory else costs.profile.hardware.gpu_memory_bytes
    with progress(_kernels(question)) as report:
        found = answer(question, costs, memory, report)
    if plot is not None:
        _draw(plot, found)
    if as_json:
        click.echo(encode(found.to_dict()))
        return
    from oled_sim.cli.plan_table import print_answer

    print_answer(found)


def _bytes(memory: str) -> int:
    """Return GPU memory in bytes; a small number without a unit is a slip."""
    from oled_sim.engine.budget import parse_bytes
    from oled_sim.errors import UsageError

    found = parse_bytes(memory)
    if memory.strip().isdecimal() and found < 1 << 20:
        raise UsageError(f"--gpu-memory {memory} has no unit: write {memory}GiB")
    return found


def parse_time_us(text: str) -> float:
    """Return the microseconds that ``50ms``, ``0.05s`` or ``800us`` mean.

    Raises:
        UsageError: not a time above 0.
    """
    from oled_sim.errors import UsageError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)", text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{text!r} is no time per token: give for example 50ms")
    return float(match[1]) * {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}[match[2]]


def _model(name: str) -> CostGeometry:
    """Return the sizes of a model by name, of a checkpoint's folder, or of a file."""
    from dataclasses import replace

    from oled_sim.geometry import GEOMETRIES, find_geometry

    folder = Path(name)
    found = find_geometry(str(folder / "config.json") if folder.is_dir() else name)
    # Profiles and traces know a published model by its name, not by that of the user's folder.
    known = (g for g in GEOMETRIES.values() if replace(found, name=g.name) == g)
    return next(known, found)


def _deployable(policies: Mapping[str, Policy]) -> Mapping[str, Policy]:
    """Refuse what nobody can run, or has no cache to size.

    Raises:
        UsageError: a policy looks ahead, or runs with one budget only.
    """
    from oled_sim.errors import UsageError

    for label, policy in policies.items():
        if "future" in policy.needs:
            raise UsageError(f"policy {label!r} knows the future, so it cannot be planned with")
        if policy.residency != "budget":
            raise UsageError(f"policy {label!r} has no cache size to look for: leave it out")
    return policies


def _kernels(question: Question) -> set[Any]:
    """Return what has to be compiled first."""
    from oled_sim.cli.progress import kernels_of
    from oled_sim.planning.routing import BUNDLED

    found = kernels_of(question.policies.values())
    if question.trace is None and question.model.name not in BUNDLED:
        from oled_sim.synthesis.routing import route_layer

        found.add(route_layer)
    return found


def _draw(path: Path, found: Answer) -> None:
    from oled_sim.plotting.planning import draw_answer
    from oled_sim.plotting.style import save

    save(draw_answer(found), path)
