"""``oled-sim profiles``: the bundled profiles and those in files, as tables and as JSON."""

import json
import re
import subprocess
import sys

from commands import oled_sim
from msgspec.structs import replace

from oled_sim.costs.store import bundled_profiles, load_profile, save_profile


def listed(*arguments):
    ended = oled_sim("profiles", *arguments, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    return {profile["name"]: profile for profile in json.loads(ended.stdout)["profiles"]}


def test_every_bundled_profile_has_a_row():
    ended = oled_sim("profiles")
    assert (ended.returncode, ended.stderr) == (0, "")
    _, *rows = ended.stdout.splitlines()
    assert len(rows) == len(bundled_profiles())
    for row, name in zip(rows, bundled_profiles(), strict=True):
        profile = load_profile(name)
        cells = re.split("  +", row)
        assert cells[:4] == [name, profile.status, profile.geometry.name, str(profile.origin.date)]
        assert cells[4] == profile.hardware.gpu and cells[6] == profile.hardware.cpu


def test_json_says_the_same_for_programs():
    found = listed()
    assert list(found) == bundled_profiles()
    assert {profile["status"] for profile in found.values()} == {"measured", "estimated"}
    mini = load_profile("h200-llada2.0-mini")
    assert found["h200-llada2.0-mini"] == {
        "name": "h200-llada2.0-mini",
        "status": "measured",
        "provisional": mini.provisional,
        "geometry": "llada2.0-mini",
        "gpu": "NVIDIA H200",
        "cpu": mini.hardware.cpu,
        "workers": mini.hardware.workers,
        "pcie_generation": 5,
        "pcie_width": 16,
        "date": mini.origin.date.isoformat(),
        "script": "oled-sim profile",
        "note": mini.origin.note,
    }


def test_a_file_says_how_it_was_made(tmp_path):
    mini = load_profile("h200-llada2.0-mini")
    origin = replace(mini.origin, note="With the fans off.")
    path = tmp_path / "mine.toml"
    save_profile(replace(mini, name="mine", provisional=True, origin=origin), path)
    assert list(listed(path)) == ["mine"]
    out = oled_sim("profiles", path).stdout
    assert "measured, provisional" in out and out.count("mine") == 1
    assert out.endswith("\nMade by oled-sim profile. With the fans off.\n")


def test_an_unknown_name_gets_the_nearest():
    ended = oled_sim("profiles", "h200-llada2.0-mini2")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "did you mean 'h200-llada2.0-mini'?" in ended.stderr


def test_help_imports_nothing_heavy():
    program = (
        "import sys, oled_sim.cli.profiles\n"
        "print(sorted({'torch', 'numba', 'numpy', 'rich', 'msgspec'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
