"""Routed experts in training: grouped products with cheap gradients, and load counts.

The N·k assignments are sorted by expert, so that an expert's rows lie together. Moving rows to
that order and back are adjoint: each is the other's gradient, and both are gathers. The generic
gradient of a gather is a scattered sum (``index_add``), several times slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from oled_sim.model.experts import ExpertWeights, LoopExperts, sort_by_expert


class _Spread(torch.autograd.Function):
    """Rows [N, H] to their k assignments, sorted by expert: [N·k, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, inverse = ctx.saved_tensors
        return _gather_sum(gradients[0], inverse, ctx.k), None, None, None


class _Collect(torch.autograd.Function):
    """Sum of each row's k assignments, sorted by expert: [N·k, H] to [N, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _gather_sum(rows, inverse, k)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (order,) = ctx.saved_tensors
        return gradients[0][order // ctx.k], None, None, None


class _Permute(torch.autograd.Function):
    """Values [M] in another order; ``inverse`` undoes ``order``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None


def _gather_sum(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    slots = rows[inverse].view(-1, k, rows.shape[-1])
    return slots.sum(1, dtype=torch.float32).to(rows.dtype)


def invert(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class GroupedExperts:
    """All experts of a layer in two grouped products; differentiable; bf16.

    The gate weight scales an expert's inner activations instead of its output, which is the
    same by linearity and touches I instead of H values per assignment.

    Attributes:
        load: fp32 [E], assignments per expert since it was last zeroed.
    """

    def __init__(self, load: Tensor) -> None:
        self.load = load

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """See :class:`oled_sim.model.experts.ExpertExecutor`."""
        k = topk_idx.shape[1]
        order, counts = sort_by_expert(topk_idx.to(torch.int16), len(self.load))
        self.load.add_(counts)
        ends = counts.cumsum(0, dtype=torch.int32)
        inverse = invert(order)
        rows = _Spread.apply(x, order, inverse, k)
        weight = _Permute.apply(topk_weight.flatten(), order, inverse)
        inner = _grouped(rows, torch.cat((experts.gate_proj, experts.up_proj), 1), ends)
        gate, up = inner.chunk(2, dim=-1)
        scaled = (functional.silu(gate) * up * weight.unsqueeze(1)).to(x.dtype)  # pyright: ignore
        return _Collect.apply(_grouped(scaled, experts.down_proj, ends), order, inverse, k)  # pyright: ignore


class CountingExperts:
    """One expert after the other, as in generation, with load counts: any device and dtype.

    Attributes:
        load: fp32 [E], assignments per expert since it was last zeroed.
    """

    def __init__(self, load: Tensor) -> None:
        self.load = load
        self._run = LoopExperts()

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """See :class:`oled_sim.model.experts.ExpertExecutor`."""
        self.load.add_(torch.bincount(topk_idx.flatten(), minlength=len(self.load)))
        return self._run(x, topk_idx, topk_weight, experts)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows [.., in] with its own matrix of ``weights`` [E, out, in]."""
    return torch.ops.aten._grouped_mm(rows, weights.transpose(1, 2), ends)
