"""Bugs that other systems reported in public, each as a test that would have caught it here.

Bugs of traces (missing, padded or out-of-range routes) are in tests/trace.
"""

import itertools

import numpy as np
import pytest
from static_placement import Learned

from oled_sim import plugins
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import simulate
from oled_sim.engine.source import MemoryTrace
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.hybrimoe import HybriMoE
from oled_sim.policies.ktransformers import KTransformers
from oled_sim.policies.lfu import LFU
from oled_sim.policies.lru import LRU
from oled_sim.policies.no_cache import NoCache
from oled_sim.policy import Policy
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.trace.schema import SIGNALS

ONE = RoutingGeometry((1,), 8, 1)
TWO = RoutingGeometry((1, 2), 8, 1)
EXPERTS = 8

BUILT_IN = sorted(set(plugins.names(plugins.POLICIES)) - {"full"})  # one budget only
EMPTY_AT_FIRST = (
    "lru", "lfu", "least-stale", "hybrimoe:initial=none", "oled:priority",
)  # fmt: skip
"""Demand-only, without initial residents, and with the same slots throughout."""


def sets(*events, request=0):
    return request_by_hand(ONE, [[[[e] for e in event]] for event in events], request=request)


def pairs(*passes, request=0):
    """Passes of two layers."""
    rows = [[[[e] for e in event] for event in layers] for layers in passes]
    return request_by_hand(TWO, rows, request=request)


def made_up(count=3, geometry=TWO, **options):
    rng = np.random.default_rng(0)
    return [random_request(rng, geometry, request=i, signals=SIGNALS, **options)
            for i in range(count)]  # fmt: skip


def hits_of(policy, traces, cache, scope="layer", geometry=TWO):
    run = Run(policy, geometry, traces[0], cache, scope=scope)
    hits = sum(run.count("hits"))
    return hits + sum(int(run.again(t).course.counts[:, 2].sum()) for t in traces[1:])


def test_policies_have_a_bound_beside_them_and_lru_a_cliff():
    """Is a low hit rate the policy's fault, or the working set's?

    https://github.com/Helldez/BigMoeOnEdge/issues/33
    """
    # Two layers, each with two experts in turn; a cycle touches two of them per pass, four in two
    # passes. One pool of three slots: LRU has always just dropped what comes next, 0 % hits.
    trace = pairs(*[([0], [0]), ([1], [1])] * 6)
    assert hits_of(LRU(), [trace], 1, "global") == 0
    assert hits_of(parse_policy("belady"), [trace], 1, "global") > 0
    assert hits_of(LRU(), [trace], 2, "global") == 24 - 4  # a whole cycle fits


def test_more_hits_need_not_be_faster_when_the_cpu_lane_absorbs_misses():
    """A better hit rate did not move throughput in hybrid mode.

    https://github.com/FlashML-org/FreeToken/issues/174
    """
    # Any number of CPU experts takes 20 + 400 µs, the GPU at most 50 + 2 · 4 + 20.
    costs = costs_by_hand(cpu_fixed_us=400.0, cpu_per_expert_us=0.0)
    trace = sets([0, 1, 2, 3, 7], [0, 1, 2, 3, 7])
    few, many = (Run(KTransformers(), ONE, trace, cache, costs=costs) for cache in (1, 4))
    assert (few.count("hits"), many.count("hits")) == ([1, 1], [4, 4])
    last = [run.record.course.pass_times[-1, 1] for run in (few, many)]
    assert last[0] == pytest.approx(last[1])


@pytest.mark.parametrize("cache", [0, 1, 2])
def test_a_cache_is_never_slower_than_none_when_an_event_exceeds_it(cache):
    """The cache was slower than plain staging once one dispatch exceeded its capacity.

    https://github.com/kekzl/imp/pull/1365
    """
    trace = sets(*[[0, 1, 2, 3, 4, 5]] * 4, [1, 2, 3, 4, 5, 6])
    ends = [
        Run(policy, ONE, trace, cache, staging=1).record.course.pass_times[-1, 1]
        for policy in (LRU(), NoCache())
    ]
    assert ends[0] <= ends[1]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("cache", [0, 1, EXPERTS, EXPERTS + 1])
def test_no_slot_one_slot_and_more_slots_than_experts(name, cache):
    """Zero experts on the GPU failed.

    https://github.com/kvcache-ai/ktransformers/issues/1928
    """
    for trace in made_up(1):
        run = Run(parse_policy(name), TWO, trace, cache)
        parts = [run.count(c) for c in ("hits", "late", "demand", "cpu_misses")]
        assert np.sum(parts, axis=0).tolist() == run.count("activated")
        assert all(len(layer) <= cache for layers in run.seen for layer in layers)
        if cache >= EXPERTS and name != "no-cache":
            assert run.count("hits") == run.count("activated")


def test_every_layer_is_counted_for_itself():
    """The recorder wrote all layers into one row, so every popular expert was one of layer 0.

    https://github.com/kvcache-ai/sglang/pull/46
    """
    history = made_up(2, RoutingGeometry((3, 7), 8, 2))
    geometry = RoutingGeometry((3, 7), 8, 2)  # layers are not numbered 0, 1
    learned = Learned(KTransformers(placement="frequency"), geometry, history, 2)
    counts = learned.simulation.policy._popularity.counts
    tokens = sum(int(t.tokens(p)) for t in history for p in range(t.passes))
    assert counts.sum(axis=1).tolist() == [tokens * geometry.top_k] * 2
    sizes = [len(layer) for layer in learned.residents()]
    assert sum(sizes) == 4 and min(sizes) > 0


def test_global_frequency_may_starve_layers_and_its_ties_are_fixed():
    """One top-k over all layers concentrated experts in few of them, differently each time.

    https://github.com/kvcache-ai/ktransformers/pull/2064
    """
    # Layer 1: experts 0..3 with two tokens each; layer 2: 4..7 with one token each.
    once = pairs(([0, 1, 2, 3] * 2, [4, 5, 6, 7]))
    turned = pairs(([3, 1, 0, 2] * 2, [7, 4, 6, 5]))
    for history in (once, turned):
        whole, each = (
            Learned(KTransformers(placement=p), TWO, [history], 2, scope="global").residents()
            for p in ("frequency", "frequency-layer")
        )
        assert whole == [[0, 1, 2, 3], []]
        assert each == [[0, 1], [4, 5]]  # least and most are the same, ties to the lower id
        three = Learned(KTransformers(placement="frequency"), TWO, [history], 3, scope="global")
        assert three.residents() == [[0, 1, 2, 3], [4, 5]]


def test_a_prefetch_into_a_full_pool_finds_a_victim_or_waits():
    """Prefetches filled the cache of the layer in use, the evictor found no victim and span.

    https://github.com/EfficientMoE/MoE-Infinity/pull/98
    """
    policy = HybriMoE(prefetch_count=EXPERTS, initial="none", prefill="hybrid")
    for scope in ("layer", "global"):
        for trace in made_up(2):
            run = Run(policy, TWO, trace, 1, staging=1, scope=scope)
            assert len(run.seen) == trace.passes  # it ends
            assert all(sum(map(len, layers)) <= 2 for layers in run.seen)


def test_an_eviction_never_takes_back_a_hit_of_its_own_event():
    """An eviction later in the same forward pass overwrote a slot that was already resolved.

    https://github.com/ml-explore/mlx-lm/pull/1588
    """
    # One slot, holding 0. The event hits 0 and brings 1, which stays in its place: 0 is a hit all
    # the same, and 1 is computed from staging before it may have the slot.
    run = Run(LRU(), ONE, sets([0], [0, 1], [0]), 1, staging=1)
    assert run.seen == [[[0]], [[1]], [[0]]]
    assert (run.count("hits"), run.count("demand")) == ([0, 1, 0], [1, 1, 1])
    # One staging slot, and residents take 502 µs: 1 has arrived after 150 and stays in staging
    # until it has been computed, which is after the residents. Only then can 2 be copied.
    costs = costs_by_hand(gpu_fixed_us=500.0)
    run = Run(LRU(), ONE, sets([0], [0, 1, 2]), 1, staging=1, costs=costs)
    (hits,) = run.jobs("hits")
    _, first, second = run.jobs("demand")
    assert first[2] - hits[1] == pytest.approx(150.0)
    assert second[1] - hits[1] == pytest.approx(502.0 + 20.0 + 502.0)  # the shared expert: 20


def test_one_pool_lets_busy_layers_take_it_all_and_layers_of_their_own_do_not():
    """Under one LRU early layers monopolised the cache; synchronous copies went one by one.

    https://github.com/vllm-project/vllm/pull/37190
    """
    # Layer 1 turns over four experts per pass, layer 2 always needs one. Four slots in all: layer
    # 1's four are newer than layer 2's one whenever layer 2 comes.
    trace = pairs(*[([0, 1, 2, 3], [0]), ([4, 5, 6, 7], [0])] * 3)
    pooled = Run(LRU(), TWO, trace, 2, scope="global")
    own = Run(LRU(), TWO, trace, 2, scope="layer")
    assert pooled.count("hits") == [0] * 12
    assert own.count("hits")[1::2] == [0, 1, 1, 1, 1, 1]
    # Copies queue back to back, and the GPU computes meanwhile.
    copies = [job for job in own.jobs("demand") if job[1] < own.record.course.times[1, 0]]
    assert len(copies) == 4
    assert all(b[1] == pytest.approx(a[2]) for a, b in itertools.pairwise(copies))


def test_prefill_is_not_part_of_the_hit_rate_and_can_flush_the_decode_set():
    """A long prompt flushed the decode set; with prefill in the metric it was 75 % too high.

    https://github.com/ggml-org/llama.cpp/pull/27861
    """

    # Prefill touches everything, decode only 6 and 7. Two requests, the first is warm-up.
    def request(number):
        return sets(range(8), [6, 7], [6, 7], request=number)

    def summary(policy):
        source = MemoryTrace(ONE, [request(0), request(1)])
        return simulate(source, policy, costs_by_hand(), 2, Rules(history=0)).summary

    # LRU: the prompt ends with 6 and 7, so decode hits all four; prefill hits 2 of 8.
    lru = summary(LRU())
    assert lru.hit_rate == 1.0 and lru.hit_rate_with_prefill == pytest.approx(6 / 12)

    # A prompt that ends otherwise flushes them: the first decode pass misses both.
    def flushed(number):
        return sets([6, 7, 0, 1, 2, 3, 4, 5], [6, 7], [6, 7], request=number)

    source = MemoryTrace(ONE, [flushed(0), flushed(1)])
    costs = costs_by_hand()
    assert simulate(source, LRU(), costs, 2, Rules(history=0)).summary.hit_rate == 0.5
    # LFU has seen 6 and 7 more often than the rest of the prompt, and keeps them.
    assert simulate(source, LFU(), costs, 2, Rules(history=0)).summary.hit_rate == 1.0


def test_a_layer_that_shrinks_drops_its_least_valued_once():
    """Capacity shrank at every step, with nothing protected.

    https://github.com/aosama/astronomical/issues/732
    """

    class Moving(LFU):
        allocation_period = 1

        def allocate(self, history):
            return np.array([1.0, 3.0])

    # Both layers have two slots. Layer 1 holds 0 (two uses) and 1 (one use); after the first decode
    # pass it has one slot and drops 1. The same allocation again drops nothing.
    trace = pairs(([1, 0], [0]), ([0], [0]), ([0], [0]), ([0], [0]))
    run = Run(Moving(), TWO, trace, 2)
    assert [layers[0] for layers in run.seen] == [[0, 1], [0], [0], [0]]
    assert run.count("hits")[2:] == [1] * 6
    assert run.simulation.state.pools.capacity.tolist() == [1, 3]


@pytest.mark.parametrize("spec", EMPTY_AT_FIRST)
def test_no_policy_without_the_future_beats_the_one_with_it(spec):
    """Belady came out worst, since the trace held no next uses.

    https://github.com/1a1a11a/libCacheSim/issues/25
    """
    traces = made_up(3, passes=14)
    for scope in ("layer", "global"):
        for cache in (1, 2, 4):
            best = hits_of(parse_policy("belady"), traces, cache, scope)
            assert hits_of(parse_policy(spec), traces, cache, scope) <= best


def test_a_ratio_of_nothing_is_not_a_number():
    """A hit ratio of 0/0 was reported as a number.

    https://github.com/Cetsoft/imcache/issues/11
    """
    prompt = [sets([0, 1], request=i) for i in range(2)]  # prefill alone, nothing decoded
    source = MemoryTrace(ONE, prompt)
    summary = simulate(source, Policy(), costs_by_hand(), 2, Rules(history=0)).summary
    assert np.isnan(summary.hit_rate) and summary.hit_rate_with_prefill == 1.0
    assert np.isnan(summary.effective_transfer_ratio)


def test_the_host_holds_every_expert_whatever_is_resident():
    """Host memory did not change with the number of GPU experts.

    https://github.com/kvcache-ai/ktransformers/issues/2084
    """
    source = MemoryTrace(ONE, [sets([0, 1], [2], request=i) for i in range(2)])
    found = [
        simulate(source, LRU(), costs_by_hand(), cache, Rules(history=0)).summary
        for cache in (0, 3, 8)
    ]
    assert {s.host_bytes for s in found} == {8 * 6 * 2**20}
    assert [s.peak_resident_bytes // (6 * 2**20) for s in found] == [0, 3, 8]
