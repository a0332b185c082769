import pytest
import tokenizers
import torch

from oled_sim.errors import CheckpointError, UsageError
from oled_sim.model import loading
from oled_sim.model.checkpoint import save_checkpoint
from oled_sim.model.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path, model):
    save_checkpoint(model, tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    return tmp_path / "tiny"


def write_tokenizer(folder):
    words = {"[UNK]": 0, "two": 1, "plus": 2, "is": 3, "Q": 4, "A": 5}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.add_special_tokens(["<|mask|>", "<|endoftext|>"])
    core.save(str(folder / "tokenizer.json"))


def test_by_folder(folder, model):
    loaded = loading.load_model(folder, device="cpu")
    assert loaded.config == model.config
    assert (loaded.dtype, loaded.device.type) == (torch.float32, "cpu")
    assert loading.load_model(folder, "cpu", torch.bfloat16).dtype == torch.bfloat16
    assert loading.load_tokenizer(folder / "model.safetensors").encode("two plus") == [1, 2]


def test_bundled_model_by_name(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "ASSETS", tmp_path)
    with pytest.raises(CheckpointError, match="bundled model 'nano' is not in this installation"):
        loading.load_model("nano")
    folder.rename(tmp_path / "nano")
    assert loading.load_model("nano", "cpu").config.num_experts == 16


def test_unknown_names(folder):
    with pytest.raises(UsageError, match=r"no model 'nanoo': .* nano"):
        loading.load_model("nanoo")
    with pytest.raises(UsageError, match="unknown device 'tpuu'"):
        loading.load_model(folder, "tpuu")
    with pytest.raises(UsageError, match="'meta' is not supported"):
        loading.load_model(folder, "meta")
    with pytest.raises(UsageError, match="no device 'cuda:99'"):
        loading.load_model(folder, "cuda:99")


def test_tokenizer(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("two is two") == [1, 3, 1]
    assert tokenizer.encode("Q<|mask|>") == [4, 6]
    assert tokenizer.decode([1, 2, tokenizer.token_id("<|endoftext|>")]) == "two plus"
    assert "<|endoftext|>" in tokenizer.decode([1, 7], skip_special=False)
    with pytest.raises(UsageError, match="no token 'three'"):
        tokenizer.token_id("three")


def test_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="comes without its tokenizer"):
        Tokenizer.from_folder(folder)
