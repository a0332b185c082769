"""What is free, and refusals before anything is allocated."""

import numpy as np
import pytest
import torch

from oled_sim.errors import CapacityError, CheckpointError, UsageError
from oled_sim.geometry import find_geometry
from oled_sim.hardware import memory
from oled_sim.hardware.host_experts import HostExperts, require_host_memory
from oled_sim.hardware.measuring import rig
from oled_sim.hardware.place import Place, find_place
from oled_sim.hardware.slab import Slab, require_gpu_memory

GIB = 1 << 30
BF16 = Place(torch.device("cpu"), torch.bfloat16)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 100 GiB free and no control groups; returns how to add a file."""
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("meminfo", f"MemTotal: 1 kB\nMemAvailable: {100 * GIB // 1024} kB\n")
    return write


def test_meminfo_alone(machine):
    assert memory.available_host_bytes() == (100 * GIB, "MemAvailable")
    require_host_memory(find_geometry("llada2.0-mini"), 19, BF16)


def test_a_system_that_tells_nothing_has_no_limit(machine, tmp_path):
    (tmp_path / "meminfo").unlink()
    assert memory.available_host_bytes()[0] == float("inf")


def test_the_tightest_group_counts_without_its_page_cache(machine):
    machine("own", "0::/outer/inner\n")
    machine("groups/outer/memory.max", str(40 * GIB))
    machine("groups/outer/memory.current", str(30 * GIB))
    machine("groups/outer/memory.stat", f"anon 1\ninactive_file {5 * GIB}\n")
    machine("groups/outer/inner/memory.max", "max\n")
    machine("groups/outer/inner/memory.current", "1\n")
    assert memory.available_host_bytes() == (15 * GIB, "memory limit of the control group")


def test_version_1_groups(machine):
    machine("own", "5:cpu,cpuacct:/a\n4:memory:/a\n")
    machine("groups/memory/memory.limit_in_bytes", str(8 * GIB))
    machine("groups/memory/memory.usage_in_bytes", str(2 * GIB))
    assert memory.available_host_bytes()[0] == 6 * GIB


def test_too_little_host_memory_is_one_sentence(machine):
    machine("own", "0::/\n")
    machine("groups/memory.max", str(20 * GIB))
    machine("groups/memory.current", "0")
    with pytest.raises(CapacityError) as caught:
        HostExperts(find_geometry("llada2.0-mini"), 19, BF16)
    text = str(caught.value)
    assert "28.5 GiB" in text and "20.0 GiB" in text and "control group" in text
    assert "\n" not in text


def test_too_many_slots_are_refused(machine):
    mini = find_geometry("llada2.0-mini")
    require_gpu_memory(mini, 16000, BF16)
    with pytest.raises(CapacityError, match="17920 expert slots of llada2"):
        Slab(BF16, mini, 17920)
    with pytest.raises(CapacityError, match="GiB for everything else"):
        require_gpu_memory(mini, 16000, BF16, more_bytes=20 * GIB)


def test_places(monkeypatch):
    assert find_place("cpu") == Place(torch.device("cpu"), torch.float32)
    assert find_place("cpu", "bf16").item_bytes == 2
    assert not find_place("cpu").cuda
    with pytest.raises(UsageError, match="bf16 or fp32"):
        find_place("cpu", "fp8")
    with pytest.raises(UsageError, match="unknown device"):
        find_place("gpu")


def test_an_expert_is_one_run_that_a_slot_takes_by_one_copy(cpu, cost):
    told = []
    experts = HostExperts.random(cost, 2, cpu, 5, lambda *done: told.append(done))
    assert told == [(1, 2), (2, 2)]
    f, h = cost.moe_intermediate_size, cost.hidden_size
    slab = Slab(cpu, cost, 3)
    slab.weights[1].copy_(experts.packed[1][7])
    assert slab.up.shape == (3, 2 * f, h) and slab.down.shape == (3, h, f)
    assert torch.equal(slab.up[1], experts.up(1, 7))
    assert torch.equal(slab.down[1], experts.down(1, 7))
    flat = torch.cat([experts.up(1, 7).flatten(), experts.down(1, 7).flatten()])
    assert torch.equal(flat, experts.packed[1][7])
    assert not slab.weights[0].any()
    experts.close()
    experts.close()


def test_random_experts_are_distinct_scaled_and_reproducible(cpu, cost):
    experts = HostExperts.random(cost, 2, cpu, 5)
    flat = torch.cat(experts.packed)
    assert len(np.unique(flat[:, 0].numpy())) == 2 * cost.experts
    assert experts.up(0, 0).std().item() == pytest.approx(cost.hidden_size**-0.5, rel=0.1)
    assert experts.down(0, 0).std().item() == pytest.approx(
        cost.moe_intermediate_size**-0.5, rel=0.1
    )
    assert torch.equal(flat, torch.cat(HostExperts.random(cost, 2, cpu, 5).packed))
    assert not torch.equal(flat, torch.cat(HostExperts.random(cost, 2, cpu, 6).packed))


def test_experts_of_the_bundled_model(cpu, model, tmp_path):
    experts = HostExperts.from_model(model, cpu)
    for position, block in enumerate(model.sparse_blocks().values()):
        for expert in (0, 9):
            weights = block.experts
            up = torch.cat([weights.gate_proj[expert], weights.up_proj[expert]])
            assert torch.equal(experts.up(position, expert), up)
            assert torch.equal(experts.down(position, expert), weights.down_proj[expert])
    with pytest.raises(CheckpointError):
        HostExperts.from_model(tmp_path, cpu)


@pytest.mark.parametrize(
    ("available_bytes", "expected_bytes"),
    [(float("inf"), 4 << 30), (16 << 30, 4 << 30), (8 << 30, 2 << 30)],
)
def test_experts_that_are_measured_take_a_quarter_of_the_memory_at_most(
    available_bytes, expected_bytes, monkeypatch
):
    monkeypatch.setattr(rig, "available_host_bytes", lambda: (available_bytes, "made up"))
    assert rig.host_pool_bytes(Place(torch.device("cuda"), torch.bfloat16)) == expected_bytes
    assert rig.host_pool_bytes(Place(torch.device("cpu"), torch.float32)) == 1 << 30
