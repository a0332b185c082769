"""One request of offloaded generation on its way."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.engine.unfolding import PassStart, Room, Unfolding, in_trace
from oled_sim.model.block_decoder import BlockDecoder, Choice, canvas_length
from oled_sim.model.decoding import DecodeSettings, Prediction
from oled_sim.model.generate import PassRecord
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.offloaded.layers import OffloadedLayers
from oled_sim.offloaded.plan import Plan
from oled_sim.offloaded.recording import RecordedPass, Recording
from oled_sim.trace.builder import RequestBuilder


class Conducted:
    """One request on its way: tells the layers what begins and ends, and keeps what was done.

    It is the conductor of :func:`generate`, and the source of routes of a forced run.
    """

    def __init__(
        self, model: LLaDA2MoeModelLM, layers: OffloadedLayers, plan: Plan, request: int,
        settings: DecodeSettings, forced: Recording | None,
    ) -> None:  # fmt: skip
        geometry = model.config.routing_geometry
        self._model, self._layers = model, layers
        self._forced = None if forced is None else forced.passes
        self._embeds = "embedding" in plan.signals
        self.unfolding = Unfolding(
            request, geometry, _room(len(plan.prompts[request]), settings), plan.rules.confidence,
            signals=plan.signals, width=model.config.hidden_size,
        )  # fmt: skip
        self.trace = RequestBuilder(geometry, request)
        self.passes: list[RecordedPass] = []
        self._prediction: Prediction | None = None
        self._embedding: NDArray[np.float16] | None = None

    def before_pass(self, row: int, request: BlockDecoder) -> None:
        """See :class:`~oled_sim.model.generate.Conductor`."""
        if self._forced is not None and len(self.passes) == len(self._forced):
            raise RuntimeError("a forced run goes on where the run that it follows had ended")
        if self._embeds:
            self._embedding = self._mean_embedding(request)
        start = PassStart(
            kind=request.next_kind,
            block=request.block,
            position=np.arange(request.start, request.stop, dtype=np.int32),
            state=request.next_state(),
            embedding=self._embedding,
        )
        self._layers.begin_pass(start)

    def _mean_embedding(self, request: BlockDecoder) -> NDArray[np.float16]:
        ids = torch.from_numpy(request.tokens[request.start : request.stop])
        embedded = self._model.model.word_embeddings(ids.to(self._model.device))
        return embedded.float().mean(0).half().cpu().numpy()

    def choose(self, row: int, prediction: Prediction) -> Choice | None:
        """See :class:`~oled_sim.model.generate.Conductor`."""
        self._prediction = prediction
        return None if self._forced is None else self._forced[len(self.passes)].choice

    def routes(self, layer: int, device: torch.device) -> Tensor:
        """See :class:`~oled_sim.offloaded.attached.RouteSource`."""
        assert self._forced is not None
        return torch.from_numpy(self._forced[len(self.passes)].routes[layer]).to(device)

    def after(self, record: PassRecord) -> None:
        """Take in a pass that has ended."""
        layers = self._layers
        layers.end_pass(record)
        assert self._prediction is not None
        self.passes.append(RecordedPass(record, self._prediction, layers.routes[-1]))
        times = self.unfolding.course.pass_times[len(self.passes) - 1]
        full = np.stack(layers.full_gates[-1]) if layers.full_gates[-1] else None
        self.trace.add_pass(
            kind=record.kind,
            block=record.block,
            context=record.context,
            token_id=record.token_ids,
            position=record.positions,
            state=record.state,
            confidence=in_trace(record.confidence),
            accepted=record.accepted,
            edited=record.edited,
            time_us=float(times[1] - times[0]),
            experts=np.stack(layers.routes[-1]),
            gates=np.stack(layers.gates[-1]),
            full_gate=full,
            embedding=self._embedding,
        )


def _room(prompt: int, settings: DecodeSettings) -> Room:
    """Return the longest course that decoding can take.

    A pass accepts at least one position of a block with masks; a block without them takes a commit
    pass, and under rule 2.1 as many further ones as may edit it.
    """
    length = settings.block_length
    first = prompt // length
    blocks = canvas_length(prompt, settings) // length - first
    each = length + 1 + (settings.max_post_steps + 1 if settings.rule == "2.1" else 0)
    return Room(
        passes=blocks * each + 1,
        first=(first + 1) * length,
        later=length,
        positions=canvas_length(prompt, settings),
    )
