"""Grouped experts on the CPU, and Triton's kernels in its interpreter, against single rows."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from grouping import make, random_event, run_some


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_equals_the_dense_reference_and_leaves_other_rows_alone(cpu, cost, tokens):
    grouped = make(cpu, cost, 40)
    out, expected = run_some(grouped, cpu, cost, tokens, seed=tokens)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_what_else_runs(cpu, cost):
    grouped = make(cpu, cost, 20)
    rows, slots = random_event(cost, 20)
    x = torch.randn(20, cost.hidden_size)
    together = torch.zeros(20 * cost.top_k, cost.hidden_size)
    apart = torch.zeros_like(together)
    grouped.load(rows)
    every = np.arange(len(rows.expert))
    grouped.run(x, every, slots, together)
    for i in every[::-1]:
        grouped.run(x, [i], [slots[i]], apart)
    assert torch.equal(together, apart)
    assert (together != 0).any(1).all()


def test_nothing_to_run_is_no_error(cpu, cost):
    grouped = make(cpu, cost, 4)
    grouped.load(random_event(cost, 4)[0])
    out = torch.ones(16, cost.hidden_size)
    grouped.run(torch.ones(4, cost.hidden_size), [], [], out)
    assert torch.equal(out, torch.ones_like(out))


def test_rows_come_first(cpu, cost):
    with pytest.raises(RuntimeError, match="load"):
        make(cpu, cost, 4).run(torch.ones(4, cost.hidden_size), [], [], torch.ones(16, 64))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, whose interpreter runs it"
)
def test_triton_kernels_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
