"""The sparse layer of LLaDA2: group-limited sigmoid router, routed experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from oled_sim.model.config import LLaDA2Config
from oled_sim.model.experts import DefaultExperts, ExpertExecutor
from oled_sim.model.layers import LLaDA2MoeMLP


class LLaDA2MoeGate(nn.Module):
    """Router: sigmoid scores in fp32, a bias for selection only, and a limit on groups.

    Attributes:
        weight: parameter [E, H].
        expert_bias: fp32 buffer [E], kept in fp32 whatever the model is cast to: published
            2.1 checkpoints store it in 4 bytes, and rounding it moves the selection.
    """

    expert_bias: Tensor

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.groups = config.n_group
        self.kept_groups = config.topk_group
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts for each token.

        Args:
            x: [N, H].

        Returns:
            topk_idx: int64 [N, k], descending by biased score.
            topk_weight: fp32 [N, k], unbiased scores renormalised over the k, times the
                routed scaling factor.
            logits: fp32 [N, E], before the sigmoid.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = functional.linear(x.float(), self.weight.float())
        scores = logits.sigmoid()
        biased = self._limit_groups(scores.detach() + self.expert_bias)
        topk_idx = biased.topk(self.top_k, dim=-1).indices
        return topk_idx, self._weights(topk_idx, scores), logits

    def weights_of(self, topk_idx: Tensor, logits: Tensor) -> Tensor:
        """Return the weights fp32 [N, k] of experts chosen by someone else, by these logits."""
        return self._weights(topk_idx, logits.sigmoid())

    def _weights(self, topk_idx: Tensor, scores: Tensor) -> Tensor:
        topk_weight = scores.gather(1, topk_idx)
        if self.top_k > 1:
            topk_weight = topk_weight / (topk_weight.sum(-1, keepdim=True) + 1e-20)
        return topk_weight * self.scaling

    def margins(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return by how much each token's choice was decided.

        Args:
            logits: fp32 [N, E].

        Returns:
            fp32 [N], k-th less (k + 1)-th biased score among the experts of the kept groups; fp32
            [N], strength of the last group kept less that of the first one dropped; bool [N, G],
            groups kept. Infinite where nothing is left to lose against.
        """
        biased = logits.sigmoid() + self.expert_bias
        strength = self._strength(biased)
        limited = self._limit_groups(biased)
        kept = limited.view(len(biased), self.groups, -1).isfinite().any(-1)
        return _gap(limited, self.top_k), _gap(strength, self.kept_groups), kept

    def _strength(self, biased: Tensor) -> Tensor:
        """Return the sum of each group's two best scores, [N, G]."""
        return biased.view(len(biased), self.groups, -1).topk(2, dim=-1).values.sum(-1)

    def _limit_groups(self, biased: Tensor) -> Tensor:
        """Set to -inf every expert outside the best groups (by the sum of a group's two best)."""
        grouped = biased.view(len(biased), self.groups, -1)
        strength = self._strength(biased)
        kept = strength.topk(self.kept_groups, dim=-1).indices
        dropped = torch.ones_like(strength, dtype=torch.bool).scatter(1, kept, False)
        return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).view_as(biased)


def _gap(values: Tensor, kept: int) -> Tensor:
    """Return the ``kept``-th largest less the next one of each row, infinite if there is none."""
    if values.shape[1] == kept:
        return values.new_full((len(values),), torch.inf)
    best = values.topk(kept + 1, dim=-1).values
    return best[:, -2] - best[:, -1]


class LLaDA2MoeExperts(nn.Module):
    """Weights of the routed experts of one layer, stacked by expert.

    Attributes:
        gate_proj, up_proj: parameters [E, I, H].
        down_proj: parameter [E, H, I].
    """

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        count, inner, width = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(count, inner, width))
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))


class LLaDA2MoeSparseMoeBlock(nn.Module):
    """Routed experts plus a shared expert that sees every token.

    Attributes:
        executor: how routed experts run; assign another :class:`ExpertExecutor` to swap it.
    """

    executor: ExpertExecutor

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.gate = LLaDA2MoeGate(config)
        self.experts = LLaDA2MoeExperts(config)
        inner = config.moe_intermediate_size * config.num_shared_experts
        self.shared_experts = LLaDA2MoeMLP(config.hidden_size, inner)
        self.executor = DefaultExperts()

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``hidden`` [..., H] to the same shape; leading dimensions flatten to N rows."""
        x = hidden.reshape(-1, hidden.shape[-1])
        topk_idx, topk_weight, _ = self.gate(x)
        # Launched first: an executor may have to wait on the host.
        shared = self.shared_experts(x)
        routed = self.executor(x, topk_idx, topk_weight, self.experts)
        return (routed + shared).view_as(hidden)


def set_executor(model: nn.Module, executor: Any) -> None:
    """Assign ``executor`` (an :class:`ExpertExecutor`) to every sparse layer of ``model``."""
    for module in model.modules():
        if isinstance(module, LLaDA2MoeSparseMoeBlock):
            module.executor = executor
