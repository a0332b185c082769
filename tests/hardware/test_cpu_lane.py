"""The CPU lane: what it computes, whatever the way and the number of workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the lane computes with torch")

from oled_sim.errors import UsageError  # noqa: E402
from oled_sim.geometry import CostGeometry  # noqa: E402
from oled_sim.hardware.cpu_experts import CpuExperts  # noqa: E402
from oled_sim.hardware.cpu_lane import CpuLane  # noqa: E402
from oled_sim.hardware.cpu_shares import Shares  # noqa: E402
from oled_sim.hardware.place import Place  # noqa: E402
from oled_sim.hardware.rows import event_rows  # noqa: E402

SMALL = CostGeometry("small", 64, 128, 32, 4, 1, 16, 4, 1, 4, 2, 16, 512)
HERE = Place(torch.device("cpu"), torch.float32)
WIDE = CostGeometry("wide", 512, 128, 256, 4, 1, 16, 4, 1, 4, 2, 16, 512)


@dataclass
class Weights:
    packed: list


def weights_of(cost, layers=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    size = 3 * cost.hidden_size * cost.moe_intermediate_size
    return Weights([torch.randn(cost.experts, size, generator=draw) / 8 for _ in range(layers)])


def event_of(cost, tokens, seed=0):
    """Random routes; the experts in the order of their first rows."""
    draw = np.random.default_rng(seed)
    routes = np.array([draw.permutation(cost.experts)[: cost.top_k] for _ in range(tokens)])
    experts = list(dict.fromkeys(routes.ravel().tolist()))
    return event_rows(routes, draw.random(routes.shape), experts, scale=2.5)


def one_by_one(cost, weights, layer, x, event, which):
    """Return the sums [T, h] in fp64, one row at a time."""
    f, h = cost.moe_intermediate_size, cost.hidden_size
    sums = torch.zeros(event.tokens, h, dtype=torch.float64)
    for i in which:
        packed = weights.packed[layer][event.expert[i]].double()
        up, down = packed[: 2 * f * h].view(2 * f, h), packed[2 * f * h :].view(h, f)
        for r in range(event.first[i], event.first[i + 1]):
            token = event.row[r] // cost.top_k
            gate, value = (up @ x[token].double()).chunk(2)
            hidden = torch.nn.functional.silu(gate) * value
            sums[token] += float(event.weight[r]) * (down @ hidden)
    return sums


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sums_come_back_to_the_gpu_while_it_works_on():
    weights, event = weights_of(WIDE), event_of(WIDE, tokens=40)
    place, which = Place(torch.device("cuda"), torch.float32), np.arange(len(event.expert))
    x, busy = torch.randn(40, WIDE.hidden_size), torch.randn(4096, 4096, device="cuda")
    expected = one_by_one(WIDE, weights, 1, x, event, which)
    with CpuLane(weights, place, WIDE, 2, 64) as lane:
        for _ in range(3):
            there = x.cuda()
            lane.submit(1, there, event, which)
            for _ in range(20):
                busy = busy @ busy / 64
            found = lane.result()
            assert found.data_ptr() == lane.sums.data_ptr()
            torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-4)


def lane_of(cost, weights, workers=2, most=64):
    return CpuLane(weights, HERE, cost, workers, most)


@pytest.mark.parametrize("workers", [1, 2])
def test_sums_equal_one_row_at_a_time(workers):
    weights, event = weights_of(SMALL), event_of(SMALL, tokens=9)
    x = torch.randn(9, SMALL.hidden_size)
    which = np.array([0, 2, 3, 7, 8])
    with lane_of(SMALL, weights, workers) as lane:
        lane.submit(1, x, event, which)
        found = lane.result()
    expected = one_by_one(SMALL, weights, 1, x, event, which)
    assert found.shape == (9, SMALL.hidden_size)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_the_sums_are_the_same_bits_however_experts_are_cut(tokens):
    weights, event = weights_of(WIDE), event_of(WIDE, tokens)
    x = torch.randn(tokens, WIDE.hidden_size)
    which = np.arange(min(13, len(event.expert)))[::-1].copy()
    found = []
    for workers in (1, 2):
        with lane_of(WIDE, weights, workers) as lane:
            lane.submit(0, x, event, which)
            found.append(lane.result().clone())
    # Another order of the experts: the rows of a token are added in the order of its top-k.
    with lane_of(WIDE, weights) as lane:
        lane.submit(0, x, event, which[::-1].copy())
        found.append(lane.result().clone())
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert found[0].abs().sum() > 0


def test_a_token_that_no_expert_serves_gets_zeros_and_jobs_leave_nothing_behind():
    weights = weights_of(SMALL)
    full, part = event_of(SMALL, tokens=30, seed=1), event_of(SMALL, tokens=8, seed=2)
    x = torch.randn(30, SMALL.hidden_size)
    with lane_of(SMALL, weights) as lane:
        lane.submit(0, x, full, np.arange(len(full.expert)))
        lane.result()
        lane.submit(0, x[:8], part, np.array([4]))
        found = lane.result()
    served = set((part.row[part.first[4] : part.first[5]] // SMALL.top_k).tolist())
    assert 0 < len(served) < 8
    for token in range(8):
        assert bool(found[token].any()) == (token in served)


def test_a_job_runs_in_the_background_and_says_when():
    weights, event = weights_of(WIDE), event_of(WIDE, tokens=40)
    with lane_of(WIDE, weights) as lane:
        assert lane.poll()  # nothing is under way
        lane.submit(0, torch.randn(40, WIDE.hidden_size), event, np.arange(len(event.expert)))
        while not lane.poll():
            pass
        lane.result()
        times = lane.times
    assert 0 < times.compute_us <= times.end_us - times.begin_us


def test_workers_that_have_ended_start_again():
    weights, event = weights_of(SMALL), event_of(SMALL, tokens=9)
    x, which = torch.randn(9, SMALL.hidden_size), np.arange(5)
    expected = one_by_one(SMALL, weights, 0, x, event, which)
    with lane_of(SMALL, weights) as lane:
        for _ in range(4):
            lane._workers.close()  # waits until they have
            lane.submit(0, x, event, which)
            torch.testing.assert_close(lane.result().double(), expected, rtol=1e-5, atol=1e-5)


def test_a_job_waits_for_its_activations():
    weights, event = weights_of(SMALL), event_of(SMALL, tokens=9)
    workers = CpuExperts(weights, HERE, SMALL, 2, 64, looks=3)
    workers.prepare(0, event, np.arange(5))
    for _ in range(200):  # they end and start again meanwhile
        assert not workers.poll()
    workers.x[:9] = torch.randn(9, SMALL.hidden_size)
    workers.start()
    while not workers.poll():
        pass
    expected = one_by_one(SMALL, weights, 0, workers.x[:9], event, np.arange(5))
    torch.testing.assert_close(workers.sums[:9].double(), expected, rtol=1e-5, atol=1e-5)
    workers.close()


def test_one_job_at_a_time_of_at_least_one_expert(monkeypatch):
    weights, event = weights_of(SMALL), event_of(SMALL, tokens=9)
    x = torch.randn(9, SMALL.hidden_size)
    with lane_of(SMALL, weights) as lane:
        with pytest.raises(ValueError, match="at least one expert"):
            lane.submit(0, x, event, np.arange(0))
        with pytest.raises(IndexError, match="layer 7 of 2"):
            lane.submit(7, x, event, np.arange(1))
        with monkeypatch.context() as patched:
            patched.setattr(CpuExperts, "poll", lambda self: False)  # as if they still computed
            lane.submit(0, x, event, np.arange(3))
            assert not lane.poll()
            assert lane.working
            with pytest.raises(RuntimeError, match="one job at a time"):
                lane.submit(0, x, event, np.arange(1))
        assert lane.result().any()
    with pytest.raises(RuntimeError, match="none once closed"):
        lane.submit(0, x, event, np.arange(1))


def test_a_worker_that_fails_is_reported_and_the_lane_goes_on(monkeypatch):
    weights, event = weights_of(WIDE), event_of(WIDE, tokens=9)
    x, which, lay_out = torch.randn(9, WIDE.hidden_size), np.arange(4), Shares.lay_out

    def with_an_unknown_expert(self, *given):
        most = lay_out(self, *given)
        self.pieces[0, 0] = WIDE.experts
        return most

    with lane_of(WIDE, weights) as lane:
        with monkeypatch.context() as patched:
            patched.setattr(Shares, "lay_out", with_an_unknown_expert)
            lane.submit(0, x, event, which)
            with pytest.raises(RuntimeError, match="out of range"):
                lane.result()
        lane.submit(0, x, event, which)
        expected = one_by_one(WIDE, weights, 0, x, event, which)
        torch.testing.assert_close(lane.result().double(), expected, rtol=1e-5, atol=1e-4)


def test_more_workers_than_torch_has_threads_are_refused():
    weights = weights_of(SMALL)
    CpuExperts(weights, HERE, SMALL, 1, 8)  # the pool runs from here on
    most = torch.get_num_interop_threads()
    with pytest.raises(UsageError, match="ask for fewer"):
        CpuExperts(weights, HERE, SMALL, most + 1, 8)
