"""Likelihood, acceptance and temperature, on models whose predictions are known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.model.decoding import accept as accept_in_generation
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.training.calibration import accept, decode_with_truth
from oled_sim.model.training.data import to_device
from oled_sim.model.training.layout import lay_out
from oled_sim.model.training.likelihood import elbo_nats_per_token
from oled_sim.model.training.objective import evaluation_runner
from oled_sim.model.training.packing import pack
from oled_sim.model.training.recipe import load_recipe
from oled_sim.model.training.temperature import fit_temperature, fold_temperature

CONFIG = load_recipe("tiny").model
CPU = torch.device("cpu")


def model(head=None) -> LLaDA2MoeModelLM:
    made = LLaDA2MoeModelLM(CONFIG, seed=3).eval().requires_grad_(False)
    if head is not None:
        made.lm_head.weight.copy_(head)
    return made


def batch(lengths=(20, 9, 40)):
    rng = np.random.default_rng(0)
    documents = [rng.integers(4, 320, length).astype(np.int32) for length in lengths]
    return to_device(pack(documents, window=128, multiple=16, eos=0), CPU)


@pytest.mark.slow
def test_elbo_of_a_uniform_model_is_the_log_of_the_vocabulary():
    # Every token costs ln 320 at any noise level, padding too. Documents of 21, 10 and 41 real
    # tokens take 32 + 16 + 48 = 96 positions, so the bound is ln 320 · 96 / 72.
    runner = evaluation_runner(model(torch.zeros(320, CONFIG.hidden_size)))
    texts = batch()
    assert int(texts.real.sum()) == 72
    found = [
        elbo_nats_per_token(runner, texts, block_length=16, strata=64, seed=seed)
        for seed in range(4)
    ]
    # Each masked position weighs 1/t; the sum over 64 strata varies by a few per cent.
    assert np.mean(found) == pytest.approx(math.log(320) * 96 / 72, rel=0.05)


def test_elbo_repeats_for_a_seed():
    runner, texts = evaluation_runner(model()), batch()
    first, again, other = (
        elbo_nats_per_token(runner, texts, block_length=8, strata=4, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other


@given(
    confidence=st.lists(st.integers(0, 20), min_size=16, max_size=16),
    masked=st.lists(st.booleans(), min_size=16, max_size=16),
    threshold=st.sampled_from([0.25, 0.5, 0.9]),
)
def test_acceptance_agrees_with_generation(confidence, masked, threshold):
    # Two documents of one block of 8; the generator's rule sees one block at a time.
    starts = torch.zeros(1, 16, dtype=torch.bool)
    starts[0, [0, 8]] = True
    layout = lay_out(starts, torch.tensor([8]))
    values = torch.tensor([confidence]) / 20.0
    flags = torch.tensor([masked])
    found = accept(values, flags, layout, threshold)[0]
    for part in (slice(0, 8), slice(8, 16)):
        expected = accept_in_generation(
            values[0, part].numpy(), flags[0, part].numpy(), threshold, at_least=1
        )
        assert found[part].tolist() == expected.tolist()


def test_decoding_with_truth_accepts_every_real_token_once():
    texts = batch()
    result = decode_with_truth(evaluation_runner(model()), texts, block_length=16, threshold=0.9)
    summary = result.summary()
    # A random model is never sure: one token per pass and block. 72 real tokens in blocks of 16
    # that hold 21 + 10 + 41 of them take 32 + 16 + 48 passes.
    assert summary["tokens"] == 72
    assert float(result.passes) == 96
    assert summary["tokens_per_pass"] == pytest.approx(72 / 96)
    assert 0 <= summary["accuracy"] < 0.2


def test_decoding_with_truth_at_threshold_zero_takes_one_pass_per_block():
    result = decode_with_truth(evaluation_runner(model()), batch(), block_length=16, threshold=0.0)
    assert float(result.passes) == 6  # blocks: 2 + 1 + 3
    assert result.summary()["tokens"] == 72


def test_fitted_temperature_repairs_confidence():
    # Logits x10 of a model that is right with probability softmax(logits): the fit must undo 10,
    # up to the end of its range, or a factor of 2 exactly.
    torch.manual_seed(0)
    head = torch.randn(50, 16)
    hidden = torch.randn(4000, 16)
    targets = torch.distributions.Categorical(logits=hidden @ head.T).sample()
    assert fit_temperature(2 * hidden, head, targets) == pytest.approx(2.0, rel=0.05)
    assert fit_temperature(10 * hidden, head, targets) == pytest.approx(3.0, abs=0.01)


def test_folded_temperature_divides_the_logits():
    plain, cooled = model(), model()
    fold_temperature(cooled, 1.25)
    texts = batch()
    noisy = texts.tokens.unsqueeze(1)
    layout = lay_out(texts.starts, torch.full((len(noisy),), 16))
    logits = [
        made.lm_head(evaluation_runner(made).hidden(noisy, texts.tokens, layout))
        for made in (plain, cooled)
    ]
    torch.testing.assert_close(logits[1] * 1.25, logits[0], atol=1e-5, rtol=1e-4)
