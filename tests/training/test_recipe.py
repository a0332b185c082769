import pytest

from oled_sim.errors import UsageError
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
