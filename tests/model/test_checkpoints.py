import json

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from oled_sim.errors import CapacityError, CheckpointError, UsageError
from oled_sim.geometry import GEOMETRIES
from oled_sim.model import checkpoint_reader
from oled_sim.model.checkpoint import load_checkpoint, published_tensors, save_checkpoint
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.llada2 import LLaDA2MoeModelLM


@pytest.fixture
def folder(tmp_path, model):
    """A checkpoint of the tiny model in fp32, one file."""
    save_checkpoint(model, tmp_path / "tiny", dtype=torch.float32)
    return tmp_path / "tiny"


def rewrite(folder, change):
    """Apply ``change`` to the tensors of a one-file checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def merge_experts(tensors, config):
    for layer in config.moe_layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            stem = f"model.layers.{layer}.mlp.experts"
            parts = [tensors.pop(f"{stem}.{e}.{name}.weight") for e in range(config.num_experts)]
            tensors[f"{stem}.{name}"] = torch.stack(parts)


def assert_equal(ours, theirs):
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def published(geometry, vocab_size=157184):
    """The published configuration of a cost geometry (hidden sizes and so on agree)."""
    g = GEOMETRIES[geometry]
    return LLaDA2Config(
        hidden_size=g.hidden_size,
        num_hidden_layers=g.layers,
        first_k_dense_replace=g.dense_layers,
        intermediate_size=g.dense_intermediate_size,
        moe_intermediate_size=g.moe_intermediate_size,
        num_experts=g.experts,
        num_experts_per_tok=g.top_k,
        num_shared_experts=g.shared_experts,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        head_dim=g.head_dim,
        partial_rotary_factor=0.5,
        rope_theta=600_000,
        rms_norm_eps=1e-6,
        vocab_size=vocab_size,
        tie_word_embeddings=False,
        max_position_embeddings=32768,
    )


@pytest.mark.parametrize(
    ("geometry", "parameters", "bytes_2_0", "bytes_2_1"),
    [
        # Totals of the published safetensors indexes: 2.0 stores expert_bias in 2 bytes, 2.1 in 4.
        ("llada2.0-mini", 16_255_643_392, 32_511_286_784, 32_511_296_512),
        ("llada2.0-flash", 102_889_705_216, 205_779_410_432, 205_779_426_304),
    ],
)
def test_published_sizes_to_the_byte(geometry, parameters, bytes_2_0, bytes_2_1):
    with torch.device("meta"):
        model = LLaDA2MoeModelLM(published(geometry)).to(torch.bfloat16)
    tensors = dict(published_tensors(model))
    assert sum(t.numel() for t in tensors.values()) == parameters
    assert sum(2 * t.numel() for t in tensors.values()) == bytes_2_0
    assert sum(t.nbytes for t in tensors.values()) == bytes_2_1
    g = GEOMETRIES[geometry]
    experts = [t for name, t in tensors.items() if ".mlp.experts." in name]
    assert len(experts) == 3 * g.moe_layers * g.experts
    assert sum(t.nbytes for t in experts) == g.routed_bytes
    assert bytes_2_0 - g.routed_bytes == g.resident_bytes


@pytest.mark.parametrize("shard_bytes", [1 << 40, 50_000])
def test_round_trip(tmp_path, model, shard_bytes):
    files = save_checkpoint(model, tmp_path, dtype=torch.float32, shard_bytes=shard_bytes)
    assert (
        (len(files) > 1)
        == (shard_bytes == 50_000)
        == (tmp_path / "model.safetensors.index.json").exists()
    )
    loaded = load_checkpoint(tmp_path, dtype=torch.float32)
    assert_equal(loaded, model)
    assert loaded.config == model.config
    assert not loaded.training
    assert not list(tmp_path.glob(".*"))


def test_bfloat16_files_hold_published_names_and_full_precision_biases(tmp_path, config, model):
    save_checkpoint(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name for name, t in tensors.items() if t.dtype != torch.bfloat16} == {
        f"model.layers.{layer}.mlp.gate.expert_bias" for layer in config.moe_layers
    }
    d, h = config.head_dim, config.hidden_size
    assert tensors["model.layers.0.mlp.gate_proj.weight"].shape == (96, h)
    assert tensors["model.layers.1.attention.query_key_value.weight"].shape == (8 * d, h)
    assert tensors["model.layers.2.mlp.experts.15.down_proj.weight"].shape == (h, 24)
    loaded = load_checkpoint(tmp_path)
    bias = loaded.sparse_blocks()[1].gate.expert_bias
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(bias, model.sparse_blocks()[1].gate.expert_bias)


def test_index_names_every_tensor_and_the_total(tmp_path, model):
    files = save_checkpoint(model, tmp_path, shard_bytes=50_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = {name: (file.name, t) for file in files for name, t in load_file(file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in stored.values())
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in files]
    assert max(sizes) <= 50_000


def test_same_model_same_bytes(tmp_path, model):
    for name in ("a", "b"):
        save_checkpoint(model, tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_merged_layout(folder, model, config):
    rewrite(folder, lambda tensors: merge_experts(tensors, config))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "llada2_moe_veomni"}))
    assert_equal(load_checkpoint(folder, dtype=torch.float32), model)


def test_other_prefixes(folder, model):
    def rename(tensors):
        for name in list(tensors):
            other = name.replace("model.", "model.language_model.", 1)
            other = other.replace("lm_head.", "model.lm_head.")
            tensors[other] = tensors.pop(name)

    rewrite(folder, rename)
    assert_equal(load_checkpoint(folder, dtype=torch.float32), model)


def test_two_byte_expert_bias(folder, model):
    name = "model.layers.1.mlp.gate.expert_bias"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    bias = load_checkpoint(folder, dtype=torch.bfloat16).sparse_blocks()[1].gate.expert_bias
    original = model.sparse_blocks()[1].gate.expert_bias
    assert bias.dtype == torch.float32
    assert torch.equal(bias, original.bfloat16().float())


def test_tied_head(tmp_path, config):
    tied = LLaDA2MoeModelLM(msgspec.structs.replace(config, tie_word_embeddings=True))
    save_checkpoint(tied, tmp_path, dtype=torch.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_checkpoint(tmp_path, dtype=torch.float32)
    assert_equal(loaded, tied)
    assert loaded.lm_head.weight is loaded.model.word_embeddings.weight


def test_one_file_by_name(folder, model):
    file = folder / "model.safetensors"
    assert_equal(load_checkpoint(file, dtype=torch.float32), model)
    file.rename(folder / "weights.safetensors")
    assert_equal(load_checkpoint(folder, dtype=torch.float32), model)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight$"),
        (lambda t: t.pop(EXPERT), "lacks model.layers.1.mlp.experts.3.up_proj.weight$"),
        (
            lambda t: [t.pop(name) for name in list(t) if "experts.3." in name],
            r"lacks .*experts\.3\..* and 3 more$",
        ),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "has unexpected model.extra$"),
        (
            lambda t: t.update({EXPERT: torch.zeros(3, 3)}),
            r"another shape .*experts\.3\.up_proj\.weight \[3, 3\] instead of \[24, 64\]$",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            "unknown number format model.norm.weight in I8",
        ),
        (
            lambda t: t.update({"model.language_model.norm.weight": torch.zeros(64)}),
            "both hold model.norm.weight",
        ),
    ],
)
def test_tensors_that_do_not_match_are_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_stray_frequencies_are_ignored(folder, model):
    stray = {"model.layers.0.attention.rotary_emb.inv_freq": torch.zeros(4)}
    rewrite(folder, lambda tensors: tensors.update(stray))
    assert_equal(load_checkpoint(folder, dtype=torch.float32), model)


def test_a_model_larger_than_memory_is_refused(folder, monkeypatch):
    monkeypatch.setattr(checkpoint_reader, "_available_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"takes .* GiB, more than cpu has free"):
        load_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged or incomplete"):
        load_checkpoint(folder)


def test_missing_pieces(tmp_path, folder, model):
    with pytest.raises(CheckpointError, match=r"nothing/config\.json"):
        load_checkpoint(tmp_path / "nothing")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds 0 safetensors files"):
        load_checkpoint(folder)
    save_checkpoint(model, tmp_path / "sharded", shard_bytes=50_000)[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-.* that its index names"):
        load_checkpoint(tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        load_checkpoint(tmp_path / "sharded")


def test_nothing_is_overwritten_unasked(folder, model, make_model, config):
    with pytest.raises(UsageError, match="already holds a checkpoint"):
        save_checkpoint(model, folder)
    other = make_model(config, seed=5)
    save_checkpoint(other, folder, dtype=torch.float32, shard_bytes=50_000, overwrite=True)
    assert_equal(load_checkpoint(folder, dtype=torch.float32), other)
    save_checkpoint(model, folder, dtype=torch.float32, overwrite=True)
    assert_equal(load_checkpoint(folder, dtype=torch.float32), model)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_expert_bias_survives_casts(model, make_model, config):
    bias = model.sparse_blocks()[1].gate.expert_bias
    cast = make_model(config).to(torch.bfloat16).half().to("cpu")
    assert torch.equal(cast.sparse_blocks()[1].gate.expert_bias, bias)
    assert cast.sparse_blocks()[1].gate.weight.dtype == torch.float16


def test_initialisation_is_seeded(config):
    def weights(seed):
        return LLaDA2MoeModelLM(config, seed=seed).state_dict()

    a, b, c = weights(1), weights(1), weights(2)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert a["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert (a["model.norm.weight"] == 1).all()
