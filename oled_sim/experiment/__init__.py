"""Experiments: the figures of the paper as grids of points, measured once and kept.

The core knows no experiment by name. One is a module (``experiments/figNN_name.py``) with an
:class:`Experiment`, registered as an entry point of the group ``oled_sim.experiments``::

    [project.entry-points."oled_sim.experiments"]
    fig12 = "oled_sim.experiments.fig12_overall:EXPERIMENT"

    def points(size: Size) -> list[Point]:
        traces = ["mini-gsm8k"] if size == "quick" else [SyntheticTrace("llada2.0-mini", "gsm8k")]
        return [RunPoint(t, policy=p, cache=c) for t in traces for p in POLICIES for c in (40, 100)]

    EXPERIMENT = Experiment("fig12", "TPOT and utilization", "5.2, figure 12", points, draw)

After ``pip install -e .``, which makes the entry point known, ``oled-sim experiment fig12 --quick``
writes ``results/quick/fig12.parquet`` (the tidy table), ``fig12.manifest.json`` and ``fig12.png``.
``draw`` takes the table as a pandas frame and returns a figure; it lives in ``oled_sim/plotting/``
so that notebooks can call it.

**Points** are frozen dataclasses of plain data with a ``measure`` that returns rows.

- :class:`RunPoint` simulates one policy with one budget on one trace, with one row per counted
  request. Its docstring lists the parameters, that of ``measure`` the columns. Columns of the
  point itself (``trace``, ``policy``, ``cache``, ``batch``, …) are in every row. A subclass with
  its own :meth:`RunPoint.detail` adds columns from the engine's event records.
  Runs that differ in nothing but policy, cache and link are simulated side by side, reading the
  trace once (:meth:`Point.group`).
- Anything else (an analysis of a trace, say) subclasses :class:`Point`: fields, and ``measure``.
  ``profile_for`` tells which profile its costs come from; None if there are none.

**Notebooks** (``notebooks/NN_name.ipynb``, one per figure, run by ``tests/notebooks`` on quick
results) hold no logic: ``shown(draw(load_table("fig12")))``, with ``shown`` of
``oled_sim.plotting.notebook``. ``scripts/run_notebooks.py`` runs them and keeps their outputs.

**Traces** are bundled names, folders, or :class:`SyntheticTrace`, which is made when missing.

**Skipping.** A point is measured again when its fields, the trace, the profile, the engine, the
policies or the file of its class have changed, else its part in ``parts/`` is used; experiments
share parts. Nothing in a table depends on the clock: same inputs, same bytes.
"""

from oled_sim.experiment.base import Experiment, Point, Rows, Size
from oled_sim.experiment.grid import Detail, RunPoint
from oled_sim.experiment.inputs import Inputs, SyntheticTrace, TraceName
from oled_sim.experiment.registry import experiment_names, load_experiment
from oled_sim.experiment.results import load_table
from oled_sim.experiment.running import Finished, run_experiments
from oled_sim.experiment.store import Store, parts

__all__ = [
    "Detail",
    "Experiment",
    "Finished",
    "Inputs",
    "Point",
    "Rows",
    "RunPoint",
    "Size",
    "Store",
    "SyntheticTrace",
    "TraceName",
    "experiment_names",
    "load_experiment",
    "load_table",
    "parts",
    "run_experiments",
]
