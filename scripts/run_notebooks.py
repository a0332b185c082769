"""Run notebooks and keep their outputs in them: ``python scripts/run_notebooks.py NOTEBOOK...``.

Tables come from where ``oled_sim.experiment.results`` looks for them.
"""

import sys
from pathlib import Path

from oled_sim.testing.notebooks import run_notebook, write_notebook


def main(paths: list[str]) -> None:
    """Run the notebooks that are named, or all of ``notebooks/``."""
    folder = Path(__file__).parents[1] / "notebooks"
    for path in map(Path, paths or sorted(map(str, folder.glob("*.ipynb")))):
        if not path.is_file():
            sys.exit(f"{path} is no file: name notebooks, such as notebooks/00_tour.ipynb")
        write_notebook(path, run_notebook(path.resolve()))
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
