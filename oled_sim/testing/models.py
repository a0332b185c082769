"""A LLaDA2 small enough for tests (needs the ``torch`` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from oled_sim.model.checkpoint import save_checkpoint
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.llada2 import LLaDA2MoeModelLM

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


SPECIALS = ("<|endoftext|>", "<|mask|>")


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token a byte, plus the special ones: 258 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_model(seed: int = 1, **changes: Any) -> LLaDA2MoeModelLM:
    """Return a random model for :func:`byte_tokenizer`, wide enough that routing varies."""
    ids = {"mask_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    size = {"vocab_size": 258, "max_position_embeddings": 256, "initializer_range": 0.2}
    model = LLaDA2MoeModelLM(tiny_config(**ids, **size, **changes), seed=seed)
    return model.eval().requires_grad_(False)


def save_tiny_checkpoint(folder: Path, model: LLaDA2MoeModelLM) -> Path:
    """Write a checkpoint with the byte tokenizer; return the folder."""
    save_checkpoint(model, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
