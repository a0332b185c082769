"""Parameter files, and how well the ones that ship fit."""

import re
import tomllib
from importlib.resources import files

import msgspec
import pytest
from synthetic_recipes import small_data

from oled_sim.errors import OledSimError, UsageError
from oled_sim.synthesis.generate import make_recipe
from oled_sim.synthesis.parameters import COUPLINGS, DataSet, data_sets, load_data_set, to_toml
from oled_sim.synthesis.report import fit_report


def test_files_say_what_was_saved():
    data = small_data()
    assert msgspec.convert(tomllib.loads(to_toml(data)), DataSet) == data
    for name in data_sets():
        shipped = load_data_set(name)
        assert msgspec.convert(tomllib.loads(to_toml(shipped)), DataSet) == shipped


def test_unknown_data_sets_and_broken_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'gsm8k'"):
        load_data_set("gsm8")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = 3")
    with pytest.raises(OledSimError, match="holds no synthesis parameters"):
        load_data_set(str(broken))
    with pytest.raises(OledSimError, match="cannot be read"):
        load_data_set(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize("name", data_sets())
def test_every_data_set_has_all_relations(name):
    data = load_data_set(name)
    assert data.name == name
    for model in ("llada2.0-mini", "llada2.0-flash"):
        assert set(data.models[model].couplings) == set(COUPLINGS)
    assert set(data.couplings) == set(COUPLINGS)


@pytest.mark.parametrize("name", data_sets())
def test_mini_fits_what_the_paper_prints(name):
    recipe = make_recipe(load_data_set(name), "llada2.0-mini", output_tokens=256)
    lines = {line.statistic: line for line in fit_report(recipe, 2)}
    for statistic in ("activated", "adjacent_overlap", "boundary_overlap"):
        line = lines[statistic]
        assert line.source == "paper"
        assert abs(line.achieved - line.target) <= 1.5 * line.tolerance


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("popularity = ", "popularity = nan # ", "routing.popularity"),
        ("popularity = ", "popularity = -1 # ", "between 0 and 20"),
        ("carry = ", "carry = 1.5 # ", "routing.carry"),
        ("masked_mean = ", "masked_mean = inf # ", "confidence.masked_mean"),
        ("threshold = ", "threshold = 2.0 # ", "between 0 and 1"),
        ("block_length = ", "block_length = 0 # ", "block_length = 0"),
        ("slope = ", "slope = nan # ", "gates.slope"),
        ("[couplings.positive]", "[couplings.negative]", "couplings.negative is no relation"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(tmp_path, old, new, says):
    text = (files("oled_sim.synthesis") / "parameters" / "gsm8k.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace(f"\n{old}", f"\n{new}", 1))
    with pytest.raises(OledSimError, match=re.escape(says)):
        load_data_set(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("name", data_sets())
def test_what_ships_can_be_meant(name, tmp_path):
    (tmp_path / "same.toml").write_text(to_toml(load_data_set(name)))
    load_data_set(str(tmp_path / "same.toml"))
