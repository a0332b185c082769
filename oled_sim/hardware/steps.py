"""What a layer does between its matrix products: plain operations, or one Triton launch each."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from oled_sim.model.config import LLaDA2Config
from oled_sim.model.moe import LLaDA2MoeGate

BLOCK = 1024
"""Elements that one program of a kernel over rows takes."""


class Steps(Protocol):
    """Both ways. T tokens, h hidden width, k experts per token, E experts."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm of ``x`` [T, h]."""
        ...

    def norm_for_experts(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Put the RMS norm of ``x`` [T, h] into ``out``, which is routed next."""
        ...

    def route(self, x: Tensor, router: LLaDA2MoeGate, ids: Tensor, weights: Tensor) -> None:
        """Route ``x``, put last by :meth:`norm_for_experts`; ids and weights [T, k] on the host."""
        ...

    def gate_values(self, fused: Tensor) -> Tensor:
        """Return silu(gate) · up, [T, i], of fused gate and up activations [T, 2i]."""
        ...

    def merge(
        self, routed: Tensor, shared: Tensor, from_cpu: Tensor | None, hidden: Tensor
    ) -> None:
        """Add to ``hidden``: ``routed`` [T·k, h] in order of k, then ``shared``, the CPU's sums."""
        ...


class PlainSteps:
    """With torch's operations, on any device; see :class:`Steps`."""

    def __init__(self, config: LLaDA2Config) -> None:
        self._eps = config.rms_norm_eps

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See :class:`Steps`."""
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def norm_for_experts(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See :class:`Steps`."""
        out.copy_(self.norm(x, weight))

    def route(self, x: Tensor, router: LLaDA2MoeGate, ids: Tensor, weights: Tensor) -> None:
        """See :class:`Steps`."""
        chosen, gates, _ = router(x)
        ids.copy_(chosen, non_blocking=True)
        weights.copy_(gates, non_blocking=True)

    def gate_values(self, fused: Tensor) -> Tensor:
        """See :class:`Steps`."""
        gate, up = fused.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def merge(
        self, routed: Tensor, shared: Tensor, from_cpu: Tensor | None, hidden: Tensor
    ) -> None:
        """See :class:`Steps`."""
        total = routed.view(len(hidden), -1, hidden.shape[1]).sum(1, dtype=torch.float32)
        total.add_(shared)
        if from_cpu is not None:
            total.add_(from_cpu)
        hidden.copy_(total.add_(hidden))


class FusedSteps(PlainSteps):
    """With one Triton kernel each; see :class:`Steps`. The kernels write to the host themselves.

    Args:
        config: of a model whose numbers of experts and of groups are powers of two; routing is
            plain otherwise.
        most_tokens: of a pass.
        device: CUDA, or the CPU under Triton's interpreter.
    """

    def __init__(self, config: LLaDA2Config, most_tokens: int, device: torch.device) -> None:
        from oled_sim.hardware import layer_kernels  # needs Triton

        super().__init__(config)
        self._kernels: Any = layer_kernels
        self._config = config
        self._fits = all(n & (n - 1) == 0 for n in (config.num_experts, config.n_group))
        self._copy = torch.zeros(most_tokens, config.hidden_size, device=device)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See :class:`Steps`."""
        out = torch.empty_like(x)
        self._norm(x, weight, out, copies=False)
        return out

    def norm_for_experts(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See :class:`Steps`; keeps an fp32 copy for the router."""
        self._norm(x, weight, out, copies=True)

    def route(self, x: Tensor, router: LLaDA2MoeGate, ids: Tensor, weights: Tensor) -> None:
        """See :class:`Steps`."""
        if not self._fits:
            super().route(x, router, ids, weights)
            return
        c = self._config
        logits = F.linear(self._copy[: len(x)], router.weight)
        self._kernels.route[(len(x),)](
            logits, router.expert_bias, ids, weights, c.routed_scaling_factor, c.num_experts,
            c.n_group, c.topk_group, c.num_experts_per_tok, power_of_two(c.num_experts_per_tok),
        )  # fmt: skip

    def gate_values(self, fused: Tensor) -> Tensor:
        """See :class:`Steps`."""
        tokens, inner = len(fused), fused.shape[1] // 2
        out = fused.new_empty(tokens, inner)
        self._kernels.gate_values[(tokens, -(-inner // BLOCK))](fused, out, inner, BLOCK)
        return out

    def merge(
        self, routed: Tensor, shared: Tensor, from_cpu: Tensor | None, hidden: Tensor
    ) -> None:
        """See :class:`Steps`."""
        tokens, h = hidden.shape
        some = hidden if from_cpu is None else from_cpu
        self._kernels.merge[(tokens, -(-h // BLOCK))](
            routed, shared, some, hidden, len(routed) // tokens, h, BLOCK, from_cpu is not None
        )

    def _norm(self, x: Tensor, weight: Tensor, out: Tensor, *, copies: bool) -> None:
        h = x.shape[1]
        self._kernels.rms_norm[(len(x),)](
            x, weight, out, self._copy, self._eps, h, power_of_two(h), copies
        )


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
