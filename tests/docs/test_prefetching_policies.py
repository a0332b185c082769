"""docs/prefetching-policies.md: a collection is made and used as printed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "prefetching-policies.md"


@pytest.mark.slow
def test_a_collection_is_made_and_used_as_printed(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [command] = re.findall(r"```console\n(.*?)\n```", text, re.DOTALL)
    call([sys.executable, "-c", code], tmp_path)
    assert np.load(tmp_path / "eams.npz")["eams"].shape == (8, 8, 128)
    program, *rest = command.split()
    tool = str(Path(sys.executable).parent / program)
    found = json.loads(call([tool, *rest, "--requests", "3", "--json"], tmp_path))
    assert [r["parameters"]["collection"] for r in found["results"]] == ["eams.npz", ""]


def call(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
