"""``oled-sim validate`` from the outside."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import msgspec
import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from measured_points import changed, made_trace, save, simulated_point

from oled_sim.cli.main import main
from oled_sim.costs.store import load_profile, save_profile
from oled_sim.validation.measured import Cut, ProfileUsed, profile_sha256


def call(*arguments):
    """Return exit code, stdout and stderr of ``oled-sim``."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(a) for a in arguments])
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def points(trace):
    return [
        simulated_point(trace, "lru", 4, (1.0, 1.01)),
        simulated_point(trace, "oled", 4, (1.02, 1.03)),
        simulated_point(trace, "lru", 10, (1.2, 1.2)),
    ]


@pytest.fixture(scope="module")
def root(points, tmp_path_factory):
    return save(tmp_path_factory.mktemp("replayed") / "r", *points)


def test_tables_say_what_was_found(root):
    code, out, err = call("validate", root)
    assert (code, err) == (0, "")
    assert "Machine   NVIDIA H200" in out and "Points    3, run 2 times each" in out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["worst |TPOT error|"].endswith("MISS") and "16.67%" in lines["worst |TPOT error|"]
    assert lines["median |TPOT error|"].endswith("pass")
    assert "3 of 3 points identical, 126 events" in lines["decisions, demand-only policies"]
    for title in ("Time per output token", "Errors by regime", "Lanes", "Ranking of policies"):
        assert f"\n{title}\n" in out


def test_json_holds_every_figure(root):
    code, out, err = call("validate", root, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["missed"] == ["worst |TPOT error|", "signed mean TPOT error"]
    by_point = {p["point"]: p for p in found["points"]}
    assert by_point["lru-c10-gsm-r1"]["error"] == pytest.approx(1 / 1.2 - 1)
    assert by_point["oled-c4-gsm-r1"]["spread"] == pytest.approx(0.01 / 1.025)
    assert found["errors"]["points"] == 3 and found["by_policy"]["lru"]["points"] == 2
    (ranking,) = found["rankings"]
    assert [c["policy"] for c in ranking["contests"]] == sorted(
        ("lru", "oled"), key=lambda p: by_point[f"{p}-c4-gsm-r1"]["measured_tpot_us"]
    )
    assert found["geometry"]["name"] == "llada2.0-mini" and found["traces"] == ["gsm"]


def test_points_without_an_equal_are_named(trace, root, tmp_path):
    """Of two caches: in one the passes of two policies differ, in the other one of three."""
    six, seven = ((Cut(request=1, decode_passes=n),) for n in (6, 7))
    points = [
        simulated_point(trace, "lru", 4, measured=six),
        simulated_point(trace, "oled", 4, measured=seven),
        simulated_point(trace, "lru", 6, measured=six),
        simulated_point(trace, "oled", 6, measured=six),
        simulated_point(trace, "lru", 6, measured=(Cut(request=2),)),
    ]
    mixed = save(tmp_path / "mixed", *points)
    says = (
        "lru-c4-gsm-r1 (6 decode passes), oled-c4-gsm-r1 (7 decode passes), lru-c6-gsm-r2 (all"
        " decode passes): left out of rankings, as not every policy of that cache and data set has"
        " a point with the same warm-up, requests and passes"
    )
    code, out, err = call("validate", mixed, "--out", tmp_path / "report")
    assert code == 0, err
    assert f"Unranked  {says}\n" in out
    assert f"\n- Unranked: {says}\n" in (tmp_path / "report" / "summary.md").read_text()
    found = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert found["unranked"] == says and len(found["rankings"]) == 1
    code, out, _ = call("validate", root)
    assert "Unranked" not in out
    assert json.loads(call("validate", root, "--json")[1])["unranked"] == ""


def test_required_targets_decide_the_exit_code(root, points, tmp_path):
    code, out, err = call("validate", root, "--require")
    assert code == 1 and out.startswith("Machine")
    assert err == "Error: targets are missed: worst |TPOT error|, signed mean TPOT error\n"
    good = save(tmp_path / "good", *points[:2])
    assert call("validate", good, "--require")[0] == 0


def test_files(root, tmp_path):
    folder = tmp_path / "out"
    assert call("validate", root, "--out", folder)[0] == 0
    names = ["parity.png", "points.parquet", "summary.json", "summary.md"]
    assert sorted(f.name for f in folder.iterdir()) == names
    table = pd.read_parquet(folder / "points.parquet")
    assert table["policy"].tolist() == ["lru", "oled", "lru"]
    assert table["error"].tolist()[2] == pytest.approx(1 / 1.2 - 1)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads(call("validate", root, "--json")[1])
    text = (folder / "summary.md").read_text()
    assert "| lru | 10 | gsm | 1 |" in text and "## Targets" in text
    assert imread(folder / "parity.png").shape[0] > 300
    before = {name: (folder / name).read_bytes() for name in names}
    code, out, err = call("validate", root, "--out", folder)
    assert (code, out) == (2, "") and "summary.md exists" in err
    assert call("validate", root, "--out", folder, "--force")[0] == 0
    assert {name: (folder / name).read_bytes() for name in names} == before


def test_a_spread_is_a_number(root):
    code, out, err = call("validate", root, "--spread", "nan")
    assert (code, out) == (2, "") and "Invalid value for '--spread': nan is not a number" in err


def test_unfinished_points_are_left_out_and_named(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "r")
    (copy / "oled-c4-gsm-r1" / "point.json").unlink()
    code, out, err = call("validate", copy)
    assert code == 0 and "Points    2" in out
    assert err == f"Note: {copy / 'oled-c4-gsm-r1'} was never finished and is left out\n"


def test_a_trace_that_moved_is_found_by_what_it_holds(trace, tmp_path):
    here = made_trace(tmp_path / "gsm", seed=5)
    root = save(tmp_path / "r", simulated_point(here, "lru", 4))
    moved = shutil.move(here.path, tmp_path / "elsewhere")
    code, out, err = call("validate", root)
    assert (code, out) == (1, "") and "is not found: give its folder with --trace" in err
    assert err.count("\n") == 1
    assert call("validate", root, "--trace", moved)[0] == 0
    code, _, err = call("validate", root, "--trace", trace.path)  # of the same name
    assert code == 1 and "has changed since" in err


def test_a_profile_of_ones_own(trace, tmp_path):
    profile = msgspec.structs.replace(load_profile("h200-llada2.0-mini"), name="mine")
    file = tmp_path / "mine.toml"
    save_profile(profile, file)
    used = ProfileUsed(name="mine", sha256=profile_sha256(profile))
    root = save(tmp_path / "r", changed(simulated_point(trace, "lru", 4), profile=used))
    code, _, err = call("validate", root)
    assert code == 2 and "is none that ships: give its file with --profile" in err
    assert call("validate", root, "--profile", file)[0] == 0
    code, _, err = call("validate", root, "--profile", "h200-llada2.0-mini")
    assert code == 2 and "is not the one that" in err and "'mine'" in err


def of_machine(point, identity, profile):
    """Return a point as one of several machines of a kind measured it, with its own profile."""
    used = ProfileUsed(name=profile.name, sha256=profile_sha256(profile))
    machine = msgspec.structs.replace(point.about.machine, identity=identity)
    return changed(point, machine=machine, profile=used)


@pytest.fixture(scope="module")
def sessions(trace, tmp_path_factory):
    """Return two folders of a grid and the profiles of the machines that measured them."""
    folder = tmp_path_factory.mktemp("sessions")
    roots, files = [], []
    for identity, specs in (("aaaa", ("lru", "oled")), ("bbbb", ("no-cache",))):
        profile = msgspec.structs.replace(load_profile("h200-llada2.0-mini"), name=f"on-{identity}")
        save_profile(profile, folder / f"{identity}.toml")
        points = [of_machine(simulated_point(trace, s, 4), identity, profile) for s in specs]
        roots.append(save(folder / identity, *points))
        files.append(folder / f"{identity}.toml")
    return roots, files


def test_a_grid_of_several_machines(sessions):
    roots, files = sessions
    given = [part for file in reversed(files) for part in ("--profile", file)]
    code, out, err = call("validate", *roots, *given)
    assert (code, err) == (0, "")
    assert "[aaaa (2 points), bbbb (1 point)]" in out
    assert re.search(r"Profile +on-aaaa \[\w{16}\] \(2 points\), on-bbbb \[\w{16}\] \(1", out)
    found = json.loads(call("validate", *roots, *given, "--json")[1])
    assert [(p["name"], p["points"]) for p in found["profiles"]] == [("on-aaaa", 2), ("on-bbbb", 1)]
    assert {p["policy"]: (p["machine"], p["profile"]) for p in found["points"]} == {
        "lru": ("aaaa", "on-aaaa"), "oled": ("aaaa", "on-aaaa"), "no-cache": ("bbbb", "on-bbbb"),
    }  # fmt: skip
    assert all(p["error"] == pytest.approx(0) for p in found["points"])


def test_a_profile_that_is_missing_is_asked_for(sessions, trace, tmp_path):
    roots, (first, _) = sessions
    code, _, err = call("validate", *roots, "--profile", first)
    assert code == 2 and "is not the one that" in err and "'on-bbbb'" in err
    other = msgspec.structs.replace(load_profile("h200-llada2.0-mini"), name="third")
    save_profile(other, tmp_path / "third.toml")
    code, _, err = call(
        "validate", *roots, "--profile", first, "--profile", tmp_path / "third.toml"
    )
    assert code == 2 and err.count("\n") == 1
    assert "none of the profiles 'on-aaaa', 'third'" in err and "'on-bbbb'" in err


def test_a_point_that_two_machines_measured_is_refused(sessions, tmp_path):
    roots, files = sessions
    again = shutil.copytree(roots[1], tmp_path / "again")
    code, out, err = call("validate", *roots, again, "--profile", files[0], "--profile", files[1])
    assert (code, out) == (2, "") and "measure the same point" in err and str(again) in err
    code, _, err = call("validate", roots[0], roots[0])
    assert code == 2 and "given twice" in err


def test_a_refusal_leaves_no_folder(trace, tmp_path):
    point = simulated_point(trace, "lru", 4)
    used = ProfileUsed(name="nowhere", sha256="0" * 64)
    root = save(tmp_path / "r", changed(point, profile=used))
    assert call("validate", root, "--out", tmp_path / "report")[0] == 2
    assert not (tmp_path / "report").exists()
    (tmp_path / "report").mkdir()
    assert call("validate", root, "--out", tmp_path / "report")[0] == 2
    assert (tmp_path / "report").is_dir()  # one that was there stays


def test_a_profile_of_another_machine(trace, tmp_path):
    point = simulated_point(trace, "lru", 4)
    hardware = msgspec.structs.replace(point.about.machine.hardware, gpu="NVIDIA L4")
    machine = msgspec.structs.replace(point.about.machine, hardware=hardware)
    root = save(tmp_path / "r", changed(point, machine=machine))
    code, _, err = call("validate", root)
    assert code == 1 and "was measured with gpu 'NVIDIA L4'" in err
    assert call("validate", root, "--allow-other-hardware")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "no/such"], "no is no folder: create it first"),
        (["--out", "/proc/such"], "cannot write /proc/such: /proc takes no new files"),
        (["--profile", "h200-llada-mini"], "did you mean"),
        (["--spread", "-1"], "-1"),
    ],
)
def test_mistakes_are_one_sentence(root, arguments, words):
    code, out, err = call("validate", root, *arguments)
    assert (code, out) == (2, "") and words in err


def test_a_folder_without_points(tmp_path):
    (tmp_path / "point.json").touch()
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("empty", "holds no measured point"),
        ("absent", "does not exist"),
        ("point.json", "is a file"),
    ):
        code, _, err = call("validate", tmp_path / name)
        wanted = "give the folder that replay wrote to"
        assert (code, err) == (2, f"Error: {tmp_path / name} {says}: {wanted}\n")


def test_spread_decides_about_points_run_once(trace, tmp_path):
    points = [simulated_point(trace, spec, 4) for spec in ("lru", "no-cache")]
    root = save(tmp_path / "r", *points)
    verdict = {
        options: next(t["met"] for t in found["targets"] if t["name"] == "ranking")
        for options in ((), ("--spread", "1"))
        for found in [json.loads(call("validate", root, "--json", *options)[1])]
    }
    assert verdict == {(): None, ("--spread", "1"): True}


@pytest.mark.slow
def test_the_command_itself(root):
    done = subprocess.run(
        [sys.executable, "-m", "oled_sim", "validate", str(root)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Ranking of policies" in done.stdout


class TestFigure:
    def table(self, policies):
        tpot = np.linspace(2e3, 60e3, len(policies))
        return pd.DataFrame(
            {
                "policy": policies,
                "predicted_tpot_us": tpot * 1.05,
                "measured_tpot_us": tpot,
                "measured_fastest_us": tpot * 0.98,
                "measured_slowest_us": tpot * 1.03,
            }
        )

    def test_draws_every_point_once_on_equal_logarithmic_axes(self):
        from oled_sim.plotting.parity import draw_parity

        table = self.table(["lru", "oled", "lru", "lfu"])
        (axes,) = draw_parity(table).axes
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlim() == axes.get_ylim()
        drawn = {c.get_label(): c.lines[0].get_xydata() for c in axes.containers}
        assert list(drawn) == ["lru", "oled", "lfu"]
        expected = table[table["policy"] == "lru"][["measured_tpot_us", "predicted_tpot_us"]] / 1e3
        np.testing.assert_allclose(drawn["lru"], expected)

    def test_the_band_is_ten_percent(self):
        from oled_sim.plotting.parity import draw_parity

        (axes,) = draw_parity(self.table(["lru", "oled"])).axes
        corners = axes.collections[0].get_paths()[0].vertices
        shares = np.unique((corners[:, 1] / corners[:, 0]).round(6))
        assert shares.tolist() == [0.9, 1.1]

    def test_more_policies_than_colours_look_different(self):
        from oled_sim.plotting.parity import draw_parity

        names = [f"p{i}" for i in range(13)]
        (axes,) = draw_parity(self.table(names)).axes
        lines = [c.lines[0] for c in axes.containers]
        looks = {(x.get_color(), x.get_marker(), x.get_markerfacecolor()) for x in lines}
        assert len(looks) == 13
