"""Tables of experiments as notebooks and the scoreboard find them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oled_sim.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

VARIABLE = "OLED_SIM_RESULTS"
"""Environment variable that names the folder of results."""

FOLDERS = ("results/full", "results/quick", "../results/full", "../results/quick")
"""Where results are looked for otherwise, as seen from the repository or from ``notebooks/``."""


def load_table(name: str, folder: Path | str | None = None) -> pd.DataFrame:
    """Return the tidy table of an experiment.

    Args:
        name: such as ``fig12``.
        folder: of results; else what ``OLED_SIM_RESULTS`` names, else the first of
            :data:`FOLDERS` that has the table.

    Raises:
        UsageError: it is nowhere; the sentence says how to make it.
    """
    import pandas as pd

    given = folder or os.environ.get(VARIABLE)
    return pd.read_parquet(_find(name, [given] if given else FOLDERS))


def _find(name: str, folders: Sequence[Path | str]) -> Path:
    files = [Path(folder) / f"{name}.parquet" for folder in folders]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise UsageError(
            f"no results of {name} in {', '.join(map(str, folders))}: run"
            f" `oled-sim experiment {name} --quick`"
        )
    return found
