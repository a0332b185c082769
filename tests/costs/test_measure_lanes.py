"""The measuring script, run small on the CPU, and what its kernels compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.profile import AXES
from oled_sim.costs.store import load_profile, to_toml

torch = pytest.importorskip("torch", reason="measuring runs real kernels, which need torch")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from lanes.axes import full_axes  # noqa: E402
from lanes.cpu import Experts, Workers  # noqa: E402
from lanes.kernels import BLOCK, Attention, Gate, GroupedExperts, Place  # noqa: E402
from lanes.timing import UNMEASURED, spread  # noqa: E402

from oled_sim.geometry import GEOMETRIES, CostGeometry  # noqa: E402

SMALL = CostGeometry("small", 64, 128, 32, 4, 1, 16, 4, 1, 4, 2, 16, 512)
CPU = Place(torch.device("cpu"), rotate_bytes=0, dtype=torch.float32)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "measure_lanes.py"), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lanes")
    done = run("--quick", "--device", "cpu", "--workers", "1", "--name", "here",
        "--raw", str(folder / "raw.json"), "--out", str(folder / "here.toml"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_a_quick_run_gives_a_usable_profile(measured):
    profile = load_profile(measured / "here.toml")
    costs = LaneCosts(profile)
    assert profile.status == "measured"
    assert profile.hardware.workers == 1
    assert costs.gpu_experts_us(2, 3) > 0
    assert costs.cpu_experts_us(4, 10) > costs.cpu_experts_us(1, 1) > 0
    assert costs.h2d_us(profile.cost_geometry.expert_bytes) > 0
    assert costs.slowdown(0, 4) >= 1


def test_the_raw_file_gives_the_same_profile(measured, tmp_path):
    raw, out = measured / "raw.json", tmp_path / "again.toml"
    assert run("--from-raw", str(raw), "--out", str(out)).returncode == 0
    assert to_toml(load_profile(out)) == (measured / "here.toml").read_text()
    assert set(json.loads(raw.read_text())["tables"]) == set(AXES)


def test_existing_files_are_refused_before_measuring(measured):
    done = run("--quick", "--device", "cpu", "--out", str(measured / "here.toml"))
    assert done.returncode == 2
    assert "exists" in done.stderr


def test_grouped_experts_equal_one_expert_at_a_time():
    grouped = GroupedExperts(CPU, SMALL, pool=6)
    call = grouped.call(3, 2)
    grouped.next = 2
    found = call()
    x, target = call.__closure__, None  # the inputs are the call's own
    cells = dict(zip(call.__code__.co_freevars, (c.cell_contents for c in x), strict=True))
    x, source, weights, target = (cells[n] for n in ("x", "source", "weights", "target"))
    for row in range(6):
        expert = 2 + row // 2
        gate, value = (grouped.up[expert] @ x[source[row]]).chunk(2)
        out = grouped.down[expert] @ (torch.nn.functional.silu(gate) * value) * weights[row]
        torch.testing.assert_close(found[target[row]], out, rtol=1e-4, atol=1e-6)


def test_the_gate_keeps_groups_and_renormalises():
    gate = Gate(CPU, SMALL)
    x = CPU.random(5, SMALL.hidden_size)
    weight = next(gate.weight)
    gate.weight = iter([weight])
    ids, weights = gate._select(x)
    scores = (x @ weight.T).sigmoid().view(5, 8, 2)
    for token in range(5):
        # Both experts of a group count: a group's value is the sum of its two scores.
        groups = set(scores[token].sum(-1).topk(4).indices.tolist())
        allowed = [e for e in range(16) if e // 2 in groups]
        best = sorted(allowed, key=lambda e: -scores[token].flatten()[e])[: SMALL.top_k]
        assert ids[token].tolist() == best
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 2.5))


def test_attention_reads_the_context_it_is_asked_for():
    attention = Attention(CPU, SMALL, cache_elements=1 << 16)
    assert attention.whole(3, 10)().shape == (3, SMALL.hidden_size)
    assert attention.projections(3)().shape == (3, SMALL.hidden_size)
    assert attention.block_attention(2, 7)().shape == (2, SMALL.heads, BLOCK, SMALL.head_dim)
    # Keys and values of 2 requests with 7 keys each, in slices rounded up to 128 elements.
    attention.offset = 0
    attention.block_attention(2, 7)()
    assert attention.offset == 2 * -(-2 * SMALL.kv_heads * 7 * SMALL.head_dim // 128) * 128


def test_both_ways_of_the_cpu_lane_compute_the_same():
    experts = Experts(SMALL, 8, pin=False)
    workers = Workers(experts, 1)
    task = experts.task(5, 3)
    experts.next = 2
    workers.by_experts(task)
    shared_out = task.out.clone()
    task.out.zero_()
    experts.next = 2
    workers.by_threads(task)
    assert torch.equal(shared_out, task.out)
    assert shared_out.abs().sum() > 0


def test_cells_beyond_any_pass_in_range_are_left_out():
    mini = GEOMETRIES["llada2.0-mini"]
    axes = full_axes(mini)
    assert axes.reachable(256, 128, mini)  # 4,096 tokens × 8 over 256 experts: 128 each
    assert axes.reachable(256, 256, mini)  # the corner above it
    assert not axes.reachable(256, 512, mini)
    assert axes.reachable(1, 4096, mini)
    assert axes.reachable(8, 4096, mini)


def test_spread_by_hand():
    # 11 samples 0..10: the 10th percentile is sample 1, the 90th sample 9.
    found = spread([float(v) for v in range(10, -1, -1)])
    assert (found.median, found.p10, found.p90, found.repeats) == (5.0, 1.0, 9.0, 11)
    assert spread([]) is UNMEASURED
