"""LLaDA2, a mixture-of-experts diffusion language model, as published but without remote code.

Class and attribute names follow ``modeling_llada2_moe.py`` of the published checkpoints, so
hooks that find modules by name work. Logits are for the same position (no shift): the logits
at a masked position predict that position's token.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from oled_sim.model.config import LLaDA2Config
from oled_sim.model.layers import (
    AttentionBackend,
    LLaDA2MoeAttention,
    LLaDA2MoeMLP,
    LLaDA2MoeRMSNorm,
    LLaDA2MoeRotaryEmbedding,
)
from oled_sim.model.moe import LLaDA2MoeSparseMoeBlock


class LLaDA2MoeDecoderLayer(nn.Module):
    """Pre-norm attention, then a pre-norm dense MLP or sparse block, each with a residual."""

    def __init__(self, config: LLaDA2Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = LLaDA2MoeAttention(config, layer)
        self.post_attention_layernorm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            LLaDA2MoeSparseMoeBlock(config)
            if layer in config.moe_layers
            else LLaDA2MoeMLP(config.hidden_size, config.intermediate_size)
        )

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: AttentionBackend
    ) -> Tensor:
        """Map ``hidden`` [B, S, H] to the same shape."""
        hidden = hidden + self.attention(self.input_layernorm(hidden), rotary, attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LLaDA2MoeModel(nn.Module):
    """Embedding, layers and final norm: token ids to hidden states."""

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.config = config
        # Left to itself it would draw weights, which on the meta device imports all of dynamo.
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.word_embeddings = nn.Embedding.from_pretrained(weight, freeze=False)
        self.layers = nn.ModuleList(
            LLaDA2MoeDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LLaDA2MoeRotaryEmbedding(config)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Return final hidden states.

        Args:
            token_ids: int [B, S], or [S] for one flat sequence (backends then see B = 1).
            positions: int, same shape: absolute positions, for rotary embedding only.
            attention: decides which keys each query sees.

        Returns:
            [B, S, H], or [S, H], in the model's dtype, after the final norm.
        """
        if token_ids.dim() == 1:
            return self(token_ids.unsqueeze(0), positions.unsqueeze(0), attention).squeeze(0)
        hidden = self.word_embeddings(token_ids)
        rotary = self.rotary_emb(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotary, attention)
        return self.norm(hidden)


class LLaDA2MoeModelLM(nn.Module):
    """The language model: :class:`LLaDA2MoeModel` and a linear head over the vocabulary.

    A new model is initialised as published (normal weights, unit norms, zero expert bias) from
    ``seed``, unless it is built on the ``meta`` device.
    """

    def __init__(self, config: LLaDA2Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = LLaDA2MoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self.init_weights(seed)

    def tie_weights(self) -> None:
        """Share the embedding with the head, if the configuration ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.word_embeddings.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw every weight from N(0, initializer_range²); norms become 1, expert biases 0."""
        generator = torch.Generator(self.device if self.device.type != "meta" else "cpu")
        generator.manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif parameter.device.type != "meta":
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)
        for name, buffer in self.named_buffers():
            if name.endswith("expert_bias"):
                buffer.zero_()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights (routing is fp32 in any case)."""
        return self.lm_head.weight.dtype

    def sparse_blocks(self) -> dict[int, LLaDA2MoeSparseMoeBlock]:
        """Return layer index to sparse block, ascending."""
        layers = self.model.layers
        return {i: cast(LLaDA2MoeSparseMoeBlock, layers[i].mlp) for i in self.config.moe_layers}

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return logits.

        Args:
            token_ids, positions, attention: see :meth:`LLaDA2MoeModel.forward` (call
                ``self.model`` for hidden states without the head).
            rows: optional int64 [R], rows of the flattened B·S tokens to compute logits for.

        Returns:
            fp32 [B, S, V] (or [S, V]), or [R, V] when ``rows`` is given.
        """
        hidden = self.model(token_ids, positions, attention)
        if rows is not None:
            hidden = hidden.reshape(-1, hidden.shape[-1])[rows]
        return self.lm_head(hidden).float()
