"""The parts of a pass that are no routed experts, timed as they follow one another in a pass.

A layer is run from the moment of a decision: residents, shared expert, merge, and the next layer
up to its routing on the host. Marks between the parts give each one's share, so what a launch
adds while the GPU is still busy is not counted, and the shares add up to the whole.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

import numpy as np
import torch

from oled_sim.hardware.backbone import Backbone
from oled_sim.hardware.graphs import Graphs
from oled_sim.hardware.measuring.events import even_rows
from oled_sim.hardware.measuring.rig import SEED, Rig
from oled_sim.hardware.measuring.sweep import Key, Sweep
from oled_sim.hardware.measuring.timing import Clock, between_us
from oled_sim.hardware.rows import event_rows
from oled_sim.hardware.weights import BackboneWeights

RESIDENTS = 24
"""Experts that hit in the layers that are timed, with two tokens each."""

ROUTED_SCALE = 2.5
PARTS = 4
"""A sample gives this many figures, so it may take as many budgets."""

Samples = dict[int, list[float]]


@dataclass
class LayerTimes:
    """Samples of every part, µs, by tokens; ``to_gate`` by tokens and context.

    ``tail``: from the end of a merge until the next layer's routing is on the host, at the usual
    context. ``gate_part``: the router's share of ``to_gate``.
    """

    shared: Samples = field(default_factory=dict)
    merge: Samples = field(default_factory=dict)
    head: Samples = field(default_factory=dict)
    begin: Samples = field(default_factory=dict)
    embedding: Samples = field(default_factory=dict)
    tail: Samples = field(default_factory=dict)
    gate_part: Samples = field(default_factory=dict)
    to_gate: dict[Key, list[float]] = field(default_factory=dict)


def measure_layers(sweep: Sweep, rig: Rig, block: int) -> None:
    """Fill ``dense``, ``gate``, ``shared_expert``, ``merge``, ``lm_head``, ``embedding``,
    ``dense_layer``: block-sized passes as graphs, longer ones kernel by kernel.
    """  # fmt: skip
    a, times = rig.axes, LayerTimes()
    usual = sweep.clock
    clock = replace(usual, most=usual.most * usual.rounds, budget_us=PARTS * usual.budget_us)
    weights = BackboneWeights.random(rig.place, rig.cost, rig.layers, SEED)
    every = sorted({*a.tokens, *a.dense_tokens})
    rows = [t for t in a.head_tokens if t > block]
    with sweep.step("layers"):
        for i, tokens in enumerate(every):
            walk = _walk(clock, rig, weights, tokens, min(block, tokens))
            _measure_tokens(walk, times)
            if tokens in a.head_tokens and tokens <= block:
                times.head[tokens] = clock.repeat(walk.head)
            sweep.on_progress("layers", i + 1, len(every) + len(rows))
        for i, tokens in enumerate(rows):  # as many rows as several requests would have
            walk = _walk(clock, rig, weights, tokens, tokens + 1)
            times.head[tokens] = clock.repeat(walk.head)
            sweep.on_progress("layers", len(every) + i + 1, len(every) + len(rows))
    _keep(sweep, rig, times)


@dataclass
class _Walk:
    """A backbone with ``tokens`` tokens per pass, and the residents of a layer."""

    clock: Clock
    rig: Rig
    backbone: Backbone
    tokens: int
    graphs: Graphs | None
    layer: int = 0

    def __post_init__(self) -> None:
        cost = self.rig.cost
        assigned = self.tokens * cost.top_k
        count = min(RESIDENTS, cost.experts, assigned)
        rows = even_rows(count, 2 if 2 * count <= assigned and self.tokens > 1 else 1, cost.top_k)
        self.rows, self.which = rows, np.arange(count, dtype=np.int32)
        draw = np.random.default_rng(SEED)
        self.slots = draw.permutation(self.rig.slab.slots)[:count].astype(np.int32)
        self.sums = torch.zeros_like(self.backbone.hidden)
        self.all = np.arange(cost.experts, dtype=np.int32)

    def next_layer(self) -> int:
        """Return the next MoE layer, whose weights no cache holds."""
        self.layer = (self.layer + 1) % self.rig.layers
        return self.layer

    def to_routing(self) -> dict[str, float]:
        """Run a layer from its decision to the next one's routing; return its parts, µs."""
        backbone, mark = self.backbone, self.clock.mark
        layer = self.next_layer()
        after = (layer + 1) % self.rig.layers
        self.clock.synchronize()
        start = time.perf_counter_ns()
        marks = [mark()]
        self._up_to_merge(layer, marks)
        backbone.to_gate(after)
        marks.append(mark())
        ids, gates = backbone.wait_routing()
        event_rows(ids, gates, self.all, ROUTED_SCALE)
        whole_us = (time.perf_counter_ns() - start) / 1e3
        self.clock.synchronize()
        hits, shared, merge, to_gate = (between_us(a, b) for a, b in pairwise(marks))
        tail = max(to_gate, whole_us - hits - shared - merge)
        return {"shared": shared, "merge": merge, "to_gate": to_gate, "tail": tail}

    def gate(self) -> float:
        """Run the router alone behind a merge; return its time, µs."""
        layer = self.next_layer()
        self.clock.synchronize()
        marks = [self.clock.mark()]
        self._up_to_merge(layer, marks)
        if self.graphs is None or not self.graphs.replay(layer):
            self._route(layer)
        marks.append(self.clock.mark())
        self.clock.synchronize()
        return between_us(marks[-2], marks[-1])

    def head(self) -> float:
        """Run the LM head behind a merge; return the time until its answer is here, µs."""
        self.clock.synchronize()
        start = time.perf_counter_ns()
        marks = [self.clock.mark()]
        self._up_to_merge(self.next_layer(), marks)
        self.backbone.head()
        self.backbone.wait_head()
        whole_us = (time.perf_counter_ns() - start) / 1e3
        self.clock.synchronize()
        return max(0.0, whole_us - between_us(marks[0], marks[-1]))

    def capture(self, contexts: list[int]) -> None:
        """Capture what can run as graphs."""
        self.backbone.capture(contexts, self.sums)  # nothing, where passes are no block
        self.rig.grouped.capture(self.backbone.x, self.backbone.out)
        if self.graphs is not None:
            for layer in range(self.rig.layers):
                self.graphs.capture(layer, lambda n=layer: self._route(n))

    def _route(self, layer: int) -> None:
        self.backbone.gate(layer)
        self.backbone.out.zero_()

    def _up_to_merge(self, layer: int, marks: list) -> None:
        backbone, grouped = self.backbone, self.rig.grouped
        grouped.load(self.rows)
        grouped.run(backbone.x, self.which, self.slots, backbone.out)
        marks.append(self.clock.mark())
        backbone.shared(layer)
        marks.append(self.clock.mark())
        backbone.merge(layer, self.sums)
        marks.append(self.clock.mark())


def _walk(clock: Clock, rig: Rig, weights: BackboneWeights, tokens: int, block: int) -> _Walk:
    """Return a backbone at a pass of some tokens, captured as graphs if they are a block."""
    a, is_block = rig.axes, tokens == block
    # The same for all, so that the memory of one serves the next.
    capacity = max(block, a.tokens[-1], a.dense_tokens[-1] + a.context[-1])
    backbone = Backbone(rig.place, rig.cost, rig.layers, block, capacity, SEED, is_block, weights)
    backbone.begin_pass(tokens, 0)
    graphs = Graphs(rig.place.device) if is_block and rig.place.cuda else None
    walk = _Walk(clock, rig, backbone, tokens, graphs)
    walk.capture(_contexts(rig, tokens))
    return walk


def _contexts(rig: Rig, tokens: int) -> list[int]:
    """Return the contexts at which a pass of some tokens is measured."""
    a = rig.axes
    return a.context if tokens in a.dense_tokens else [0]


def _measure_tokens(walk: _Walk, times: LayerTimes) -> None:
    """Measure all parts of passes of some tokens but the LM head."""
    t, contexts = walk.tokens, _contexts(walk.rig, walk.tokens)
    for context in contexts:
        walk.backbone.begin_pass(t, context)
        found = _repeat(walk.clock, walk.to_routing)
        times.to_gate[t, context] = found["to_gate"]
        if context == _usual(walk.rig, contexts):
            times.shared[t], times.merge[t] = found["shared"], found["merge"]
            times.tail[t] = found["tail"]
    _measure_start(walk, times, _usual(walk.rig, contexts))


def _measure_start(walk: _Walk, times: LayerTimes, context: int) -> None:
    """Measure the start of a pass, and the router by itself."""
    t, backbone, clock = walk.tokens, walk.backbone, walk.clock
    table = backbone.weights.embedding
    ids = torch.zeros(t, dtype=torch.int64, device=table.device)
    times.embedding[t] = clock.device_times(lambda: table.index_select(0, ids))
    times.begin[t] = clock.device_times(lambda: backbone.begin_pass(t, context))
    times.gate_part[t] = clock.repeat(walk.gate)


def _usual(rig: Rig, contexts: list[int]) -> int:
    """Return the context of parts that hardly depend on it."""
    return rig.axes.usual_context if rig.axes.usual_context in contexts else contexts[-1]


def _repeat(clock: Clock, sample: Callable[[], dict[str, float]]) -> dict[str, list[float]]:
    """Take samples as :meth:`Clock.repeat` does, of several parts at once."""
    taken: dict[str, list[float]] = defaultdict(list)

    def one() -> float:
        parts = sample()
        for name, us in parts.items():
            taken[name].append(us)
        return sum(parts.values())

    kept = len(clock.repeat(one))
    return {name: found[-kept:] for name, found in taken.items()}


def _keep(sweep: Sweep, rig: Rig, times: LayerTimes) -> None:
    """Turn samples into tables; parts that cannot be timed by themselves are differences."""
    a, layers = rig.axes, rig.cost.dense_layers
    dense = {
        key: _less(found, median(times.gate_part[key[0]])) for key, found in times.to_gate.items()
    }
    usual = {t: median(dense[t, _usual(rig, _contexts(rig, t))]) for t in times.tail}
    sweep.keep_grid("dense", a.dense_tokens, a.context, dense)
    curves = {
        "gate": {t: _less(times.tail[t], usual[t]) for t in a.tokens},
        "shared_expert": {t: times.shared[t] for t in a.tokens},
        "merge": {t: times.merge[t] for t in a.tokens},
        "lm_head": {t: times.head[t] for t in a.head_tokens},
        "embedding": {t: times.embedding[t] for t in a.tokens},
        "dense_layer": {t: _mlp(times, t, usual[t], layers) for t in a.tokens},
    }
    for name, samples in curves.items():
        sweep.keep_curve(name, samples)


def _mlp(times: LayerTimes, tokens: int, dense_us: float, layers: int) -> list[float]:
    """Return what a dense layer takes beside its attention; nothing where there is none."""
    if layers == 0:
        return [0.0]
    embedding_us = median(times.embedding[tokens])
    return _less([(us - embedding_us) / layers for us in times.begin[tokens]], dense_us)


def _less(samples: list[float], us: float) -> list[float]:
    return [max(0.0, sample - us) for sample in samples]
