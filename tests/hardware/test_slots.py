"""Who lies where: the map of slots, and the arrangement of an event."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.hardware.arrange import Arranger
from oled_sim.hardware.clock import Mark
from oled_sim.hardware.slot_map import SlotMap


def test_residents_get_slots_of_their_own_and_give_them_back():
    slots = SlotMap(layers=2, experts=4, slots=5)
    resident = np.array([[True, False, True, False], [False, True, False, False]])
    places = slots.fill(resident)
    assert [(layer, expert) for layer, expert, _ in places] == [(0, 0), (0, 2), (1, 1)]
    assert len({slot for _, _, slot in places}) == 3
    assert slots.free == 2
    slots.drop(0, 2)
    assert slots.free == 3 and slots.slot[0, 2] == -1


def test_a_slot_that_is_still_read_is_the_last_to_be_used_again():
    slots = SlotMap(layers=1, experts=4, slots=3)
    first, _ = slots.take()
    reader = Mark(None)
    slots.release(first, reader)
    taken = [slots.take() for _ in range(3)]
    assert taken[-1] == (first, reader)
    assert all(mark is None for _, mark in taken[:-1])


def test_filling_anew_forgets_who_was_there():
    slots = SlotMap(layers=1, experts=4, slots=4)
    slots.fill(np.array([[True, True, False, False]]))
    slots.fill(np.array([[False, False, True, False]]))
    assert (slots.slot[0] >= 0).tolist() == [False, False, True, False]
    assert slots.free == 3


def test_all_that_left_give_up_their_slots():
    slots = SlotMap(layers=2, experts=3, slots=6)
    slots.fill(np.ones((2, 3), np.bool_))
    stay = np.array([[True, False, True], [False, False, False]])
    slots.drop_all_gone(stay)
    assert ((slots.slot >= 0) == stay).all()
    assert slots.free == 4


def test_an_event_worked_by_hand():
    # Experts 5, 1, 7, 3: a hit that stays, a hit that leaves, a transfer, one for the CPU; resident
    # 2 leaves though nothing of the event needs it.
    slot = np.array([-1, 10, 11, 12, -1, 13, -1, -1], np.int32)
    resident = np.array([0, 0, 0, 1, 0, 1, 0, 1], np.bool_)
    found = Arranger(8).arrange(
        np.array([5, 1, 7, 3], np.uint16), np.array([0, 0, 1, 2]), slot, resident, late=-1
    )
    assert found.hits.tolist() == [0, 1]
    assert found.slots.tolist() == [13, 10]
    assert found.cpu.tolist() == [3]
    assert found.freed.tolist() == [11]
    assert found.freed_by_hits.tolist() == [10]
    assert slot.tolist() == [-1, -1, -1, 12, -1, 13, -1, -1]


def test_an_expert_on_its_way_is_not_the_cpus():
    slot = np.full(4, -1, np.int32)
    found = Arranger(4).arrange(
        np.array([2, 0], np.uint16), np.array([2, 2]), slot, np.zeros(4, np.bool_), late=2
    )
    assert found.cpu.tolist() == [1]


@given(st.integers(0, 2**32 - 1))
def test_every_slot_is_kept_or_freed_once(seed):
    rng = np.random.default_rng(seed)
    before = rng.random(16) < 0.5
    slot = np.where(before, rng.permutation(16), -1).astype(np.int32)
    held = {e: s for e, s in enumerate(slot.tolist()) if s >= 0}
    experts = rng.permutation(16)[: rng.integers(1, 16)].astype(np.uint16)
    decided = np.where(before[experts], rng.choice([0, 2], len(experts)), rng.integers(1, 3))
    after = rng.random(16) < 0.5
    arranger = Arranger(16)
    found = arranger.arrange(experts, decided, slot, after, late=-1)
    freed = [*found.freed.tolist(), *found.freed_by_hits.tolist()]
    assert sorted(freed) == sorted(s for e, s in held.items() if not after[e])
    assert slot.tolist() == [held[e] if e in held and after[e] else -1 for e in range(16)]
    assert found.slots.tolist() == [held[e] for e in experts[found.hits].tolist()]
    assert set(found.freed_by_hits.tolist()) <= set(found.slots.tolist())
    assert arranger.place[experts].tolist() == list(range(len(experts)))
