"""Evidence lower bound on held-out text."""

from __future__ import annotations

import torch
from torch import Tensor

from oled_sim.model.training.data import Batch
from oled_sim.model.training.layout import Layout, lay_out
from oled_sim.model.training.objective import Runner


@torch.no_grad()
def elbo_nats_per_token(
    runner: Runner, batch: Batch, *, block_length: int, strata: int, seed: int
) -> float:
    """Return an upper bound on the negative log-likelihood per real token, in nats.

    The bound of masked diffusion with the linear schedule: the cross-entropy at masked positions
    weighted by 1/t, in expectation over t uniform on (0, 1] (LLaDA2 report, objective). t is
    stratified: every block sees each of ``strata`` equal ranges once. The padding after a
    document is predicted too, and its nats are counted, but not its tokens.
    """
    length = torch.full((len(batch.tokens),), block_length, device=batch.tokens.device)
    layout = lay_out(batch.starts, length)
    generator = torch.Generator(batch.tokens.device).manual_seed(seed)
    total = batch.tokens.new_zeros((), dtype=torch.float64)
    for stratum in range(strata):
        total += _weighted_nats(runner, batch, layout, stratum, strata, generator)
    return float(total / strata / batch.real.sum())


def _weighted_nats(
    runner: Runner,
    batch: Batch,
    layout: Layout,
    stratum: int,
    strata: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the sum over masked positions of cross-entropy / t, t from one stratum."""

    def uniform() -> Tensor:
        return torch.rand(batch.tokens.shape, generator=generator, device=batch.tokens.device)

    level = (stratum + 1.0 - uniform().gather(1, layout.block)) / strata  # in (0, 1]
    masked = (uniform() < level) & batch.used
    noisy = batch.tokens.masked_fill(masked, runner.model.config.mask_token_id)
    hidden = runner.hidden(noisy.unsqueeze(1), batch.tokens, layout).flatten(0, 2)
    losses = runner.token_loss(hidden, runner.model.lm_head.weight, batch.tokens.flatten())
    return (losses.double() * masked.flatten() / level.flatten()).sum()
