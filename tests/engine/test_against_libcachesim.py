"""The engine against libcachesim, access by access, where both mean the same.

libcachesim replays a sequence of single accesses; so every event here activates one expert, in
one pass per access. Two differences remain, and the policies below are written so that they
do not matter:

- libcachesim's caches always admit. The engine keeps the best C of the residents and the
  newcomer, so a rule may bypass; where it could, the newcomer scores +inf at its own event.
- libcachesim's LFU counts while an object is cached, and starts anew when it comes back. ``lfu``
  counts on, so it is compared on sequences where nothing that was evicted ever comes back.

Ties are the same: libcachesim's LFU evicts the least recently used of the least frequent, as the
engine does among equal scores. With C ≥ E the engine starts full, so C < E throughout.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.belady import Belady
from oled_sim.policies.lfu import LFU
from oled_sim.policies.lru import LRU
from oled_sim.policy import Policy
from oled_sim.testing.by_hand import Run, request_by_hand

lcs = pytest.importorskip(
    "libcachesim", reason="libcachesim is not installed (extra dev)", exc_type=ImportError
)

ORACLE_GENERAL = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""A record of libcachesim's oracleGeneral format, 24 bytes; ``next`` is -1 for the last access."""

NEVER = 1 << 40


def next_uses(keys):
    """Return, per access, the index of the next access of the same key, or NEVER."""
    found, later = np.empty(len(keys), np.int64), {}
    for i in range(len(keys) - 1, -1, -1):
        found[i] = later.get(keys[i], NEVER)
        later[keys[i]] = i
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A function that returns, per access, whether a cache of libcachesim hits."""
    path = tmp_path_factory.mktemp("libcachesim") / "accesses.oracleGeneral.bin"

    def replay(kind, keys, slots):
        records = np.zeros(len(keys), ORACLE_GENERAL)
        records["time"] = np.arange(len(keys))
        records["id"] = np.asarray(keys) + 1
        records["size"] = 1
        following = next_uses(keys)
        records["next"] = np.where(following == NEVER, -1, following)
        records.tofile(path)
        reader = lcs.TraceReader(str(path), lcs.TraceType.ORACLE_GENERAL_TRACE)
        cache = kind(cache_size=slots, hashpower=12)
        return [int(cache.get(request)) for request in reader]

    return replay


def ours(policy, keys, slots, experts):
    """Return, per access, the hits of the engine in one layer."""
    geometry = RoutingGeometry((1,), experts, 1)
    trace = request_by_hand(geometry, [[[[int(key)]]] for key in keys])
    return Run(policy, geometry, trace, slots).count("hits")


@dataclass
class Stamped(Policy):
    """Base of rules over [L, E] tables of values that are the same in both scopes."""

    def place(self, setting):
        self._value = np.full((len(setting.routing.layers), self.experts), -np.inf)
        self._now = 0

    def score(self, layer, event):
        (expert,) = event.experts
        self.note(layer, expert, bool(event.resident[expert]))
        self._now += 1
        # libcachesim admits whatever it has just been asked for.
        self._table = self._value.copy()
        self._table[layer, expert] = np.inf
        return self._table[layer]

    def rescore(self, resident):
        return self._table


@dataclass
class FIFO(Stamped):
    """First in, first out."""

    def note(self, layer, expert, resident):
        if not resident:
            self._value[layer, expert] = self._now


@dataclass
class CachedLFU(Stamped):
    """Least frequently used, counting from admission on."""

    def note(self, layer, expert, resident):
        self._value[layer, expert] = self._value[layer, expert] + 1 if resident else 1


@dataclass
class Admitting(Belady):
    """`belady`, but the newcomer is admitted."""

    def place(self, setting):
        super().place(setting)
        self._value = np.zeros((len(setting.routing.layers), self.experts))

    def score(self, layer, event):
        self._value[layer] = super().score(layer, event)
        self._table = self._value.copy()
        self._table[layer, event.experts] = np.inf
        return self._table[layer]

    def rescore(self, resident):
        return self._table


PAIRS = {
    "LRU": (LRU, lcs.LRU),
    "FIFO": (FIFO, lcs.FIFO),
    "LFU": (CachedLFU, lcs.LFU),
    "Belady": (Admitting, lcs.Belady),
}


def accesses(kind, n, experts, seed=0):
    """Return n expert ids: skewed, uniform, in a loop, or with a drifting working set."""
    rng = np.random.default_rng(seed)
    if kind == "skewed":
        return [int(key) for key in rng.zipf(1.3, n) % experts]
    if kind == "uniform":
        return rng.integers(0, experts, n).tolist()
    if kind == "loop":
        return (np.arange(n) % experts).tolist()
    return [(int(i // 40) + int(key)) % experts for i, key in enumerate(rng.integers(0, 9, n))]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "kind",
    ["skewed", *(pytest.param(k, marks=pytest.mark.slow) for k in ("uniform", "loop", "drifting"))],
)
def test_every_access_of_a_long_sequence(theirs, pair, kind):
    experts = 24
    make, cache = PAIRS[pair]
    keys = accesses(kind, 1500, experts)
    hits = []
    for slots in (1, 5, 12, experts - 1):
        mine = ours(make(), keys, slots, experts)
        assert mine == theirs(cache, keys, slots)
        hits.append(sum(mine))
    if kind == "loop" and pair != "Belady":
        assert hits == [0, 0, 0, 0]  # each evicts what comes next
    else:
        assert 0 <= hits[0] < hits[-1]


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=examples(60), deadline=None)
@given(keys=st.lists(st.integers(0, 6), min_size=1, max_size=60), slots=st.integers(1, 6))
def test_every_access_of_short_sequences(theirs, pair, keys, slots):
    make, cache = PAIRS[pair]
    assert ours(make(), keys, slots, 7) == theirs(cache, keys, slots)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_several_layers(theirs, pair, scope):
    # One expert of each of three layers per pass. Under layer scope these are three caches of 4
    # slots; under global scope one cache of 12 slots for all keys, in the order of execution.
    layers, experts, slots = 3, 16, 4
    make, cache = PAIRS[pair]
    columns = [accesses("skewed", 300, experts, seed) for seed in range(layers)]
    keys = [
        layer * experts + e for row in zip(*columns, strict=True) for layer, e in enumerate(row)
    ]
    geometry = RoutingGeometry((1, 2, 5), experts, 1)
    trace = request_by_hand(geometry, [[[[e]] for e in row] for row in zip(*columns, strict=True)])
    mine = Run(make(), geometry, trace, slots, scope=scope).count("hits")
    if scope == "global":
        assert mine == theirs(cache, keys, layers * slots)
    else:
        for layer, column in enumerate(columns):
            assert mine[layer::layers] == theirs(cache, column, slots)


@st.composite
def visits(draw):
    """Accesses on which counting on and counting anew, bypass and admission are the same.

    Some experts are used twice at once and then again and again. Of the slots that they leave,
    at least one is passed on between experts that are used once and never come back. So what
    is evicted never returns, and a newcomer, counting 1, always meets a resident that counts 1.
    """
    hot, spare = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    slots = hot + spare
    keys = [key for key in range(hot) for _ in range(2)]
    newcomer = hot
    for again in draw(st.lists(st.booleans(), min_size=1, max_size=60)):
        if again:
            keys.append(draw(st.integers(0, hot - 1)))
            continue
        keys.append(newcomer)
        newcomer += 1
        if spare > 1 and draw(st.booleans()):
            keys.append(newcomer - 1)  # it stays for good: one slot less to pass on
            spare -= 1
    return keys, slots


@settings(max_examples=examples(100), deadline=None)
@given(visit=visits())
def test_lfu_where_nothing_comes_back(theirs, visit):
    keys, slots = visit
    experts = max(max(keys), slots) + 2
    assert ours(LFU(), keys, slots, experts) == theirs(lcs.LFU, keys, slots)


def test_lfu_differs_where_it_bypasses():
    # a a b b c a b with two slots. Libcachesim admits c in place of a, the less recent of two
    # equals, and misses a. `lfu` transfers c (count 1) and drops it again.
    keys = [0, 0, 1, 1, 2, 0, 1]
    assert ours(LFU(), keys, 2, 4) == [0, 1, 0, 1, 0, 1, 1]


def test_libcachesim_does_not_bypass(theirs):
    assert theirs(lcs.LFU, [0, 0, 1, 1, 2, 0, 1], 2) == [0, 1, 0, 1, 0, 0, 1]
