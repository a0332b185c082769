"""Everything of a model that is no routed expert, at real size, pass by pass and layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.fused_attention import FusedAttention
from oled_sim.hardware.graphs import Graphs
from oled_sim.hardware.place import Place
from oled_sim.hardware.static_attention import StaticAttention
from oled_sim.hardware.steps import FusedSteps, PlainSteps, Steps
from oled_sim.hardware.weights import BackboneWeights, LayerWeights, Mlp, Model
from oled_sim.model.moe import LLaDA2MoeGate


class Backbone:
    """One request's pass through the model, up to each gate and from each merge on.

    A pass is ``begin_pass``, then for every MoE layer ``to_gate``, ``shared``, the routed experts
    (not here: they write ``out``) and ``merge``, then ``head``. All of these launch work on the
    current stream and return; only the two ``wait_`` methods wait. A pass of exactly ``block``
    tokens whose context was given to :meth:`capture` runs as captured graphs.

    MoE layers are counted from 0 among themselves. T is the pass's tokens, k the experts per
    token, h the hidden width.

    Args:
        place: where everything runs.
        cost: sizes of a LLaDA2; constants are the published ones.
        layers: number of MoE layers, at most the geometry's.
        block: tokens per block.
        max_context: most tokens before and in a pass.
        seed: of the random weights.
        graphs: whether :meth:`capture` captures (CUDA only).
        weights: instead of random ones; ``cost``, ``layers`` and ``seed`` are then ignored, see
            :meth:`from_model`.
        fused: whether Triton's kernels run between matrix products; default on CUDA. On the CPU
            they need Triton's interpreter, for tests.
    """

    def __init__(
        self,
        place: Place,
        cost: CostGeometry,
        layers: int,
        block: int,
        max_context: int,
        seed: int,
        graphs: bool = True,
        weights: BackboneWeights | None = None,
        fused: bool | None = None,
    ) -> None:
        self.weights = weights or BackboneWeights.random(place, cost, layers, seed)
        self.place, self.block, self.max_context = place, block, max_context
        self.config = config = self.weights.config
        self.dense_layers = config.first_k_dense_replace
        fused = place.cuda if fused is None else fused
        kind = FusedAttention if fused else StaticAttention
        layers = len(self.weights.layers)
        self.attention_state: StaticAttention = kind(place, config, layers, block, max_context)
        plain = PlainSteps(config)
        self._steps: Steps = FusedSteps(config, max_context, place.device) if fused else plain
        self._buffers = _Buffers(self.weights, block, max_context)
        self._graphs = Graphs(place.device) if graphs and place.cuda else None
        self._routed, self._judged = (torch.cuda.Event() if place.cuda else None for _ in range(2))
        self.tokens = block

    @classmethod
    def from_model(
        cls,
        source: Model,
        place: Place,
        block: int,
        max_context: int,
        graphs: bool = True,
        fused: bool | None = None,
    ) -> Backbone:
        """Return the backbone of a model in memory or of a checkpoint folder.

        Raises:
            CheckpointError: the folder holds no such model.
        """
        weights = BackboneWeights.from_model(source, place)
        layers = len(weights.config.moe_layers)
        return cls(place, weights.cost, layers, block, max_context, 0, graphs, weights, fused)

    @property
    def x(self) -> Tensor:
        """Input of the layer's experts, normed, [T, h]."""
        return self._buffers.x[: self.tokens]

    @property
    def out(self) -> Tensor:
        """Weighted outputs of the routed experts, [T·k, h]; zero after :meth:`to_gate`."""
        return self._buffers.out[: self.tokens * self.config.num_experts_per_tok]

    @property
    def hidden(self) -> Tensor:
        """The residual stream, [T, h]."""
        return self._buffers.hidden[: self.tokens]

    @property
    def logits(self) -> Tensor:
        """fp32 [rows, vocabulary] of the last :meth:`head`, on the device."""
        return self._buffers.logits[: min(self.tokens, self.block)]

    def begin_pass(self, tokens: int, context: int, ids: NDArray | None = None) -> None:
        """Embed the tokens of a pass and run its dense layers.

        Args:
            tokens: T.
            context: tokens whose keys and values were kept; they precede the pass.
            ids: int [T] token ids; None keeps those of the pass before (at first any).

        Raises:
            ValueError: the pass does not fit ``max_context``.
        """
        self.tokens = tokens
        self.attention_state.begin(tokens, context)
        if ids is not None:
            self._buffers.upload(ids)
        if not self._replay("begin", 0):
            self._begin()

    def attention(self, layer: int) -> None:
        """Run a MoE layer up to its experts' input: attention, residual, norm, into ``x``."""
        number = self.dense_layers + layer
        weights = self.weights.layers[number]
        self._attend(number, weights)
        self._steps.norm_for_experts(self.hidden, weights.post_norm, self.x)

    def gate(self, layer: int) -> None:
        """Route ``x``: scores, group-limited choice, copy of ids and weights to the host."""
        host = self._buffers
        ids, weights = host.ids_host[: self.tokens], host.weights_host[: self.tokens]
        self._steps.route(self.x, self._router(layer), ids, weights)

    def to_gate(self, layer: int) -> None:
        """Run a MoE layer up to its routing on the host, and zero ``out``: one graph launch."""
        if not self._replay("to_gate", layer):
            self._to_gate(layer)
        if self._routed is not None:
            self._routed.record()

    def wait_routing(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Wait for the last :meth:`to_gate`; return expert ids and gate weights, [T, k] each.

        Ids descend by biased score. Weights are renormalised and scaled (2.5).
        """
        if self._routed is not None:
            self._routed.synchronize()
        buffers, t = self._buffers, self.tokens
        return buffers.ids_view[:t].copy(), buffers.weights_view[:t].copy()

    def shared(self, layer: int) -> None:
        """Run the shared expert of a MoE layer on ``x``, into a buffer of its own."""
        if not self._replay("shared", layer):
            self._shared(layer)

    def merge(self, layer: int, from_cpu: Tensor | None) -> None:
        """Add to ``hidden``: routed outputs in order of k, shared expert, sums of the CPU lane.

        Args:
            layer: the MoE layer (all merge alike).
            from_cpu: [T, h] on the device, or None.

        Sums are fp32, in this order, rounded once.
        """
        if self.tokens != self.block or not self._replay_merge(from_cpu):
            self._merge(from_cpu)

    def head(self) -> None:
        """Run final norm, LM head and softmax over the pass's last ``block`` tokens (or all)."""
        if not self._replay("head", 0):
            self._head()
        if self._judged is not None:
            self._judged.record()

    def wait_head(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Wait for the last :meth:`head`; return argmax and its probability, [rows] each."""
        if self._judged is not None:
            self._judged.synchronize()
        buffers, rows = self._buffers, min(self.tokens, self.block)
        return buffers.best_view[:rows].copy(), buffers.confidence_view[:rows].copy()

    def capture(self, contexts: Iterable[int], from_cpu: Tensor | None = None) -> None:
        """Capture passes of ``block`` tokens ahead; overwrites the pass at work and kept keys.

        Args:
            contexts: tokens kept before the passes to come. Contexts whose keys are padded to the
                same number share their graphs, so a range costs little more than its ends.
            from_cpu: the tensor that :meth:`merge` will get from the CPU lane, if any.
        """
        if self._graphs is None:
            return
        bucket_of = self.attention_state.bucket_of
        ends = {bucket_of(context + self.block): context for context in contexts}
        for context in ends.values():
            self.tokens = self.block
            self.attention_state.begin(self.block, context)
            self._capture("begin", 0, self._begin)
            for layer in range(len(self.weights.layers) - self.dense_layers):
                self._capture("to_gate", layer, lambda n=layer: self._to_gate(n))
                self._capture("shared", layer, lambda n=layer: self._shared(n))
        self._capture("head", 0, self._head)
        for sums in (None, from_cpu):
            key = ("merge", 0 if sums is None else sums.data_ptr())
            self._graphs.capture(key, lambda s=sums: self._merge(s))

    def _capture(self, part: str, layer: int, call: Callable[[], None]) -> None:
        if self._graphs is not None:
            self._graphs.capture(self._key(part, layer), call, warm=layer > 0)

    def _replay(self, part: str, layer: int) -> bool:
        if self._graphs is None or self.tokens != self.block:
            return False
        return self._graphs.replay(self._key(part, layer))

    def _replay_merge(self, from_cpu: Tensor | None) -> bool:
        pointer = 0 if from_cpu is None else from_cpu.data_ptr()
        return self._graphs is not None and self._graphs.replay(("merge", pointer))

    def _key(self, part: str, layer: int) -> tuple[str, int, int]:
        """Return the key of a graph; only those with attention depend on the keys."""
        attends = part in ("begin", "to_gate")
        return (part, layer, self.attention_state.bucket if attends else 0)

    def _router(self, layer: int) -> LLaDA2MoeGate:
        router = self.weights.layers[self.dense_layers + layer].gate
        assert router is not None  # every layer after the dense ones has one
        return router

    def _begin(self) -> None:
        self.attention_state.turn()
        ids = self._buffers.ids[: self.tokens]
        torch.index_select(self.weights.embedding, 0, ids, out=self.hidden)
        for number, weights in enumerate(self.weights.layers[: self.dense_layers]):
            self._attend(number, weights)
            normed = self._steps.norm(self.hidden, weights.post_norm)
            self.hidden.addmm_(self._inner(normed, weights.mlp), weights.mlp.down.t())

    def _attend(self, number: int, weights: LayerWeights) -> None:
        """Add the attention of a layer, counted over all layers, to ``hidden``."""
        qkv = linear(self._steps.norm(self.hidden, weights.input_norm), weights.qkv)
        mixed = self.attention_state(number, qkv, weights.head_norms)
        self.hidden.addmm_(mixed, weights.dense.t())

    def _to_gate(self, layer: int) -> None:
        self.attention(layer)
        self.gate(layer)
        self.out.zero_()

    def _shared(self, layer: int) -> None:
        mlp = self.weights.layers[self.dense_layers + layer].mlp
        torch.mm(self._inner(self.x, mlp), mlp.down.t(), out=self._buffers.shared[: self.tokens])

    def _inner(self, x: Tensor, mlp: Mlp) -> Tensor:
        """Return the inner activations of a SwiGLU MLP, [T, i]."""
        return self._steps.gate_values(linear(x, mlp.up))

    def _merge(self, from_cpu: Tensor | None) -> None:
        shared = self._buffers.shared[: self.tokens]
        self._steps.merge(self.out, shared, from_cpu, self.hidden)

    def _head(self) -> None:
        buffers, rows = self._buffers, min(self.tokens, self.block)
        last = self._steps.norm(self.hidden[-rows:], self.weights.norm)
        logits = self.logits.copy_(linear(last, self.weights.head))
        best, ids = logits.max(-1)
        confidence = (best - logits.logsumexp(-1)).exp()
        buffers.best_host[:rows].copy_(ids, non_blocking=True)
        buffers.confidence_host[:rows].copy_(confidence, non_blocking=True)


class _Buffers:
    """Static memory of a backbone: what graphs refer to, and what the host reads."""

    def __init__(self, weights: BackboneWeights, block: int, most: int) -> None:
        config, place = weights.config, weights.place
        h, k, device = config.hidden_size, config.num_experts_per_tok, place.device
        like = {"device": device, "dtype": place.dtype}
        self.x, self.hidden, self.shared = (torch.zeros(most, h, **like) for _ in range(3))
        self.out = torch.zeros(most * k, h, **like)
        self.logits = torch.zeros(block, config.vocab_size, device=device)
        self.ids = torch.arange(most, device=device) * 7919 % config.vocab_size
        pin = place.cuda
        self._staged = torch.zeros(most, dtype=torch.int64, pin_memory=pin)
        self._uploaded = torch.cuda.Event() if pin else None
        self.ids_host = torch.zeros(most, k, dtype=torch.int64, pin_memory=pin)
        self.weights_host = torch.zeros(most, k, pin_memory=pin)
        self.best_host = torch.zeros(block, dtype=torch.int64, pin_memory=pin)
        self.confidence_host = torch.zeros(block, pin_memory=pin)
        self.ids_view, self.weights_view = self.ids_host.numpy(), self.weights_host.numpy()
        self.best_view, self.confidence_view = self.best_host.numpy(), self.confidence_host.numpy()

    def upload(self, ids: NDArray) -> None:
        """Send token ids to the device, without waiting for it unless the last are on their way."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        count = len(ids)
        self._staged[:count] = torch.from_numpy(np.ascontiguousarray(ids, np.int64))
        self.ids[:count].copy_(self._staged[:count], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()
