"""Parameter files, and how well the ones that ship fit."""

import tomllib

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
