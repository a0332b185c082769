"""The router in training: the same choice as the model's, without ``topk`` over tiny rows.

``torch.topk`` spends a thread block per row; group scores alone are rows of 16 by the hundred
thousand. Reductions fuse into one kernel once compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from oled_sim.model.moe import LLaDA2MoeGate, LLaDA2MoeSparseMoeBlock


class FusibleGate(LLaDA2MoeGate):
    """:class:`LLaDA2MoeGate` as reductions; shares the weights of the gate that it replaces.

    Among equal scores the lower expert (and group) wins; ``topk`` leaves ties open.
    """

    @classmethod
    def replace(cls, block: LLaDA2MoeSparseMoeBlock) -> None:
        """Swap the gate of ``block``; parameter and buffer names stay."""
        gate = cls.__new__(cls)
        gate.__dict__ = block.gate.__dict__
        block.gate = gate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`LLaDA2MoeGate.forward`."""
        logits = functional.linear(x.float(), self.weight.float())
        scores = logits.sigmoid()
        biased = scores.detach() + self.expert_bias
        dropped = self._dropped_groups(biased.unflatten(1, (self.groups, -1)))
        left = biased.masked_fill(dropped.repeat_interleave(self._group_size(), 1), -torch.inf)
        topk_idx = _best(left, self.top_k)
        weight = scores.gather(1, topk_idx)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return topk_idx, weight * self.scaling, logits

    def _group_size(self) -> int:
        return self.weight.shape[0] // self.groups

    def _dropped_groups(self, grouped: Tensor) -> Tensor:
        """Return bool [N, groups]: groups that fall behind by the sum of their two best."""
        members = torch.arange(grouped.shape[-1], device=grouped.device)
        best, where = grouped.max(-1)
        others = grouped.masked_fill(members == where.unsqueeze(-1), -torch.inf)
        strength = best + others.amax(-1)
        mine, theirs = strength.unsqueeze(2), strength.unsqueeze(1)
        number = torch.arange(self.groups, device=grouped.device)
        earlier = number.unsqueeze(0) < number.unsqueeze(1)
        ahead = (theirs > mine) | ((theirs == mine) & earlier)
        return ahead.sum(-1) >= self.kept_groups


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the ``count`` best columns of each row, best first: int64 [N, count]."""
    column = torch.arange(scores.shape[1], device=scores.device)
    chosen = []
    for _ in range(count):
        chosen.append(scores.argmax(-1))
        scores = scores.masked_fill(column == chosen[-1].unsqueeze(-1), -torch.inf)
    return torch.stack(chosen, -1)
