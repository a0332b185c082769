"""A loop compiled for one kernel is kept on disk, apart from those for others, and never stale."""

import subprocess
import sys

import pytest

MODULE = """
from oled_sim.engine.jit import lean, specialised
from helper import factor

@lean
def doubled(x):
    return 2 * x

@lean
def scaled(x):
    return factor() * x

def loop_for(function):
    def run(x):
        return function(x) + 1
    return specialised(run, function)
"""
HELPER = """
from oled_sim.engine.jit import lean

@lean
def factor():
    return {}
"""
PROGRAM = """
import sampled
for function in (sampled.doubled, sampled.scaled):
    loop = sampled.loop_for(function)
    print(loop(10), sum(loop.stats.cache_hits.values()))
"""


def run(folder):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=True
    )
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sampled.py").write_text(MODULE)
    (tmp_path / "helper.py").write_text(HELPER.format(3))
    return tmp_path


@pytest.mark.slow
def test_second_process_compiles_nothing_and_confuses_nothing(folder):
    assert run(folder) == [(21, 0), (31, 0)]
    assert run(folder) == [(21, 1), (31, 1)]


def test_a_changed_file_that_the_kernel_calls_is_noticed(folder):
    run(folder)
    (folder / "helper.py").write_text(HELPER.format(50))
    assert run(folder) == [(21, 1), (501, 0)]
