"""A LLaDA2 small enough for tests (needs the ``torch`` extra)."""

from __future__ import annotations

from typing import Any

import msgspec

from oled_sim.model.config import LLaDA2Config

_TINY = LLaDA2Config(
    hidden_size=64,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=96,
    moe_intermediate_size=24,
    num_experts=16,
    num_experts_per_tok=4,
    num_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    partial_rotary_factor=0.5,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    vocab_size=128,
    tie_word_embeddings=False,
    max_position_embeddings=512,
    mask_token_id=127,
    eos_token_id=126,
    pad_token_id=126,
)


def tiny_config(**changes: Any) -> LLaDA2Config:
    """Return a configuration with every trait of the published ones, small."""
    return msgspec.structs.replace(_TINY, **changes)
