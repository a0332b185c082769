"""Load balancing without an auxiliary loss.

After every step the selection bias of an expert moves by a fixed step against the sign of its
excess load (Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts",
2024; used by DeepSeek-V3). The published LLaDA2 trainer has no such rule; a model trained from
scratch needs one.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def update_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move ``bias`` [E] by ``rate`` towards experts below the mean ``load`` [E], in place."""
    bias.add_(torch.sign(load.mean() - load), alpha=rate)


def imbalance(load: Tensor) -> Tensor:
    """Return the largest load over the mean load along the last dimension: 1 is perfect."""
    return load.amax(-1) / load.mean(-1).clamp_min(1e-9)
