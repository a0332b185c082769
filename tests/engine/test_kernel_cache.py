"""Compiled kernels are kept on disk, and never used after a source has changed."""

import subprocess
import sys

import pytest

MODULE = """
from oled_sim.engine.jit import is_compiled, kernel

@kernel
def twice(x):
    return 2 * x
"""
LITERALS = """
from oled_sim.engine.jit import lean, merged

@merged
def plus(x, y):
    return x + y

@lean
def total(x):
    return plus(x, 1) + plus(x, y=2) + plus(3, x)
"""
FIRST, CACHED = ["False", "6", "0"], ["True", "6", "1"]


def run(folder, before=""):
    program = f"{before}\nimport sampled\nhit = sampled.is_compiled(sampled.twice)\n"
    program += "print(hit, sampled.twice(3), sum(sampled.twice.stats.cache_hits.values()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sampled.py").write_text(MODULE)
    return tmp_path


@pytest.mark.slow
def test_second_process_compiles_nothing(folder):
    assert run(folder) == FIRST
    assert run(folder) == CACHED


def test_a_changed_source_of_the_engine_is_noticed(folder):
    run(folder)
    # The digest stands for all sources of the engine: as if one of them had changed.
    changed = "from oled_sim.engine import jit; jit._SOURCES = 'another'"
    assert run(folder, changed) == FIRST
    assert run(folder) == CACHED


def test_a_literal_argument_compiles_nothing_anew(folder):
    (folder / "literals.py").write_text(LITERALS)
    program = "import literals; print(literals.total(10), len(literals.plus.signatures))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["36", "1"]
