"""Real traces beside synthetic ones made after them: the paper's figures 4, 7, 10, and miss curves.

To run it, and have the page and the figure made anew::

    python -m oled_sim.experiments.real_and_synthetic --page docs/real-and-synthetic.md \\
        --plot docs/images/real-and-synthetic.png --force

The page says what it shows. Synthetic traces of seed 0 are made in a temporary folder: of each data
set as many requests as the real trace has, at its size; and a few at the paper's sizes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pandas as pd

from oled_sim.analysis import analyze_traces
from oled_sim.cli.files import FIGURE, check_files
from oled_sim.cli.grids import encode
from oled_sim.cli.progress import kernels_of, progress
from oled_sim.errors import OledSimError
from oled_sim.policy_spec import parse_policies
from oled_sim.sweep import part_of
from oled_sim.synthesis.generate import FITTED, make_recipe, write_synthetic
from oled_sim.synthesis.parameters import COUPLINGS, load_data_set
from oled_sim.trace import Trace, open_trace

from ._miss_curves import curves_of
from ._real_and_synthetic_page import Compared, check_page, differences, markdown, replace_tables

DATA_SETS = ("gsm8k", "humaneval", "science")
SIZES = ("llada2.0-mini", "llada2.0-flash")
CACHES = (10, 20, 30, 40, 60, 80, 100, 130, 160, 200)
POLICIES = ("lru", "oled")
BOUND = "belady"
BOUND_REQUESTS = 6
"""The fewest misses without prefetching. It takes four times as long as ``oled`` and never looks at
confidence: it runs on the first requests of the real trace and of the first relation only."""

SIZE_REQUESTS, SIZE_TOKENS, SEED = 2, 1024, 0

Progress = Callable[[int, int], None]


def measure(
    data_sets: Sequence[str] = DATA_SETS,
    *,
    couplings: Sequence[str] = COUPLINGS,
    sizes: Sequence[str] = SIZES,
    policies: Sequence[str] = POLICIES,
    caches: Sequence[int] = CACHES,
    requests: int | None = None,
    jobs: int = 1,
    report: Progress = lambda done, total: None,
) -> list[Compared]:
    """Make the synthetic traces, analyze them with the real ones, and run the policies.

    Args:
        data_sets: those that parameters ship for, fitted on bundled traces.
        couplings: relations of confidence and route stability.
        sizes: models of the paper.
        policies, caches: specifications, and experts per layer; the bound comes besides.
        requests: use only the first of each trace, and make as many.
        jobs: runs at the same time; the results do not depend on it.
        report: called with (parts done, all of them).

    Raises:
        UsageError, TraceError: an unknown data set or trace.
    """
    found = []
    for i, name in enumerate(data_sets):
        with tempfile.TemporaryDirectory() as folder:
            beside = _fitted(Path(folder), name, couplings, requests)
            sized = _sized(Path(folder), name, sizes, couplings)
            found.append(
                Compared(
                    name,
                    analyze_traces(beside, requests=requests),
                    analyze_traces(sized) if sized else {},
                    _curves(beside, policies, caches, requests, jobs,
                            part_of(report, i, len(data_sets))),
                )
            )  # fmt: skip
    return found


def _curves(
    traces: dict[str, Trace], policies: Sequence[str], caches: Sequence[int],
    requests: int | None, jobs: int, report: Progress,
) -> pd.DataFrame:  # fmt: skip
    """Return miss counts of the policies on all traces, and of the bound on the first two."""
    first = dict(list(traces.items())[:2])
    few = min(requests or BOUND_REQUESTS, BOUND_REQUESTS)
    return pd.concat(
        [
            curves_of(traces, policies, caches, requests=requests, jobs=jobs,
                      progress=part_of(report, 0, 2)),
            curves_of(first, (BOUND,), caches, requests=few, jobs=jobs,
                      progress=part_of(report, 1, 2)),
        ],
        ignore_index=True,
    )  # fmt: skip


def _fitted(
    folder: Path, name: str, couplings: Sequence[str], requests: int | None
) -> dict[str, Trace]:
    """Return the real trace first, then synthetic ones of its size by relation."""
    data = load_data_set(name)
    real = open_trace(data.fitted_on)
    number = min(requests or data.requests, data.requests)
    traces = {data.fitted_on: real}
    for coupling in couplings:
        recipe = make_recipe(
            data, FITTED, coupling=coupling, output_tokens=data.output_tokens, seed=SEED
        )
        path = folder / coupling
        write_synthetic(path, recipe, number)
        traces[coupling] = open_trace(path)
    return traces


def _sized(
    folder: Path, name: str, sizes: Sequence[str], couplings: Sequence[str]
) -> dict[str, Trace]:
    """Return traces of the paper's sizes and output length, by size and relation."""
    data, traces = load_data_set(name), {}
    for size in sizes:
        for coupling in couplings:
            recipe = make_recipe(
                data, size, coupling=coupling, output_tokens=SIZE_TOKENS, seed=SEED
            )
            label = f"{size.removeprefix('llada2.0-')}, {coupling}"
            path = folder / f"{size}-{coupling}"
            write_synthetic(path, recipe, SIZE_REQUESTS)
            traces[label] = open_trace(path)
    return traces


EPILOG = """\b
Examples:
  python -m oled_sim.experiments.real_and_synthetic --data-set gsm8k
  python -m oled_sim.experiments.real_and_synthetic --requests 4 --json
"""


@click.command(epilog=EPILOG)
@click.option("--data-set", "data_sets", multiple=True, default=DATA_SETS, show_default=True,
              metavar="NAME", help="Data set with a bundled trace; repeatable.")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=2), metavar="N",
              help="Only the first N of each trace, and as many synthetic ones.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, metavar="N",
              help="Runs at the same time.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, not Markdown.")
@click.option("--page", type=click.Path(path_type=Path), metavar="FILE.md",
              help="Put the tables between the marks of this page, and print nothing.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw the miss curves, as .png or .svg.")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite a figure that exists.")
def main(
    data_sets: Sequence[str], requests: int | None, jobs: int, as_json: bool, page: Path | None,
    plot: Path | None, force: bool,
) -> None:  # fmt: skip
    """Set real traces beside synthetic ones: the paper's figures 4, 7 and 10, and miss curves."""
    try:
        check_files({"--plot": plot}, forms={"--plot": FIGURE}, force=force)
        if page is not None:
            check_page(page)
        kernels = kernels_of(parse_policies((*POLICIES, BOUND)).values())
        with progress(kernels) as report:
            found = measure(data_sets, caches=CACHES, requests=requests, jobs=jobs, report=report)
        if plot is not None:
            _draw(plot, found)
        if page is not None:
            replace_tables(page, markdown(found))
    except OledSimError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    if as_json:
        click.echo(encode(_document(found)))
    elif page is None:
        click.echo(markdown(found))


def _draw(path: Path, found: Sequence[Compared]) -> None:
    from oled_sim.plotting import save
    from oled_sim.plotting.miss_curves import draw_miss_curves

    parts = [one.curves.assign(data_set=one.name) for one in found]
    save(draw_miss_curves(pd.concat(parts)), path, colours=64)


def _document(found: Sequence[Compared]) -> dict[str, Any]:
    def rows(table: pd.DataFrame) -> list[Any]:
        return table.astype(object).where(table.notna(), None).to_dict("records")

    return {
        one.name: {
            "paper": rows(pd.concat([one.fitted["paper"], one.sized["paper"]])),
            "curves": rows(one.curves),
            "differences": [
                {"policy": policy, "trace": trace, **apart._asdict()}
                for policy, trace, apart in differences(one.curves)
            ],
        }
        for one in found
    }


if __name__ == "__main__":
    main()
