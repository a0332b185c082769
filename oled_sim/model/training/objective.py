"""The forward pass of training: noisy copies and clean windows in one sequence, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from oled_sim.model.layers import AttentionBackend
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.training.attention import (
    DenseAttention,
    DocumentAttention,
    SparseAttention,
    Visibility,
)
from oled_sim.model.training.balance import update_bias
from oled_sim.model.training.experts import CountingExperts, GroupedExperts
from oled_sim.model.training.layout import Layout
from oled_sim.model.training.router import FusibleGate

TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats of each row: fp32 [R].

    Args:
        hidden: [R, H]. head: [V, H]. targets: int64 [R].
    """
    logits = functional.linear(hidden, head).float()
    return functional.cross_entropy(logits, targets, reduction="none")


@dataclass(frozen=True, slots=True)
class Runner:
    """A model made ready for training on its device.

    Attributes:
        loads: fp32 [MoE layers, E], assignments per expert since the last :meth:`balance`.
        attention: backend for a given visibility.
        token_loss: :func:`token_loss`, compiled where the model is.
    """

    model: LLaDA2MoeModelLM
    loads: Tensor
    attention: Callable[[Visibility], AttentionBackend]
    token_loss: TokenLoss

    def hidden(self, noisy: Tensor, clean: Tensor, layout: Layout) -> Tensor:
        """Return the hidden states of the noisy copies, [B, C, S, H].

        Args:
            noisy: int64 [B, C, S]. clean: int64 [B, S].
        """
        _, copies, window = noisy.shape
        tokens = torch.cat((noisy.flatten(1), clean), dim=1)
        positions = layout.position.repeat(1, copies + 1)
        backend = self.attention(Visibility.of(layout, copies))
        hidden = self.model.model(tokens, positions, backend)
        return hidden[:, : copies * window].unflatten(1, (copies, window))

    def loss(self, noisy: Tensor, counted: Tensor, clean: Tensor, layout: Layout) -> Tensor:
        """Return the mean cross-entropy over the counted positions, bool [B, C, S]."""
        hidden = self.hidden(noisy, clean, layout)
        targets = clean.unsqueeze(1).expand(noisy.shape)
        losses = self.token_loss(hidden.flatten(0, 2), self.model.lm_head.weight, targets.flatten())
        weight = counted.flatten().float()
        return (losses * weight).sum() / weight.sum().clamp_min(1.0)

    def balance(self, rate: float) -> None:
        """Update every router's bias from the loads, and start counting anew."""
        for load, block in zip(self.loads, self.model.sparse_blocks().values(), strict=True):
            update_bias(block.gate.expert_bias, load, rate)
        self.loads.zero_()


def training_runner(model: LLaDA2MoeModelLM) -> Runner:
    """Prepare ``model`` for training, in place.

    In bf16 on CUDA that is grouped experts, FlexAttention and compiled layers; elsewhere the
    same computation in plain operations.
    """
    runner = evaluation_runner(model)
    if not _is_fast(model):
        return runner
    for block in model.sparse_blocks().values():
        FusibleGate.replace(block)
    _compile_layers(model)
    return Runner(model, runner.loads, SparseAttention, torch.compile(token_loss))


def evaluation_runner(model: LLaDA2MoeModelLM) -> Runner:
    """Prepare a freshly loaded ``model`` for evaluation, where shapes vary: nothing compiled."""
    blocks = model.sparse_blocks()
    loads = torch.zeros(len(blocks), model.config.num_experts, device=model.device)
    executor = GroupedExperts if _is_fast(model) else CountingExperts
    for load, block in zip(loads, blocks.values(), strict=True):
        block.executor = executor(load)
    attention = DocumentAttention if model.device.type == "cpu" else DenseAttention
    return Runner(model, loads, attention, token_loss)


def _is_fast(model: LLaDA2MoeModelLM) -> bool:
    """Whether grouped experts run here: a CUDA device and bf16 weights."""
    return model.device.type == "cuda" and model.dtype == torch.bfloat16


def _compile_layers(model: LLaDA2MoeModelLM) -> None:
    """Compile each layer; equal layers share one compilation.

    A layer's own index would make every layer a new function. Training backends ignore it.
    """
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    torch._dynamo.config.cache_size_limit = 64
    for layer in model.model.layers:
        layer.compile()
