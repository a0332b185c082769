"""The time of a split of misses without the engine's books: the same to the last bit."""

import numpy as np
import pytest

from oled_sim.costs.tables import cpu_experts_us, cpu_link_us, gpu_experts_us, shared_expert_us
from oled_sim.engine.jit import lean
from oled_sim.engine.whatif import LayerTimer, layer_us, least_slowdowns, least_us, split_us
from oled_sim.policy import Lane
from oled_sim.testing.by_hand import costs_by_hand

LAYERS, LAYER, ROWS, EXPERTS = 2, 1, 4, 24


@lean
def engine_us(lanes, queue, tables, tokens, decided):
    return layer_us(lanes, queue, tables, LAYER, ROWS, tokens, decided)


@lean
def times(copy_us, tables, hits, hit_tokens, cpu, cpu_tokens, lane, load, found):
    """Write the time of a split to ``found``, and a time that it does not undercut."""
    hits_us, link_us, transfers = 0.0, cpu_link_us(tables, ROWS), len(lane) - cpu
    if hits > 0:
        hits_us = gpu_experts_us(tables, hits, hit_tokens)
    if transfers > 0:
        link_us += tables.per_cpu_job_beside_copies_us
    job = cpu, link_us + cpu_experts_us(tables, cpu, cpu_tokens)
    shared_us = shared_expert_us(tables, ROWS)
    found[0] = split_us(tables, copy_us, (hits, hits_us), job, shared_us, lane, load)
    found[1] = least_us(tables, least_slowdowns(tables), transfers * copy_us, job)


@pytest.mark.parametrize("slowdown", [1.0, 1.37])
@pytest.mark.parametrize("extra_us", [0.0, 31.7])
def test_as_the_engine_times_it(slowdown, extra_us):
    costs = costs_by_hand(
        slowdown=slowdown, gpu_per_token_us=0.3, cpu_per_token_us=7.1, h2d_gb_s=17.3
    )
    tables = costs.tables._replace(
        per_arrival_us=extra_us, per_cpu_job_us=extra_us, per_cpu_job_beside_copies_us=extra_us / 2
    )
    copy_us = np.full(LAYERS, costs.h2d_us(costs.geometry.expert_bytes))
    timer = LayerTimer(EXPERTS, copy_us, np.full(LAYERS, 7), 3, costs)
    rng, found = np.random.default_rng(5), np.zeros(2)
    for _ in range(300):
        decided = rng.choice(3, rng.integers(1, EXPERTS), p=rng.dirichlet([1.0, 1.0, 1.0]))
        tokens = rng.integers(1, ROWS + 1, len(decided))
        missed, by = decided != Lane.GPU, [tokens[decided == lane] for lane in range(3)]
        times(
            copy_us[LAYER], tables, len(by[0]), by[0].sum(), len(by[2]), by[2].sum(),
            decided[missed], tokens[missed], found,
        )  # fmt: skip
        engine = engine_us(timer.lanes, timer.queue, tables, tokens, decided)
        assert found[0] == engine
        assert found[1] <= engine + 1e-6


def test_unknown_outside_the_profile():
    costs, found = costs_by_hand(), np.zeros(2)
    beyond = np.array([10**9])
    for lane in (Lane.TRANSFER, Lane.CPU):
        job = int(lane == Lane.CPU)
        times(100.0, costs.tables, 0, 0, job, job * beyond[0], np.full(1, int(lane)), beyond, found)
        assert np.isnan(found[0])
