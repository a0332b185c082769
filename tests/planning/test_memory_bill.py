"""The memory bill, worked out by hand."""

import pytest

from oled_sim.errors import CapacityError
from oled_sim.geometry import CostGeometry, find_geometry
from oled_sim.planning.memory import Serving, largest_cache, memory_bill

TOY = CostGeometry("toy", 4, 6, 2, 3, 1, 8, 2, 1, 2, 1, 2, 10)
"""Width 4, three layers of which two have eight experts of width 2, ten words, bf16."""


def test_a_bill_by_hand():
    serving = Serving(context=5, batch=1, block_length=2, staging=3, reserve_bytes=7)
    bill = memory_bill(TOY, serving, 2)
    expert = 3 * 4 * 2 * 2  # gate, up and down, two bytes each
    assert bill.experts == 2 * 2 * expert  # two per layer, two layers
    assert bill.staging == 3 * expert
    assert bill.kv_cache == 5 * (2 * 3 * 1 * 2 * 2)  # K and V, layers, heads, width, bytes
    assert bill.embedding == bill.lm_head == 10 * 4 * 2
    # Per layer: q, k, v 4·(2+2)·2, output 2·2·4, norms of heads 2·2 and of the layer 2·4; per dense
    # layer 3·4·6; per MoE layer a shared expert 3·4·2, the router 8·4 and its bias 8; last norm 4.
    attention, dense, moe = 32 + 16 + 4 + 8, 72, 24 + 32 + 8
    assert bill.layers == (3 * attention + dense + 2 * moe + 4) * 2
    # Of each of five tokens: four vectors, q and k and v, two routed and one shared expert's input,
    # two intermediate vectors and output; logits of two tokens in float32.
    assert bill.activations == 5 * (4 * 4 + 8 + 3 * (2 * 4 + 2 * 2)) * 2 + 2 * 10 * 4
    assert bill.reserve == 7
    parts = (bill.experts, bill.staging, bill.kv_cache, bill.layers, bill.embedding, bill.lm_head)
    assert bill.total == sum(parts) + bill.activations + bill.reserve


def test_mini_has_its_published_size():
    mini = find_geometry("llada2.0-mini")
    bill = memory_bill(mini, Serving(context=1, staging=0), mini.experts)
    weights = bill.experts + bill.layers + bill.embedding + bill.lm_head
    assert weights == pytest.approx(16.26e9 * 2, rel=0.01)  # 16 B parameters in bf16


def test_a_batch_keeps_keys_of_every_request():
    one, four = (memory_bill(TOY, Serving(context=100, batch=b), 1) for b in (1, 4))
    assert four.kv_cache == 4 * one.kv_cache
    assert four.experts == one.experts


def test_the_largest_cache_fits_and_one_more_does_not():
    mini, serving = find_geometry("llada2.0-mini"), Serving(context=4096)
    memory = 12 << 30
    cache = largest_cache(mini, serving, memory)
    assert memory_bill(mini, serving, cache).total <= memory
    assert memory_bill(mini, serving, cache + 1).total > memory


def test_all_experts_are_the_most():
    assert largest_cache(TOY, Serving(context=5), 1 << 40) == TOY.experts


def test_too_little_memory_is_said_with_what_it_takes():
    with pytest.raises(CapacityError, match="without a resident expert"):
        largest_cache(find_geometry("llada2.0-flash"), Serving(context=4096), 8 << 30)
