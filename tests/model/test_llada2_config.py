import json

import msgspec
import pytest

from oled_sim.errors import CheckpointError
from oled_sim.model.config import FIXED, LLaDA2Config

MINI = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "first_k_dense_replace": 1,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 64,
    "rope_theta": 600000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "vocab_size": 157184,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "use_cache": False,
    "pad_token_id": 156892,
}


def test_published_fields_are_read():
    config = LLaDA2Config.from_dict(MINI)
    assert config.moe_layers == tuple(range(1, 20))
    assert config.routing_geometry.experts == 256
    assert config.routing_geometry.top_k == 8
    assert config.rotary_dim == 64
    ids = (config.mask_token_id, config.eos_token_id, config.pad_token_id)
    assert ids == (156895, 156892, 156892)


REQUIRED = [f.name for f in msgspec.structs.fields(LLaDA2Config) if f.required]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_never_defaulted(field):
    raw = {name: value for name, value in MINI.items() if name != field}
    with pytest.raises(CheckpointError, match=f"lacks the field `{field}`"):
        LLaDA2Config.from_dict(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"num_experts": "256"}, "num_experts"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"first_k_dense_replace": 20}, "leaves no expert layer"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"n_group": 7}, "n_group 7 equal groups"),
        ({"topk_group": 9}, "topk_group 9 exceeds"),
        ({"num_experts_per_tok": 129}, "exceeds the 128 experts"),
        ({"rotary_dim": 128}, "rotary_dim 128 contradicts"),
        ({"vocab_size": 4096}, "mask_token_id 156895 lies outside the vocabulary of 4096"),
        ({"expert_capacity": 48}, "expert_capacity 48 is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"use_qkv_bias": True}, "use_qkv_bias True is not supported"),
    ],
)
def test_what_cannot_be_run_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        LLaDA2Config.from_dict(MINI | change)


def test_saved_file_reads_back(tmp_path, config):
    config.save(tmp_path)
    assert LLaDA2Config.from_file(tmp_path) == config
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "llada2_moe"
    assert all(raw[name] == value for name, value in FIXED.items() if name != "expert_capacity")
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"[]", "JSON object"), (None, "cannot read")],
)
def test_unreadable_file_is_named(tmp_path, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        LLaDA2Config.from_file(file)
    assert str(file) in str(caught.value)
