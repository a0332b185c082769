"""Every notebook runs on quick results, and what is committed shows what its cells give."""

import json
import re
from pathlib import Path

import pytest

from oled_sim.experiment import experiment_names, load_experiment, run_experiments
from oled_sim.experiment.results import VARIABLE
from oled_sim.testing.notebooks import CellError, run_notebook

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 500_000
"""Bytes of a notebook with its outputs."""


def experiment_of(path):
    """Return the experiment whose table a notebook shows, or None."""
    name = f"fig{path.name[:2]}"
    return name if name in experiment_names() else None


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Quick results, one folder for all processes of the test session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen") else base
    return shared / "quick-results"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, results, monkeypatch):
    if (name := experiment_of(path)) is not None:
        run_experiments([load_experiment(name)], "quick", results)
    monkeypatch.setenv(VARIABLE, str(results))
    ran = run_notebook(path)
    outputs = [o for c in ran["cells"] if c["cell_type"] == "code" for o in c["outputs"]]
    assert any("image/png" in output["data"] for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_small_outputs(path):
    assert path.stat().st_size < LARGEST
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == i for i, cell in enumerate(code, 1))
    assert any("image/png" in o.get("data", {}) for cell in code for o in cell["outputs"])


def test_every_figure_has_a_notebook():
    shown = {experiment_of(path) for path in NOTEBOOKS}
    assert {name for name in experiment_names() if re.fullmatch(r"fig\d\d", name)} <= shown


def notebook(folder, *cells):
    path = folder / "n.ipynb"
    listed = [{"cell_type": "code", "source": cell, "outputs": ["old"]} for cell in cells]
    path.write_text(json.dumps({"cells": listed}))
    return path


def test_the_last_value_of_a_cell_is_its_output(tmp_path):
    ran = run_notebook(notebook(tmp_path, "a = 2\na * 21", "b = a", "print"))
    first, second, third = (cell["outputs"] for cell in ran["cells"])
    assert first[0]["data"] == {"text/plain": ["42"]}
    assert second == []
    assert third[0]["execution_count"] == 3


def test_cells_run_in_the_folder_of_the_notebook(tmp_path):
    path = notebook(tmp_path, "from pathlib import Path", "Path.cwd().name")
    assert run_notebook(path)["cells"][1]["outputs"][0]["data"]["text/plain"] == [
        repr(tmp_path.name)
    ]


def test_an_error_names_the_cell(tmp_path):
    with pytest.raises(CellError, match=r"n.ipynb, cell 2: ZeroDivisionError"):
        run_notebook(notebook(tmp_path, "a = 1", "a / 0"))
