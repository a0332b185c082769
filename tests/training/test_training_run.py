"""The trainer from end to end, small, on the CPU."""

import os
import shutil
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from oled_sim.model.checkpoint import load_checkpoint
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.loading import load_tokenizer
from oled_sim.model.training import evaluate
from oled_sim.model.training.__main__ import main
from oled_sim.model.training.data import Sampler, mixture, prepare
from oled_sim.model.training.loop import Trainer, TrainingError
from oled_sim.model.training.objective import training_runner
from oled_sim.model.training.recipe import Source, load_recipe
from oled_sim.model.training.report import read_report
from oled_sim.model.training.tokenizer import (
    EOS,
    MASK,
    SPECIAL,
    encode,
    sample_texts,
    token_id,
    train_tokenizer,
)

RECIPE = load_recipe("tiny")


@pytest.fixture(scope="session")
def tokenizer(data):
    return train_tokenizer(sample_texts(RECIPE, data), RECIPE.model.vocab_size)


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "model"
    command = ["--recipe", "tiny", "--data", str(data), "--out", str(out), "--device", "cpu"]
    assert main([*command, "--train-seconds", "6"]) == 0
    return out


def test_documents_of_a_source_may_follow_each_other(data, tokenizer):
    source = msgspec.structs.replace(RECIPE.data.sources[0], join=3)
    joined = prepare(msgspec.structs.replace(RECIPE.data, sources=(source,)), data, tokenizer)
    alone = prepare(RECIPE.data, data, tokenizer)
    texts = [
        [tokenizer.decode(ids) for ids in _documents(p.train["gsm8k"])] for p in (alone, joined)
    ]
    assert max(text.count("Question:") for text in texts[0]) == 1
    assert {text.count("Question:") for text in texts[1]} >= {1, 2, 3}


@pytest.mark.slow
def test_a_run_without_evaluation_leaves_it_to_evaluate(data, tmp_path):
    out = tmp_path / "model"
    command = ["--recipe", "tiny", "--data", str(data), "--out", str(out), "--device", "cpu"]
    assert main([*command, "--train-seconds", "0.5", "--no-evaluation"]) == 0
    assert "answers" not in read_report(out / "training.json")
    evaluate.main(["--model", str(out), "--recipe", "tiny", "--data", str(data), "--device", "cpu"])
    report = read_report(out / "training.json")
    assert report["temperature"] == 1.0
    assert "No temperature was fitted" in (out / "MODEL_CARD.md").read_text()


def trainer(data, tokenizer, seed=0) -> Trainer:
    torch.manual_seed(0)
    runner = training_runner(LLaDA2MoeModelLM(RECIPE.model, seed))
    prepared = prepare(RECIPE.data, data, tokenizer)
    return Trainer(
        RECIPE, runner, Sampler(prepared.train, RECIPE.data.sources, torch.device("cpu"))
    )


def test_tokenizer_is_lossless_and_splits_digits(tokenizer):
    text = "Ann has 12*5 = <<12*5=60>>60 nüts.\n    def f(x):\n\treturn x  # 3.14\n"
    ids = encode(tokenizer, [text])[0]
    assert tokenizer.decode(ids.tolist()) == text
    pieces = [tokenizer.decode([i]) for i in ids.tolist()]
    assert all(len(piece) == 1 for piece in pieces if any(c.isdigit() for c in piece))
    assert [token_id(tokenizer, token) for token in SPECIAL] == [0, 1, 2, 3]
    assert tokenizer.get_vocab_size() == 320


def test_tokenizer_training_repeats(data, tokenizer):
    again = train_tokenizer(sample_texts(RECIPE, data), 320)
    assert again.to_str() == tokenizer.to_str()


def test_no_held_out_document_is_trained_on(data, tokenizer):
    prepared = prepare(RECIPE.data, data, tokenizer)
    train, validation = (_documents(p["gsm8k"]) for p in (prepared.train, prepared.validation))
    assert len(train) + len(validation) == 300
    assert 30 < len(validation) < 90  # 300 · 0.2 = 60
    assert not train & validation


def _documents(windows):
    found = set()
    for row in range(len(windows)):
        parts = np.split(windows.tokens[row], np.flatnonzero(windows.starts[row])[1:])
        found |= {tuple(part[part > 0].tolist()) for part in parts} - {()}
    return found


def test_mixture_moves_from_start_to_end():
    sources = tuple(
        Source(name=name, format="python", weight=weight, licence="")
        for name, weight in (("a", (3.0, 1.0)), ("b", (1.0, 1.0)))
    )
    assert mixture(sources, 0.0).tolist() == [0.75, 0.25]
    assert mixture(sources, 0.5).tolist() == pytest.approx([2 / 3, 1 / 3])
    assert mixture(sources, 1.0).tolist() == [0.5, 0.5]


def test_every_window_is_drawn_before_any_repeats(data, tokenizer):
    windows = prepare(RECIPE.data, data, tokenizer).train
    sampler = Sampler(windows, RECIPE.data.sources, torch.device("cpu"))
    generator = np.random.default_rng(0)
    drawn = [sampler.draw(1, 0.0, generator).tokens for _ in range(len(windows["gsm8k"]))]
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn}) == len(windows["gsm8k"])
    assert sampler.epochs() == {"gsm8k": 1.0}


def test_loss_falls_and_experts_are_used_evenly(trained):
    report = read_report(trained / "training.json")
    losses = [record["loss"] for record in report["curve"]]
    assert losses[-1] < losses[0] - 0.5
    assert report["elbo_nats_per_token"]["gsm8k"] < np.log(320) - 1.0
    assert max(report["router"].values()) < 3.0


def test_a_run_leaves_a_complete_model(trained):
    model, report = load_checkpoint(trained, "cpu"), read_report(trained / "training.json")
    assert model.config == RECIPE.model
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert load_tokenizer(trained).token_id(MASK) == model.config.mask_token_id
    assert load_tokenizer(trained).token_id(EOS) == model.config.eos_token_id
    assert 0.5 <= report["temperature"] <= 3.0
    card = (trained / "MODEL_CARD.md").read_text()
    assert f"{report['elbo_nats_per_token']['gsm8k']:.3f}" in card
    assert "How many" not in card.partition("## Samples")[0]
    assert (trained / "loss.png").stat().st_size < 100_000


def test_a_saved_model_is_measured_again(trained, data, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    before = read_report(trained / "training.json")
    sizes = ["--windows", "2", "--strata", "2", "--prompts", "1"]
    evaluate.main(["--model", str(copy), "--recipe", "tiny", "--data", str(data), *sizes])
    after = read_report(copy / "training.json")
    assert after["evaluation"]["windows"] == 2
    assert after["answers"]["0.5"]["requests"] == 1
    assert after["curve"] == before["curve"]
    assert "2 held-out windows" in (copy / "MODEL_CARD.md").read_text()


def test_an_existing_folder_is_never_overwritten(trained, data, capsys):
    code = main(["--recipe", "tiny", "--data", str(data), "--out", str(trained)])
    assert code == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(trained, data, tmp_path):
    out = tmp_path / "second"
    command = ["--recipe", "tiny", "--data", str(data), "--out", str(out), "--device", "cpu"]
    # The tokenizer of the recipe is trained anew from the same text, so ids agree.
    assert main([*command, "--train-seconds", "1", "--init", str(trained)]) == 0
    first = read_report(out / "training.json")["curve"][0]["loss"]
    assert first < read_report(trained / "training.json")["curve"][0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_cut_short_is_saved_and_measured(data, tmp_path, number):
    out = tmp_path / "model"
    command = [sys.executable, "-m", "oled_sim.model.training", "--recipe", "tiny"]
    process = subprocess.Popen(
        [*command, "--data", str(data), "--out", str(out), "--train-seconds", "600"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "step" in line:
            process.send_signal(number)
            break
    rest = process.stderr.read()
    assert process.wait() == 0, rest
    report = read_report(out / "training.json")
    assert report["training"]["interrupted"]
    assert report["training"]["seconds"] < 300
    assert "answers" in report
    load_checkpoint(out)


def test_same_seed_same_losses(data, tokenizer):
    losses = []
    for _ in range(2):
        run = trainer(data, tokenizer)
        run._warm_up()
        losses.append([run._backward(0.5).item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_diverged_run_is_one_sentence(data, tokenizer):
    run = trainer(data, tokenizer)
    with torch.no_grad():
        run.runner.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="loss is not a number at step"):
        run.run(0.2)
