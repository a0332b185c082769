"""Putting something in the place of a model's routed experts, for as long as a block lasts."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from oled_sim.model.experts import ExpertExecutor, ExpertWeights
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.moe import LLaDA2MoeGate


class RoutedLayers(Protocol):
    """Runs the experts of layers one after the other, as the model gets to them."""

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor) -> None:
        """Take what a gate chose: inputs [T, h], ids and weights [T, k], logits [T, E]."""
        ...

    def experts(self) -> Tensor:
        """Return the weighted sums [T, h] for the gate before."""
        ...


class RouteSource(Protocol):
    """Says what gates choose, in place of themselves."""

    def routes(self, layer: int, device: Any) -> Tensor:
        """Return int64 [T, k] for MoE layer ``layer`` of the pass that runs."""
        ...


class Attached:
    """A model whose routed experts are run by someone else; it is as before on exit.

    Args:
        model: the model.
        layers: takes over at every gate.
        forced: chooses in place of the gates; weights stay those of the gates' own scores.
    """

    def __init__(
        self, model: LLaDA2MoeModelLM, layers: RoutedLayers, forced: RouteSource | None = None
    ) -> None:
        self._blocks = list(model.sparse_blocks().values())
        self._layers, self._forced = layers, forced
        self._handles: list[Any] = []
        self._executors: list[ExpertExecutor] = []

    def __enter__(self) -> None:
        self._executors = [block.executor for block in self._blocks]
        for layer, block in enumerate(self._blocks):
            self._handles.append(block.gate.register_forward_hook(self._hook(layer)))
            block.executor = _Executor(self._layers)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for block, executor in zip(self._blocks, self._executors, strict=True):
            block.executor = executor
        self._handles, self._executors = [], []

    def _hook(self, layer: int) -> Any:
        def routed(gate: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
            ids, weights, logits = output
            if self._forced is not None:
                assert isinstance(gate, LLaDA2MoeGate)
                ids = self._forced.routes(layer, ids.device)
                weights = gate.weights_of(ids, logits)
            self._layers.routed(args[0], ids, weights, logits)
            return ids, weights, logits

        return routed


class _Executor:
    """An :class:`ExpertExecutor` that leaves all work to someone else."""

    def __init__(self, layers: RoutedLayers) -> None:
        self._layers = layers

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor, experts: ExpertWeights
    ) -> Tensor:
        return self._layers.experts()
