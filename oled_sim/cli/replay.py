"""``oled-sim replay``: run policies on real hardware with the routing of a trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from oled_sim.cli.options import (
    DEFAULT_TRACE,
    FloatRange,
    cache_option,
    cost_options,
    options,
    policy_option,
)

if TYPE_CHECKING:
    from oled_sim.cli.replay_inputs import Inputs
    from oled_sim.hardware.replay_job import Job, Task
    from oled_sim.validation.measured import Point

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim replay --policy lru --policy oled --cache 20,40 --out replays
  oled-sim replay --policy oled --cache 40 --trace mini-gsm8k --trace mini-science \\
      --profile h200.toml --passes 96 --repetitions 3 --verify --out replays
"""

SAMPLED = 97
"""Events between checks against full residency, if not all are checked."""

machine_options = options(
    click.option("--device", metavar="NAME", help="cuda, cuda:N or cpu. Default: a GPU if any."),
    click.option(
        "--workers", type=click.IntRange(min=1), metavar="N",
        help="CPU threads that compute experts. Default: the profile's.",
    ),
    click.option(
        "--checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="FOLDER",
        help="Real weights of this geometry. Default: random ones of the same size.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True,
        help="Of random weights; they do not change what is measured.",
    ),
    click.option(
        "--allow-other-hardware", is_flag=True,
        help="Decide by a profile that was measured on another machine.",
    ),
)  # fmt: skip
"""Where and with what weights, as ``device``, ``workers``, ``checkpoint``, …"""


class Asked(NamedTuple):
    """What was asked for about the run itself."""

    out: Path
    requests: int
    passes: int
    layers: int | None
    repetitions: int
    verify: bool
    patience: float
    force: bool


@click.command(epilog=EPILOG)
@click.option(
    "--trace",
    "sources",
    multiple=True,
    default=(DEFAULT_TRACE,),
    show_default=True,
    metavar="PATH_OR_NAME",
    help="A trace directory, or one that ships with oled-sim; repeatable.",
)
@policy_option
@cache_option
@cost_options
@machine_options
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Requests of every trace that are measured.",
)
@click.option(
    "--passes",
    type=click.IntRange(min=0),
    default=96,
    show_default=True,
    metavar="N",
    help="Decode passes of each; 0 for all.",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run the first MoE layers of the traces alone, where host memory cannot hold all.",
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Runs of each point, from the same state; points take turns.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Compare every event with full residency. Default: about one in a hundred.",
)
@click.option(
    "--patience",
    type=FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Before repetitions, wait up to 3 s for a machine that is slower than its profile says;"
    " SECONDS in all.",
)
@click.option(
    "--scope",
    type=click.Choice(["layer", "global"]),
    default="layer",
    show_default=True,
    help="One pool per layer, or one for all.",
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
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Where points go, a folder each by policy, cache, trace and requests; repetitions that are"
    " there are not run again. Other passes or other settings need another FOLDER.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Measure anew: the first new repetition of a point replaces all that are there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def replay(
    sources: tuple[str, ...], policies: tuple[str, ...], caches: tuple[str, ...],
    profile: str | None, geometry: str | None, extrapolate: bool, as_json: bool, **rest: Any,
) -> None:  # fmt: skip
    """Run policies on this machine, with real copies and kernels and a trace's routing.

    Experts of the real size lie in page-locked host memory, residents and arrivals in slots of the
    GPU; the policy decides live. History and warm-up requests are simulated, then every repetition
    starts from the same residents; all points run once before any runs again. Times leave out what
    decisions take, which is shown apart.
    `oled-sim validate` compares the outcome with the simulation.
    """
    if find_spec("torch") is None:
        from oled_sim.errors import OledSimError

        raise OledSimError("replaying needs torch: pip install 'oled-sim[torch]'")
    from oled_sim.cli.cores import require_cores
    from oled_sim.cli.files import folder_for, require_folder, require_parent
    from oled_sim.cli.replay_inputs import read_inputs

    asked = Asked(*(rest.pop(name) for name in Asked._fields))
    inputs = read_inputs(sources, policies, caches, (geometry, profile, extrapolate))
    _require_weights(rest["checkpoint"])
    require_parent(asked.out)
    require_folder(asked.out)
    require_cores(rest["workers"])
    job = _job(inputs, asked, rest)
    with folder_for(asked.out):
        if tasks := _left_to_do(job, asked):
            _run(job, tasks, asked)
    _report(job, asked, as_json=as_json)


def _require_weights(checkpoint: Path | None) -> None:
    """Refuse a folder without weights before any layer is loaded."""
    from oled_sim.errors import UsageError

    if checkpoint is not None and not any(checkpoint.glob("*.safetensors")):
        raise UsageError(f"{checkpoint} holds no weights (*.safetensors): name a checkpoint folder")


def _job(inputs: Inputs, asked: Asked, rest: dict[str, Any]) -> Job:
    """Put together what is to run, and refuse what this machine cannot."""
    from oled_sim.cli.cores import require_cores
    from oled_sim.engine.rules import Rules
    from oled_sim.hardware.identity import default_workers, hardware, share_cores
    from oled_sim.hardware.place import find_place
    from oled_sim.hardware.replay_job import Job

    costs = inputs.costs
    place = find_place(rest["device"], {2: "bf16", 4: "fp32"}[costs.geometry.weight_bytes])
    workers = rest["workers"] or _workers(costs.workers, default_workers(place.device))
    require_cores(workers)
    if not rest["allow_other_hardware"]:
        costs.profile.require_hardware(hardware(place.device, workers))
    share_cores(place.device, workers)
    return Job(
        traces=inputs.traces,
        contenders=inputs.contenders,
        costs=costs,
        rules=Rules(scope=rest["scope"], staging=rest["staging"]),
        requests=asked.requests,
        passes=asked.passes or None,
        layers=asked.layers,
        repetitions=asked.repetitions,
        place=place,
        workers=workers,
        seed=rest["seed"],
        checkpoint=rest["checkpoint"],
        verify_every=1 if asked.verify else SAMPLED,
        patience_s=asked.patience,
        command=" ".join(["oled-sim", *sys.argv[1:]]),
    )


def _workers(profiled: int, here: int) -> int:
    """Return as many workers as the profile was measured with, if there are cores for them."""
    return profiled if profiled <= len(os.sched_getaffinity(0)) else here


def _left_to_do(job: Job, asked: Asked) -> list[Task]:
    """Return the points of which the folder lacks repetitions, with those that it holds."""
    from oled_sim.hardware.replay_job import require_fit, tasks_of
    from oled_sim.validation.measured import point_name

    tasks = tasks_of(job)
    require_fit(job, tasks)
    if not asked.force:
        tasks = [task._replace(done=_found(task, asked)) for task in tasks]
    left = [task for task in tasks if task.repetitions_done < job.repetitions]
    for task in left:
        _require_place(asked.out / point_name(task.about))
    _say_what_is_there(tasks, left, asked)
    return left


def _require_place(folder: Path) -> None:
    """Refuse a place that a point cannot be written to, before it is measured."""
    from oled_sim.cli.files import require_folder
    from oled_sim.places import require_place

    require_place(folder, "a point's folder", folder=True)
    require_folder(folder)


def _say_what_is_there(tasks: list[Task], left: list[Task], asked: Asked) -> None:
    if len(left) < len(tasks):
        done = len(tasks) - len(left)
        click.echo(f"Note: {done} of {len(tasks)} points are in {asked.out} already", err=True)
    begun = sum(task.done is not None for task in left)
    if begun:
        which = f"{begun} of {len(tasks)} points in {asked.out}"
        click.echo(f"Note: repetitions are added to {which}", err=True)


def _found(task: Task, asked: Asked) -> Point | None:
    """Return what has been measured of a point; refuse one measured otherwise, or damaged."""
    from oled_sim.cli.replay_settings import difference
    from oled_sim.errors import MeasurementError, UsageError
    from oled_sim.validation.measured import (
        ABOUT,
        as_written,
        finish_point,
        point_name,
        read_point,
    )

    folder = asked.out / point_name(task.about)
    try:
        finish_point(folder)
        if not (folder / ABOUT).exists():
            return None
        found = read_point(folder)
    except MeasurementError as error:
        raise MeasurementError(f"{error}; give --force to measure it again") from None
    otherwise = difference(found.about, as_written(task.about))
    if otherwise is not None:
        raise UsageError(
            f"{folder} was measured with {otherwise}: give another --out, or --force to measure it"
            " again"
        )
    if asked.verify:
        _require_verified(found)
    return found


def _require_verified(found: Point) -> None:
    """Refuse a point whose outputs were not all compared: more repetitions would not mend it."""
    from oled_sim.errors import UsageError

    lossless, events = found.about.lossless, len(found.events)
    checked = 0 if lossless is None else lossless.events_checked
    if checked < events:
        raise UsageError(
            f"{found.name} was measured with {checked} of {events} events compared with full"
            " residency, and what has run cannot be compared any more: leave out --verify, give"
            " another --out, or --force to measure it again"
        )


def _run(job: Job, tasks: list[Task], asked: Asked) -> None:
    """Measure, and write after every repetition: it stays, whatever happens later."""
    from oled_sim.cli.stopping import keeping
    from oled_sim.hardware.replay_job import run_tasks
    from oled_sim.validation.measured import point_name, write_point

    left = [job.repetitions - task.repetitions_done for task in tasks]
    passes = sum(n * _passes_once(task) for n, task in zip(left, tasks, strict=True))
    done = 0
    with keeping(lambda: _kept(job, asked, done, sum(left))):
        try:
            with _progress(passes) as (on_load, on_pass):
                for point in run_tasks(job, tasks, on_load=on_load, on_pass=on_pass):
                    write_point(asked.out / point_name(point.about), point, force=True)
                    done += 1
        except KeyboardInterrupt:
            # All that was left then is to give the memory back, which takes seconds: the end of
            # the process does so as well.
            if done < sum(left):
                raise


def _kept(job: Job, asked: Asked, done: int, left: int) -> str:
    """Return what is kept of a run that was stopped when ``done`` of ``left`` repetitions ran."""
    if not done:
        return f"no repetition was finished, {asked.out} is as it was"
    if asked.force:
        others = "points that it did not come to are as they were"
        return f"{done} of {left} repetitions in {asked.out} are new, {others}"
    every = job.repetitions * len(job.traces) * len(job.contenders)
    there = every - left + done
    again = "the same command goes on from there"
    return f"{there} of {every} repetitions are in {asked.out}; {again}"


def _passes_once(task: Task) -> int:
    cut = task.cut
    return sum(cut.read(request).passes for request in cut.requests)


@contextmanager
def _progress(total: int) -> Iterator[tuple[Any, Any]]:
    """Show on standard error how far loading and replaying are."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        load = bar.add_task("Layers of experts in memory", total=None)
        run = bar.add_task("Passes", total=total)

        def on_load(done: int, layers: int) -> None:
            bar.update(load, completed=done, total=layers)

        yield on_load, lambda: bar.advance(run)


def _report(job: Job, asked: Asked, *, as_json: bool) -> None:
    """Print all points; fail if one was not lossless."""
    from oled_sim.cli.replay_table import print_json, print_points
    from oled_sim.cli.stopping import keeping
    from oled_sim.hardware.replay_job import tasks_of
    from oled_sim.validation.measured import point_name, read_point

    again = f"the same command{' without --force' if asked.force else ''} shows them"
    with keeping(lambda: f"all repetitions are in {asked.out}; {again}"):
        points = [read_point(asked.out / point_name(task.about)) for task in tasks_of(job)]
        (print_json if as_json else print_points)(points, asked.out)
        _refuse_losses(points)


def _refuse_losses(points: list[Point]) -> None:
    """Fail if an output differed from that of full residency."""
    from oled_sim.errors import MeasurementError

    for point in points:
        found = point.about.lossless
        if found is not None and not found.worst_relative_error <= found.tolerance:
            raise MeasurementError(
                f"{point.name}: an output was off by {found.worst_relative_error:.2g} of its norm"
                f" from full residency, more than {found.tolerance:g}: the replay is not lossless"
            )
