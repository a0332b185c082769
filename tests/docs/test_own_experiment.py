"""The experiment of docs/experiments.md runs, and goes on from what is there."""

import json
import re
from pathlib import Path

from commands import oled_sim

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"


def test_the_example(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "mine.py").write_text(example)
    command = ("experiment", "./mine.py:EXPERIMENT", "--quick", "--out", "out", "--jobs", 1)
    for measured in (4, 0):
        done = oled_sim(*command, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)
        assert (row["points"], row["measured"]) == (4, measured)
    assert (tmp_path / "out" / "mine.png").is_file()
