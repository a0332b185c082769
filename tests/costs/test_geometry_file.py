"""Cost geometries from files, and profiles held against a machine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

import oled_sim.model
from oled_sim.costs.synthetic import affine_profile
from oled_sim.errors import FileError, ProfileError, UsageError
from oled_sim.geometry import GEOMETRIES, find_geometry

MINI = GEOMETRIES["llada2.0-mini"]
NANO = Path(oled_sim.model.__file__).parent / "assets" / "nano" / "config.json"


def write(path, **changes):
    fields = {f: getattr(MINI, f) for f in MINI.__dataclass_fields__ if f != "name"} | changes
    path.write_text("".join(f"{k} = {v}\n" for k, v in fields.items() if v is not None))
    return str(path)


def test_a_toml_file_holds_the_sizes_and_gives_its_name(tmp_path):
    found = find_geometry(write(tmp_path / "mine.toml", weight_bytes=4))
    assert found.name == "mine"
    assert (found.hidden_size, found.experts, found.weight_bytes) == (2048, 256, 4)
    assert found.expert_bytes == 2 * MINI.expert_bytes
    assert find_geometry(write(tmp_path / "b.toml", name='"other"')).name == "other"


def test_a_published_configuration_is_a_geometry():
    nano = find_geometry(str(NANO))
    assert (nano.name, nano.hidden_size, nano.moe_intermediate_size) == ("nano", 192, 24)
    assert (nano.layers, nano.dense_layers, nano.experts, nano.top_k) == (9, 1, 128, 8)
    assert (nano.vocabulary, nano.weight_bytes) == (4096, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size is 0, but must be at least 1"),
        ({"hidden_sise": 5}, "unknown field 'hidden_sise'"),
        ({"experts": '"many"'}, "breaks the format"),
        ({"experts": "="}, "not valid TOML"),
        ({"dense_layers": 20}, "leaves no layer of 20"),
        ({"layers": None, "top_k": None, "heads": None}, "mine.toml lacks layers, top_k, heads$"),
        ({"top_k": 300}, "top_k is 300, but must not exceed experts, 256$"),
        ({"weight_bytes": 3}, r"weight_bytes is 3, but must be 2 \(bf16\) or 4 \(fp32\)$"),
        ({"heads": 4, "kv_heads": 3}, "mine.toml: kv_heads is 3, but must divide heads, 4$"),
        ({"head_dim": 15}, "mine.toml: head_dim is 15, but must be a multiple of 4$"),
    ],
)
def test_a_file_that_is_no_geometry_gets_one_sentence(tmp_path, changes, message):
    with pytest.raises(FileError, match=message) as refused:
        find_geometry(write(tmp_path / "mine.toml", **changes))
    assert "\n" not in str(refused.value)


def test_the_documented_file_is_a_geometry_and_every_field_is_documented(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")
    section = page.split("## Geometry files")[1].split("\n## ")[0]
    (example,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "small.toml").write_text(example)
    found = find_geometry(str(tmp_path / "small.toml"))
    nano = dataclasses.replace(find_geometry(str(NANO)), name="small", weight_bytes=4)
    assert found == nano
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(MINI.__dataclass_fields__)


def test_a_missing_file_and_a_foreign_configuration_are_told_apart(tmp_path):
    with pytest.raises(UsageError, match="cannot read geometry"):
        find_geometry(str(tmp_path / "none.toml"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileError, match="not a LLaDA2"):
        find_geometry(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("gpu", "Other GPU", "GPU: synthetic; here: Other GPU"),
        ("cpu", "Other CPU", "processor: synthetic; here: Other CPU"),
        ("workers", 3, "CPU workers: 16; here: 3"),
    ],
)
def test_a_profile_of_other_hardware_is_refused(field, value, message):
    profile = affine_profile(MINI)
    profile.require_hardware(profile.hardware)
    with pytest.raises(ProfileError, match=message):
        profile.require_hardware(msgspec.structs.replace(profile.hardware, **{field: value}))
    # What does not decide the times is free to differ.
    profile.require_hardware(msgspec.structs.replace(profile.hardware, driver="1", cores=3))
