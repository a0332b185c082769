"""A model's configuration and its cost geometry, each from the other."""

from __future__ import annotations

from oled_sim.geometry import CostGeometry
from oled_sim.geometry_file import cost_geometry
from oled_sim.model.config import LLaDA2Config

__all__ = ["cost_geometry", "expert_elements", "published_config"]

GROUPS, GROUPS_KEPT = 8, 4
CONTEXT = 32768
"""Constants that LLaDA2.0 and 2.1, mini and flash, share (reference: published config.json)."""


def published_config(cost: CostGeometry) -> LLaDA2Config:
    """Return the configuration of a LLaDA2 of these sizes, constants as published.

    Fewer than 16 experts, or a number that 8 does not divide, form one group without a limit.

    Raises:
        CheckpointError: sizes no model can have.
    """
    grouped = cost.experts % GROUPS == 0 and cost.experts >= 2 * GROUPS
    last = cost.vocabulary - 1
    return LLaDA2Config(
        hidden_size=cost.hidden_size,
        num_hidden_layers=cost.layers,
        first_k_dense_replace=cost.dense_layers,
        intermediate_size=cost.dense_intermediate_size,
        moe_intermediate_size=cost.moe_intermediate_size,
        num_experts=cost.experts,
        num_experts_per_tok=cost.top_k,
        num_shared_experts=cost.shared_experts,
        n_group=GROUPS if grouped else 1,
        topk_group=GROUPS_KEPT if grouped else 1,
        routed_scaling_factor=2.5,
        num_attention_heads=cost.heads,
        num_key_value_heads=cost.kv_heads,
        head_dim=cost.head_dim,
        partial_rotary_factor=0.5,
        rope_theta=600_000.0,
        rms_norm_eps=1e-6,
        vocab_size=cost.vocabulary,
        tie_word_embeddings=False,
        max_position_embeddings=CONTEXT,
        mask_token_id=min(156895, last),
        eos_token_id=min(156892, last),
        pad_token_id=min(156892, last),
    )


def expert_elements(cost: CostGeometry) -> int:
    """Return the number of weights of one routed expert."""
    return 3 * cost.hidden_size * cost.moe_intermediate_size
