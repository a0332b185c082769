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


class GroupedExperts:
    """All experts of a layer in a few launches, without a host round trip per expert.

    bf16 weights whose rows are 16-byte multiples run in torch's grouped matrix product, which
    never waits for the host. Anything else runs as batched products over experts of similar
    token counts, padded to at most twice their rows; that reads the counts once per layer.
    """

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """See :class:`ExpertExecutor`."""
        order, counts = sort_by_expert(topk_idx, experts.gate_proj.shape[0])
        rows = x[order // topk_idx.shape[1]]
        run = _grouped if _fits_grouped_mm(experts) else _bucketed
        return combine(_to_slots(run(rows, counts, experts), order, topk_idx.shape), topk_weight)


class DefaultExperts:
    """:class:`GroupedExperts` on CUDA, :class:`LoopExperts` elsewhere."""

    def __init__(self) -> None:
        self._grouped = GroupedExperts()
        self._loop = LoopExperts()

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weight: Tensor, experts: ExpertWeights
    ) -> Tensor:
        """See :class:`ExpertExecutor`."""
        run = self._grouped if x.is_cuda else self._loop
        return run(x, topk_idx, topk_weight, experts)


def sort_by_expert(topk_idx: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Order the N·k assignments by expert, stably.

    Returns:
        order: int64 [N·k], flat assignment numbers (token·k + slot) grouped by expert.
        counts: int64 [experts], assignments of each expert.
    """
    ids, order = topk_idx.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _expert(rows: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    gate = functional.linear(rows, experts.gate_proj[expert])
    up = functional.linear(rows, experts.up_proj[expert])
    return functional.linear(_swiglu(gate, up), experts.down_proj[expert])


def _fits_grouped_mm(experts: ExpertWeights) -> bool:
    """Tell whether torch's grouped product takes these weights: bf16, rows of 16-byte multiples."""
    weights = experts.gate_proj
    aligned = all(size * weights.element_size() % 16 == 0 for size in weights.shape[1:])
    return weights.dtype == torch.bfloat16 and aligned


def _grouped(rows: Tensor, counts: Tensor, experts: ExpertWeights) -> Tensor:
    """Run sorted ``rows`` [N·k, H] through torch's grouped product."""
    ends = counts.cumsum(0).to(torch.int32)

    def product(x: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.aten._grouped_mm(x, weights.transpose(1, 2), ends)

    gate, up = product(rows, experts.gate_proj), product(rows, experts.up_proj)
    return product(_swiglu(gate, up), experts.down_proj)


def _bucketed(rows: Tensor, counts: Tensor, experts: ExpertWeights) -> Tensor:
    """Run sorted ``rows`` [N·k, H] as padded batched products, one per power of two of rows."""
    on_host = counts.tolist()
    starts = counts.cumsum(0) - counts
    out = torch.zeros_like(rows)
    for size, members in _buckets(on_host).items():
        ids = torch.tensor(members, device=rows.device)
        inside = torch.arange(size, device=rows.device)
        # Padding re-reads the expert's first row; its result is dropped below.
        real = inside < counts[ids].unsqueeze(1)
        index = starts[ids].unsqueeze(1) + inside * real
        result = _batched(rows[index], experts, ids)
        out = out.index_put((index[real],), result[real])
    return out


def _buckets(counts: list[int]) -> dict[int, list[int]]:
    """Group experts that have work by their count rounded up to a power of two."""
    buckets: dict[int, list[int]] = {}
    for expert, count in enumerate(counts):
        if count:
            buckets.setdefault(1 << (count - 1).bit_length(), []).append(expert)
    return buckets


def _batched(x: Tensor, experts: ExpertWeights, ids: Tensor) -> Tensor:
    """Run ``x`` [A, n, H] through the A experts ``ids``."""
    gate = x @ experts.gate_proj[ids].transpose(1, 2)
    up = x @ experts.up_proj[ids].transpose(1, 2)
    return _swiglu(gate, up) @ experts.down_proj[ids].transpose(1, 2)


def _to_slots(sorted_rows: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
    """Undo the sort: [N·k, H] grouped by expert to [N, k, H] by token and slot."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return sorted_rows[inverse].view(*shape, -1)
