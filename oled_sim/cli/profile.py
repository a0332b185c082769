"""``oled-sim profile``: measure this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.errors import OledSimError
from oled_sim.geometry import DEFAULT_GEOMETRY, CostGeometry, find_geometry

if TYPE_CHECKING:
    from oled_sim.hardware.measuring.measure import Measured, Plan

TOY = CostGeometry("toy", 64, 128, 32, 4, 1, 16, 4, 1, 4, 2, 16, 512, weight_bytes=4)
"""What ``--quick`` measures unless a geometry is given."""

MOST_BLOCK = 4096
"""Longest block, in tokens: the LM head is measured up to passes of so many."""

EPILOG = """\b
Examples:
  oled-sim profile --geometry llada2.0-mini --out this-machine.toml
  oled-sim run --policy lru --cache 40 --profile this-machine.toml
  oled-sim profile --quick --device cpu --out toy.toml
"""


@click.command(epilog=EPILOG)
@click.option(
    "--geometry",
    metavar="NAME|FILE",
    help="Model size to measure: a name, a .toml file of sizes, or a model's config.json."
    f" [default: {DEFAULT_GEOMETRY}; a toy with --quick]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE.toml",
    help="Profile to write.",
)
@click.option("--name", help="Name of the profile. [default: the file's]")
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:N. [default: cuda if present]")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="CPU threads that compute experts. [default: 3/4 of the cores; half of them on cpu]",
)
@click.option(
    "--block",
    type=click.IntRange(min=1, max=MOST_BLOCK),
    default=32,
    show_default=True,
    metavar="N",
    help="Block length: passes of up to N tokens run as one graph per layer.",
)
@click.option("--quick", is_flag=True, help="A few points only, to see that everything works.")
@click.option("--note", default="", help="Remark to keep in the profile.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option("--json", "as_json", is_flag=True, help="Print the key figures as JSON.")
def profile(geometry: str | None, out: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Measure what every lane of this machine costs for one model size, in a few minutes.

    Copies by size, experts on GPU and CPU by number and tokens, attention by tokens and context,
    router, LM head, and how much the lanes slow each other, all with the kernels that a replay
    runs. Nothing else should run on the machine meanwhile.
    """
    from oled_sim.cli.files import check_files

    check_files({"--out": out}, forms={"--out": (".toml",)}, force=force)
    _require_torch()
    plan = _plan(_cost(geometry, options["quick"]), options, out)
    from oled_sim.cli.profile_summary import print_json, print_tables
    from oled_sim.cli.stopping import keeping
    from oled_sim.costs.store import save_profile
    from oled_sim.hardware.measuring.measure import measure

    with (
        keeping(lambda: "nothing is kept, a profile is measured in one go"),
        _progress() as on_progress,
    ):
        measured: Measured = measure(plan, on_progress)
    save_profile(measured.profile, out, overwrite=force)
    (print_json if as_json else print_tables)(measured, out)


def _cost(geometry: str | None, quick: bool) -> CostGeometry:
    if geometry is None:
        return TOY if quick else find_geometry(DEFAULT_GEOMETRY)
    return find_geometry(geometry)


def _require_torch() -> None:
    missing = [m for m in ("torch", "safetensors", "tokenizers") if find_spec(m) is None]
    if missing:
        raise OledSimError(f"measuring needs {', '.join(missing)}: pip install 'oled-sim[torch]'")


def _plan(cost: CostGeometry, options: dict[str, Any], out: Path) -> Plan:
    """Return what to measure; weights have the number format of the geometry."""
    # Without a GPU several thread teams share the cores; ones that spin would stop the others.
    if options["device"] == "cpu":
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from oled_sim.cli.cores import require_cores
    from oled_sim.hardware.identity import default_workers
    from oled_sim.hardware.measuring.measure import Plan
    from oled_sim.hardware.place import find_place

    place = find_place(options["device"], {2: "bf16", 4: "fp32"}[cost.weight_bytes])
    workers = options["workers"] or default_workers(place.device)
    require_cores(workers)
    return Plan(
        cost,
        place,
        workers,
        block=options["block"],
        quick=options["quick"],
        name=options["name"] or out.stem,
        note=options["note"],
    )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show on standard error what is being measured, and how far that is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("Measuring {task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("points,"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=None)

        def on_progress(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        yield on_progress
