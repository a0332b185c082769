"""What ``experiment`` and ``reproduce`` have in common: a folder of results, and filling it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from oled_sim.cli.options import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oled_sim.experiment import Finished, Size

results_options = options(
    click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Folder of results. Default: results/quick or results/full.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        metavar="N",
        help="Processes. Default: as many as cores.",
    ),
)
"""Where results are kept, as ``out``, and how many processes make them, as ``jobs``."""


def size_and_folder(quick: bool, out: Path | None) -> tuple[Size, Path]:
    """Return the size of the grids, and the folder that was given or is usual for it."""
    size: Size = "quick" if quick else "full"
    return size, out or Path("results") / size


def measure(names: Sequence[str], size: Size, folder: Path, jobs: int | None) -> list[Finished]:
    """Run experiments by name as far as they are not there yet, and show how far they are.

    Raises:
        As :func:`~oled_sim.experiment.run_experiments`, or UsageError for an unknown name.
    """
    from oled_sim.cli.grids import cores
    from oled_sim.cli.progress import progress
    from oled_sim.cli.stopping import keeping
    from oled_sim.engine.events import proceed
    from oled_sim.experiment import load_experiment, parts, run_experiments

    experiments = [load_experiment(name) for name in names]
    before = parts(folder)
    with (
        keeping(lambda: _kept(folder, len(parts(folder) - before))),
        progress([proceed], "Measuring") as report,
    ):
        return run_experiments(experiments, size, folder, jobs=jobs or cores(), progress=report)


def _kept(folder: Path, new: int) -> str:
    """Return what is kept of an interrupted run that has measured so many points."""
    if not new:
        return f"no point was finished, {folder} is as it was"
    points = f"{new} points more are" if new > 1 else "1 point more is"
    return f"{points} in {folder}; the same command goes on from there"
