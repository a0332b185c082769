"""Whether a layer's output is that of full residency (spec §7), checked while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.machine import Machine
from oled_sim.hardware.rows import EventRows
from oled_sim.hardware.slab import Slab

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Allowed error of a layer's experts relative to the norm of their sum, by dtype."""


@dataclass
class Sample:
    """One event: ``x`` [T, h] into the experts, ``before`` and ``after`` of the residual stream."""

    layer: int
    rows: EventRows
    x: Tensor
    before: Tensor
    after: Tensor | None = None


class LosslessCheck:
    """Compares sampled events with the same event computed from experts that are all resident.

    Inputs are cloned while the event runs, which costs two small kernels; the comparison takes
    place between passes, off the clock.

    Args:
        machine: the lanes. cost: sizes of an expert. most_tokens: of an event.
        every: events between samples; 1 checks all.
        seed: of the choice.

    Attributes:
        checked: events compared. worst: the largest relative error so far.
    """

    def __init__(
        self, machine: Machine, cost: CostGeometry, most_tokens: int, every: int, seed: int
    ) -> None:
        self._machine, self._every = machine, every
        self._rng = np.random.default_rng(seed)
        self._slab = Slab(machine.place, cost, cost.experts)
        self._grouped = GroupedExperts(machine.place, cost, self._slab, most_tokens)
        self._samples: list[Sample] = []
        self.checked = 0
        self.worst = 0.0

    @property
    def tolerance(self) -> float:
        """What the error may be."""
        return TOLERANCE[self._machine.place.dtype]

    def reset(self) -> None:
        """Start counting anew."""
        self.checked, self.worst = 0, 0.0

    def at_gate(self, layer: int, rows: EventRows) -> Sample | None:
        """Take the inputs of an event, if it is one of the sample."""
        if self._rng.integers(self._every):
            return None
        backbone = self._machine.backbone
        sample = Sample(layer, rows, backbone.x.clone(), backbone.hidden.clone())
        self._samples.append(sample)
        return sample

    def at_end(self, sample: Sample | None) -> None:
        """Take the output of the event, after its merge."""
        if sample is not None:
            sample.after = self._machine.backbone.hidden.clone()

    def compare(self) -> None:
        """Compare what was taken in the pass that has just ended."""
        for sample in self._samples:
            self.worst = max(self.worst, self._error(sample))
            self.checked += 1
        self._samples.clear()

    def _error(self, sample: Sample) -> float:
        """Return ‖output − reference‖ / ‖sum of the experts‖ of an event."""
        machine, backbone = self._machine, self._machine.backbone
        ids = sample.rows.expert.tolist()
        for slot, expert in enumerate(ids):
            self._slab.weights[slot].copy_(machine.experts.packed[sample.layer][expert])
        every = np.arange(len(ids))
        backbone.x.copy_(sample.x)
        backbone.hidden.copy_(sample.before)
        backbone.out.zero_()
        self._grouped.load(sample.rows)
        self._grouped.run(backbone.x, every, every.astype(np.int32), backbone.out)
        backbone.shared(sample.layer)
        backbone.merge(sample.layer, None)
        reference, before = backbone.hidden.double(), sample.before.double()
        assert sample.after is not None
        off = (sample.after.double() - reference).norm()
        return float(off / (reference - before).norm())
