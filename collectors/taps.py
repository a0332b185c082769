"""Reading what the gates of a live model return, without slowing the model down.

A hook only keeps references: it launches nothing and copies nothing while the model runs. Once a
pass is over, the kept tensors of all layers are stacked on the device and one asynchronous copy
per signal leaves for pinned host memory; the collector picks it up a pass later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oled_sim.errors import TraceError

GATE_CLASS = "LLaDA2MoeGate"


class GateOutputs(NamedTuple):
    """What the gates of one pass saw and returned; one entry per MoE layer, ascending.

    ``topk_idx`` int64 [N, k]; ``topk_weight`` fp32 [N, k] including the routed scaling factor;
    ``logits`` fp32 [N, E]; ``inputs`` [N, H] (None unless asked for).
    """

    topk_idx: list[Tensor]
    topk_weight: list[Tensor]
    logits: list[Tensor] | None
    inputs: list[Tensor] | None


class GateTap:
    """Forward hooks on every gate of a model, found by class name.

    Use as a context manager: hooks are removed on exit, also when an exception leaves the block.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        logits: bool = False,
        inputs: bool = False,
        name: str = GATE_CLASS,
    ) -> None:
        self._gates = [m for m in model.modules() if type(m).__name__ == name]
        if not self._gates:
            raise TraceError(f"the model has no module of class {name}: it is no LLaDA2 MoE model")
        self._logits, self._inputs = logits, inputs
        self._handles: list[Any] = []
        self._seen: list[tuple[Tensor, tuple[Tensor, Tensor, Tensor]]] = []

    def __enter__(self) -> GateTap:
        self._handles = [gate.register_forward_hook(self._keep) for gate in self._gates]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], []

    def _keep(self, _gate: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        self._seen.append((args[0], output))

    def take(self) -> GateOutputs:
        """Return what the gates returned since the last call, and forget it.

        Raises:
            TraceError: not exactly one call per gate. Hooks are bypassed when a CUDA graph
                replays or when a fused kernel replaces the gate; a trace would then be empty.
        """
        seen, self._seen = self._seen, []
        if len(seen) != len(self._gates):
            raise TraceError(
                f"a pass called {len(seen)} of {len(self._gates)} gates: the model bypasses them"
                " (CUDA graph or fused routing), so nothing can be recorded; turn that off"
            )
        return GateOutputs(
            topk_idx=[out[0] for _, out in seen],
            topk_weight=[out[1] for _, out in seen],
            logits=[out[2] for _, out in seen] if self._logits else None,
            inputs=[x.reshape(-1, x.shape[-1]) for x, _ in seen] if self._inputs else None,
        )


class HostCopy:
    """Tensors on their way to host memory; :meth:`wait` returns them as numpy arrays."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        cuda = any(t.is_cuda for t in tensors.values())
        self._host = {name: _to_host(t) for name, t in tensors.items()}
        self._done = None
        if cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> dict[str, Any]:
        """Wait for the copies and return numpy arrays."""
        if self._done is not None:
            self._done.synchronize()
        return {name: t.numpy() for name, t in self._host.items()}


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_uint(ids: Tensor, experts: int) -> Tensor:
    """Narrow expert ids for the copy: uint8 up to 256 experts, else int32."""
    return ids.to(torch.uint8 if experts <= 256 else torch.int32)
