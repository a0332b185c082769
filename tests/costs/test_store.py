"""Profiles as files: what is written is read back, and what is broken is refused."""

from __future__ import annotations

import math
import os
import re
import stat

import msgspec
import pytest
from cost_tables import grid

from oled_sim.costs.profile import Grid, Profile
from oled_sim.costs.store import bundled_profiles, load_profile, save_profile, to_toml
from oled_sim.errors import ProfileError, UsageError


def test_round_trip_gives_the_same_bytes(affine: Profile, tmp_path):
    table = grid(("experts", "tokens_per_expert"), [1, 3], [1, 2], [[0.1, 1e-9], [1 / 3, math.nan]])
    note = 'quotes " and \\ and tabs\t and ünïcode and \x7f'
    origin = msgspec.structs.replace(affine.origin, note=note)
    profile = msgspec.structs.replace(affine, gpu_experts=table, origin=origin)
    path = tmp_path / "p.toml"
    save_profile(profile, path)
    again = load_profile(path)
    assert again.origin.note == note
    assert to_toml(again) == path.read_text()
    assert again.cost_geometry == affine.cost_geometry


@pytest.mark.parametrize("name", bundled_profiles())
def test_bundled_profiles_are_in_canonical_form(name):
    from importlib.resources import files

    text = (files("oled_sim") / "profiles" / f"{name}.toml").read_text()
    assert to_toml(load_profile(name)) == text


def test_nothing_is_overwritten_unasked(affine: Profile, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        save_profile(affine, path)
    assert path.read_text() == "mine"
    save_profile(affine, path, overwrite=True)
    assert load_profile(path).name == affine.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["p.toml"]


def test_a_failed_write_leaves_nothing_behind(affine: Profile, tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError, match="No space left"):
        save_profile(affine, tmp_path / "p.toml")
    assert not list(tmp_path.iterdir())


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UsageError, match=r"did you mean 'h200-llada2.0-mini'"):
        load_profile("h100-llada2.0-mini")


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read profile .*none\.toml: No such file"):
        load_profile(tmp_path / "none.toml")


BREAKS = {
    "not TOML": ("format = 1", "format = = 1", "not valid TOML"),
    "other version": ("format = 1", "format = 2", "format 2 is not 1"),
    "unknown key": ("provisional = false", "provisional = false\nfudge = 1.0", "fudge"),
    "missing key": ("provisional = false\n", "", "provisional"),
    "text for a number": ("hidden_size = 2048", 'hidden_size = "2048"', "hidden_size"),
    "unknown status": ('status = "synthetic"', 'status = "guessed"', "status"),
    "wrong axis": ('axis = "bytes"', 'axis = "tokens"', "axes of h2d"),
    "axis not ascending": ("points = [1, 4096]", "points = [4096, 1]", "ascend"),
    "axis shorter": ("points = [1, 4096]", "points = [1]", "1 points but 2 times"),
    "negative time": ("median_us = [30.0, 30.0]", "median_us = [30.0, -30.0]", "measurement"),
    "infinite time": ("p90_us = [30.0, 30.0]", "p90_us = [30.0, inf]", "measurement"),
    "nan without reason": ("median_us = [30.0, 30.0]", "median_us = [nan, 30.0]", "measurement"),
    "speed-up": ("median = 1.0\np10 = 1.0", "median = 0.5\np10 = 0.5", "below 1"),
    "ragged table": ("  [1, 1],\n  [1, 1],", "  [1, 1],\n  [1],", "2 rows of 2 columns"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_broken_files_are_refused_with_the_reason(affine: Profile, tmp_path, case):
    old, new, reason = BREAKS[case]
    text = to_toml(affine)
    assert old in text
    path = tmp_path / "broken.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProfileError) as error:
        load_profile(path)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_flipped_byte_that_is_no_text_is_refused(affine: Profile, tmp_path):
    data = bytearray(to_toml(affine).encode())
    data[200] ^= 0x80
    path = tmp_path / "flipped.toml"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match="UTF-8"):
        load_profile(path)


def test_slowdown_must_be_measured(affine: Profile, tmp_path):
    text = to_toml(affine).replace(
        "median = 1.0\np10 = 1.0\np90 = 1.0\nrepeats = 1",
        "median = nan\np10 = nan\np90 = nan\nrepeats = 0",
        1,
    )
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match="not measured"):
        load_profile(path)


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ("per_prefetch", "first_prefetch is there without per_prefetch"),
        ("prefetch_after_layer", "gate_after_prefetch is there without prefetch_after_layer"),
        ("gate_after_prefetch", "prefetch_after_layer is there without gate_after_prefetch"),
        ("first_prefetch", "prefetch_after_layer is there without first_prefetch"),
    ],
)
def test_times_that_are_measured_together_are_there_together(tmp_path, left_out, words):
    text = to_toml(load_profile("h200-llada2.0-mini"))
    entry = "[host.{}]\nmedian = 9.0\np10 = 9.0\np90 = 9.0\nrepeats = 1\n\n"
    pair = entry.format("prefetch_after_layer") + entry.format("gate_after_prefetch")
    path = tmp_path / "p.toml"
    path.write_text(
        whole := text.replace("[host.per_cpu_job_beside", pair + "[host.per_cpu_job_beside")
    )
    assert load_profile(path).host
    path.write_text(re.sub(rf"\[host\.{left_out}\]\n(.+\n)+\n", "", whole))
    with pytest.raises(ProfileError, match=words):
        load_profile(path)


def test_times_beyond_any_machine_are_refused(tmp_path):
    text = to_toml(load_profile("h200-llada2.0-mini"))
    path = tmp_path / "p.toml"
    path.write_text(
        re.sub(
            r"(\[host\.per_pass\]\n)(.+\n)+",
            r"\1median = 1e300\np10 = 1e300\np90 = 1e300\nrepeats = 1\n",
            text,
        )
    )
    with pytest.raises(ProfileError, match=r"1e\+300 .* is not a measurement - at `\$\.host"):
        load_profile(path)


def test_what_no_machine_has_is_refused(affine: Profile):
    """Each of these once went on to a traceback, or to times that are too short."""
    for wrong in ({"workers": 0}, {"workers": -3}, {"cores": 0}, {"pcie_generation": -1}):
        with pytest.raises(ValueError):
            msgspec.structs.replace(affine.hardware, **wrong)
    both = affine.interference.gpu.both
    with pytest.raises(ValueError, match=r"slow-down factor 0\.0 is below 1"):
        msgspec.structs.replace(
            affine.interference.gpu, both=msgspec.structs.replace(both, mean=0.0)
        )


def test_only_cells_between_measured_rows_may_lack_repeats():
    def table(*repeats):
        cells = [[1.0], [2.0], [3.0]]
        return Grid(
            ("experts", "tokens"), [1, 2, 3], [1], cells, cells, cells, [[n] for n in repeats]
        )

    assert table(1, 0, 1).repeats == [[1], [0], [1]]
    for repeats in ((0, 1, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="of 0 repeats"):
            table(*repeats)
