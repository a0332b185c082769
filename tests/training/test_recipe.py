import msgspec
import pytest
import torch

from oled_sim.errors import UsageError
from oled_sim.geometry import GEOMETRIES
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.training.layout import lay_out
from oled_sim.model.training.noise import corrupt
from oled_sim.model.training.objective import training_runner
from oled_sim.model.training.recipe import RECIPES, load_recipe


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_bundled_recipes_are_valid_and_named_like_their_file(name):
    assert load_recipe(name).name == name


def test_nano_is_llada2_within_its_size():
    recipe = load_recipe("nano")
    model = recipe.model
    assert len(model.moe_layers) >= 8
    assert (model.num_experts, model.num_experts_per_tok) == (128, 8)
    assert (model.n_group, model.topk_group) == (8, 4)
    assert {length for length, _ in recipe.noise.block_lengths} >= {4, 8, 16, 32}


def test_narrow_mini_routes_like_mini_and_knows_every_block_length():
    recipe = load_recipe("narrow-mini")
    mini = GEOMETRIES["llada2.0-mini"]
    assert recipe.model.moe_layers == tuple(range(1, 20))
    assert len(recipe.model.moe_layers) == mini.moe_layers
    routing = (recipe.model.num_experts, recipe.model.num_experts_per_tok)
    assert routing == (mini.experts, mini.top_k) == (256, 8)
    assert (recipe.model.n_group, recipe.model.topk_group) == (8, 4)
    assert recipe.model.num_shared_experts == 1
    assert {1, 4, 8, 16, 32, 64} <= {length for length, _ in recipe.noise.block_lengths}


def test_narrow_mini_trains_when_narrower_still():
    recipe = load_recipe("narrow-mini")
    widths = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 4}
    shape = msgspec.structs.replace(recipe.model, **widths, head_dim=16, vocab_size=64)
    runner = training_runner(LLaDA2MoeModelLM(shape, recipe.seed))
    clean = torch.arange(128).remainder(60).unsqueeze(0) + 4
    layout = lay_out(clean == clean[0, 0], torch.tensor([16]))
    noisy = corrupt(
        clean, layout, recipe.noise, shape.mask_token_id, torch.Generator().manual_seed(0)
    )
    runner.loss(noisy.tokens, noisy.counted, clean, layout).backward()
    assert runner.loads.shape == (19, 256)
    # 8 experts for each of 2 noisy copies and the clean one, 128 tokens each
    assert runner.loads.sum(1).tolist() == [8 * 3 * 128] * 19
    assert all(p.grad is not None for p in runner.model.parameters())


def test_unknown_recipe_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'nano'"):
        load_recipe("nanno")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 1", "sed = 1", "sed"),
        ("seed = 1", 'seed = "one"', "seed"),
        ("seed = 1", "seed = ", "Invalid value"),
        ("window = 128", "window = 100", "no multiple of pad"),
        ("[[16, 0.5], [4, 0.5]]", "[[256, 1.0]]", "block of 256 exceeds the window"),
        ("validation_share = 0.2", "validation_share = 1.0", "validation_share"),
        ('matrices = "muon"', 'matrices = "sgd"', "matrices"),
        ('licence = "MIT"', 'licence = "MIT"\njoin = 0', "join is not positive"),
        ("num_experts = 16", "num_experts = 15", "num_experts 15"),
    ],
)
def test_invalid_recipes_are_one_sentence(tmp_path, old, new, message):
    text = (RECIPES / "tiny.toml").read_text()
    assert old in text
    path = tmp_path / "r.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError, match="is not valid") as caught:
        load_recipe(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
