"""Ways to run the routed experts of one layer: same result, different speed.

All sum a token's experts in slot order (best gate score first) in fp32, so a result does not
depend on the order in which experts ran.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class ExpertWeights(Protocol):
    """Stacked weights of E routed experts of hidden width H and inner width I."""

    @property
    def gate_proj(self) -> Tensor:
        """[E, I, H]."""
        ...

    @property
    def up_proj(self) -> Tensor:
        """[E, I, H]."""
        ...

    @property
    def down_proj(self) -> Tensor:
        """[E, H, I]."""
        ...


class ExpertExecutor(Protocol):
    """Runs the routed experts of a layer on the tokens that chose them."""

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x: [N, H] inputs.
            topk_idx: int64 [N, k] distinct expert ids per token.
            topk_weight: fp32 [N, k] their weights, scaling included.
            experts: the layer's weights.

        Returns:
            [N, H] in the dtype of ``x``.
        """
        ...


def combine(outputs: Tensor, topk_weight: Tensor) -> Tensor:
    """Sum expert outputs [N, k, H] with fp32 weights [N, k] in slot order; dtype of outputs."""
    return (outputs.float() * topk_weight.unsqueeze(-1)).sum(1).to(outputs.dtype)


class LoopExperts:
    """One expert after the other, ascending by id; any device and dtype."""

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """See :class:`ExpertExecutor`."""
        order, counts = sort_by_expert(topk_idx, experts.gate_proj.shape[0])
        rows = x[order // topk_idx.shape[1]]
        parts, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                parts.append(_expert(rows[start : start + count], experts, expert))
                start += count
        return combine(_to_slots(torch.cat(parts), order, topk_idx.shape), topk_weight)


def sort_by_expert(topk_idx: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Order the N·k assignments by expert, stably.

    Returns:
        order: int64 [N·k], flat assignment numbers (token·k + slot) grouped by expert.
        counts: int64 [experts], assignments of each expert.
    """
    ids, order = topk_idx.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def _expert(rows: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    gate = functional.linear(rows, experts.gate_proj[expert])
    up = functional.linear(rows, experts.up_proj[expert])
    return functional.linear(functional.silu(gate) * up, experts.down_proj[expert])


def _to_slots(sorted_rows: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
    """Undo the sort: [N·k, H] grouped by expert to [N, k, H] by token and slot."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return sorted_rows[inverse].view(*shape, -1)
