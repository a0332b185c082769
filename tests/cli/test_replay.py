"""``oled-sim replay``, end to end on the CPU, and what it writes held against the simulator."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from oled_sim.cli.main import main
from oled_sim.costs.store import save_profile
from oled_sim.costs.synthetic import Affine, affine_profile
from oled_sim.geometry import CostGeometry, RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.validation.measured import read_point

pytest.importorskip("torch", reason="replaying runs real kernels, which need torch")

COST = CostGeometry("small", 64, 96, 32, 3, 1, 16, 4, 1, 4, 2, 16, 128, 4)
ROUTING = RoutingGeometry((1, 2), 16, 4)


def run(*arguments):
    """Run in a process of its own: the number of threads of torch's pool is set once."""
    code = "import sys; from oled_sim.cli.main import main; main(sys.argv[1:])"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=env
    )


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return stop.value.code, error


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a trace, a geometry and a profile for it."""
    folder = tmp_path_factory.mktemp("replay")
    rng = np.random.default_rng(1)
    requests = [
        random_request(rng, ROUTING, request=n, passes=9, tokens=4, prompt=6) for n in range(3)
    ]
    write_trace(folder / "trace", requests, ROUTING)
    sizes = {f: getattr(COST, f) for f in COST.__dataclass_fields__ if f != "name"}
    (folder / "small.toml").write_text("".join(f"{k} = {v}\n" for k, v in sizes.items()))
    save_profile(affine_profile(COST, Affine(workers=1)), folder / "profile.toml")
    fast = Affine(workers=1, cpu_fixed_us=0.0, cpu_per_expert_us=0.01, cpu_per_token_us=0.0)
    save_profile(affine_profile(COST, fast), folder / "fast.toml")
    return folder


def asked(home, *more):
    return [
        "replay", "--trace", home / "trace", "--geometry", home / "small.toml", "--profile",
        home / "profile.toml", "--device", "cpu", "--allow-other-hardware", "--extrapolate",
        *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def replayed(home):
    return run(
        *asked(
            home, "--policy", "lru", "--policy", "oled", "--cache", "5", "--passes", "4",
            "--repetitions", "2", "--staging", "2", "--verify", "--json", "--out", home / "points",
        )
    )  # fmt: skip


def test_points_are_measured_and_lossless(replayed):
    assert replayed.returncode == 0, replayed.stderr
    points = json.loads(replayed.stdout)["points"]
    assert [p["policy"] for p in points] == ["lru", "oled"]
    for point in points:
        assert point["repetitions"] == 2 and point["decode_passes"] == 4
        assert point["pass_us"] > 0 and point["decide_us"] > 0
        assert 0 < point["hit_rate"] < 1
        assert point["lossless"]["events_checked"] == 2 * 2 * 5  # layers, repetitions, passes
        assert point["lossless"]["worst_relative_error"] <= 1e-5


def test_the_simulator_decides_alike(replayed, home):
    assert replayed.returncode == 0, replayed.stderr
    found = run(
        "validate", home / "points", "--profile", home / "profile.toml",
        "--allow-other-hardware", "--json",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    target = next(t for t in report["targets"] if t["name"].startswith("decisions, demand-only"))
    assert target["met"] is True


@pytest.mark.slow
def test_repetitions_wait_for_a_machine_slower_than_its_profile(home):
    """Of a profile that no machine is as fast as: until patience ends, which all of them share."""
    done = run(
        *asked(home, "--profile", home / "fast.toml"), "--policy", "lru", "--cache", "5",
        "--passes", "1", "--repetitions", "2", "--patience", "0.2", "--out", home / "waited",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (about,) = (json.loads(p.read_text()) for p in (home / "waited").glob("*/point.json"))
    first, second = (speed["waited_s"] for speed in about["speeds"])
    assert 0.2 <= first < 3.0
    assert second == 0.0


@pytest.mark.slow
def test_what_is_there_is_not_run_again(replayed, home):
    assert replayed.returncode == 0, replayed.stderr
    before = {p: p.stat().st_mtime_ns for p in (home / "points").rglob("*") if p.is_file()}
    again = run(
        *asked(
            home, "--policy", "lru", "--policy", "oled", "--cache", "5", "--passes", "4",
            "--repetitions", "2", "--staging", "2", "--out", home / "points",
        )
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "2 of 2 points are in" in again.stderr
    assert "lossless" in again.stdout
    after = {p: p.stat().st_mtime_ns for p in (home / "points").rglob("*") if p.is_file()}
    assert after == before


@pytest.fixture(scope="module")
def begun(home):
    """One repetition of lru, to which others can be added."""
    done = run(*begun_by(home, "--repetitions", "1", "--out", home / "begun"))
    assert done.returncode == 0, done.stderr
    return home / "begun" / "lru-c5-trace-r2"


def begun_by(home, *more):
    return asked(home, "--policy", "lru", "--cache", "5", "--passes", "2", "--staging", "2", *more)


def test_repetitions_are_added_to_those_that_are_there(home, begun, tmp_path):
    shutil.copytree(begun, tmp_path / begun.name)
    first = read_point(begun)
    more = ("--policy", "oled", "--repetitions", "2", "--out", tmp_path)
    done = run(*begun_by(home, *more))
    assert done.returncode == 0, done.stderr
    assert "Note: repetitions are added to 1 of 2 points in" in done.stderr
    both = read_point(tmp_path / begun.name)
    assert both.about.repetitions == 2 and len(both.about.speeds) == 2
    assert both.passes.slice(0, len(first.passes)).equals(first.passes)
    assert both.passes["repetition"].to_pylist() == [0] * 3 + [1] * 3
    assert both.about.lossless.events_checked >= first.about.lossless.events_checked
    assert read_point(tmp_path / "oled-c5-trace-r2").about.repetitions == 2


@pytest.mark.parametrize(
    ("more", "finished", "says"),
    [
        ((), 0, "no repetition was finished, {out} is as it was"),
        ((), 1, "2 of 4 repetitions are in {out}; the same command goes on from there"),
        (
            ("--force",), 1,
            "1 of 4 repetitions in {out} are new, points that it did not come to are as they were",
        ),
    ],
)  # fmt: skip
def test_a_run_that_is_stopped_says_what_is_kept(
    capsys, monkeypatch, home, begun, tmp_path, more, finished, says
):
    shutil.copytree(begun, tmp_path / begun.name)

    def run_tasks(_, tasks, **__):
        for task in tasks[:finished]:
            yield read_point(begun)._replace(about=task.about)
        raise KeyboardInterrupt

    monkeypatch.setattr("oled_sim.hardware.replay_job.run_tasks", run_tasks)
    points = ("--policy", "oled", "--repetitions", "2", "--out", tmp_path)
    code, error = refused(capsys, *begun_by(home, *points, *more))
    assert code == 130
    assert error.splitlines()[-1] == f"Error: replay stopped: {says.format(out=tmp_path)}"


@pytest.fixture
def sigterm():
    """SIGTERM as it was before: a command that it stopped goes on ignoring it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def stop(number):
    os.kill(os.getpid(), number)
    time.sleep(60)  # the signal ends it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_when_all_is_measured_ends_as_others_do(
    capsys, monkeypatch, sigterm, home, begun, tmp_path, number
):
    def run_tasks(_, tasks, **__):
        for task in tasks:
            yield read_point(begun)._replace(about=task.about)
        stop(number)  # as where memory is given back

    monkeypatch.setattr("oled_sim.hardware.replay_job.run_tasks", run_tasks)
    points = ("--policy", "oled", "--repetitions", "1", "--out", tmp_path)
    main([str(a) for a in begun_by(home, *points)])
    said = capsys.readouterr()
    assert "lru" in said.out and "oled" in said.out and "stopped" not in said.err


@pytest.mark.parametrize(("more", "again"), [((), ""), (("--force",), " without --force")])
def test_a_run_that_is_stopped_while_it_prints_says_that_all_is_measured(
    capsys, monkeypatch, home, begun, tmp_path, more, again
):
    def run_tasks(_, tasks, **__):
        for task in tasks:
            yield read_point(begun)._replace(about=task.about)

    monkeypatch.setattr("oled_sim.hardware.replay_job.run_tasks", run_tasks)
    monkeypatch.setattr("oled_sim.cli.replay_table.print_points", lambda *_: stop(signal.SIGINT))
    points = ("--repetitions", "1", "--out", tmp_path)
    code, error = refused(capsys, *begun_by(home, *points, *more))
    kept = f"all repetitions are in {tmp_path}; the same command{again} shows them"
    assert (code, error.splitlines()[-1]) == (130, f"Error: replay stopped: {kept}")


def test_fewer_repetitions_than_are_there_are_enough(capsys, replayed, home):
    assert replayed.returncode == 0, replayed.stderr
    main([str(a) for a in repeated(home, "--repetitions", "1")])
    said = capsys.readouterr()
    assert "1 of 1 points are in" in said.err and "2 repetitions each" in said.out


def test_a_point_begun_on_another_machine_is_not_gone_on_with(capsys, home, begun, tmp_path):
    shutil.copytree(begun, tmp_path / begun.name)
    path = tmp_path / begun.name / "point.json"
    about = json.loads(path.read_text())
    about["machine"]["identity"] = "another"
    path.write_text(json.dumps(about))
    code, error = refused(capsys, *begun_by(home, "--repetitions", "2", "--out", tmp_path))
    assert code == 2 and "was measured with machine another, not" in error
    main([str(a) for a in begun_by(home, "--repetitions", "1", "--out", tmp_path)])
    assert "1 of 1 points are in" in capsys.readouterr().err


POLICY = """
from dataclasses import dataclass
import numpy as np
from oled_sim.policy import Policy

@dataclass
class Mine(Policy):
    def score(self, layer, event):
        return np.{}(16)
"""


@pytest.mark.slow
def test_a_point_is_of_one_content_of_a_policy_file(capsys, home, tmp_path):
    mine = tmp_path / "mine.py"
    arguments = [a if a != "lru" else mine for a in begun_by(home, "--out", tmp_path / "points")]
    mine.write_text(POLICY.format("zeros"))
    done = run(*arguments, "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "points").iterdir()
    used = read_point(folder).about.policy
    assert used.file_sha256 == hashlib.sha256(mine.read_bytes()).hexdigest()
    mine.write_text(POLICY.format("ones"))
    changed = hashlib.sha256(mine.read_bytes()).hexdigest()
    for repetitions in ("1", "2"):
        code, error = refused(capsys, *arguments, "--repetitions", repetitions)
        assert code == 2
        assert f"mine.py of checksum {used.file_sha256[:12]}, not {changed[:12]}: give" in error
    validated = ("validate", tmp_path / "points", "--profile", home / "profile.toml")
    code, error = refused(capsys, *validated, "--allow-other-hardware")
    assert code == 2 and error.count("\n") == 1
    assert "mine.py' has changed since" in error and f"checksum {used.file_sha256[:12]}" in error
    mine.write_text(POLICY.format("zeros"))
    main([str(a) for a in (*validated, "--allow-other-hardware")])


def test_a_clairvoyant_policy_is_refused(capsys, home, tmp_path):
    code, error = refused(
        capsys, *asked(home, "--policy", "belady", "--cache", "5", "--out", tmp_path / "x")
    )
    assert code == 2 and "looks into the future" in error
    assert not (tmp_path / "x").exists()


def test_a_geometry_that_does_not_fit_is_refused(capsys, home, tmp_path):
    code, error = refused(
        capsys, "replay", "--trace", home / "trace", "--policy", "lru", "--cache", "5",
        "--geometry", "llada2.0-mini", "--device", "cpu", "--allow-other-hardware", "--out",
        tmp_path / "x",
    )  # fmt: skip
    assert code == 2 and "give a --geometry that fits" in error


def test_another_machines_profile_is_refused(capsys, home, tmp_path):
    arguments = [a for a in asked(home) if a != "--allow-other-hardware"]
    code, error = refused(
        capsys, *arguments, "--policy", "lru", "--cache", "5", "--out", tmp_path / "x"
    )
    assert code == 1 and "measured on other hardware" in error


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--requests", "9"], "not 9: lower --requests, or take a trace with more"),
        (["--patience", "nan"], "Invalid value for '--patience': nan is not a number"),
        (["--patience", "inf", "--requests", "9"], "not 9"),  # without end: accepted
        (["--cache", "5", "--policy", "nobody"], "nobody"),
    ],
)
def test_mistakes_get_a_sentence(capsys, home, tmp_path, more, says):
    code, error = refused(
        capsys, *asked(home, "--policy", "lru", "--cache", "5", *more, "--out", tmp_path / "x")
    )
    assert code == 2 and says in error


def test_a_folder_that_cannot_be_made_is_refused(capsys, home, tmp_path):
    code, error = refused(
        capsys, *asked(home, "--policy", "lru", "--cache", "5", "--out", tmp_path / "no" / "x")
    )
    assert code == 2 and "create it first" in error


def repeated(home, *more):
    """What :func:`replayed` ran of lru."""
    return asked(
        home, "--policy", "lru", "--cache", "5", "--passes", "4", "--repetitions", "2",
        "--staging", "2", "--out", home / "points", *more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--passes", "3"], "--passes 4, not 3"),
        (["--passes", "0"], "--passes 4, not 0"),
        (["--scope", "global"], "--scope layer, not global"),
        (["--staging", "3"], "--staging 2, not 3"),
        (["--layers", "1"], "--layers (all), not 1"),
    ],
)
def test_a_point_of_other_settings_is_no_answer(capsys, replayed, home, more, says):
    assert replayed.returncode == 0, replayed.stderr
    code, error = refused(capsys, *repeated(home, *more))
    assert code == 2 and f"lru-c5-trace-r2 was measured with {says}: give another --out" in error
    assert "--force to measure it again" in error


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("policy.file_sha256", "0" * 64, "--policy lru of checksum (none), not 000000000000"),
        ("policy.parameters.dispatch", "cpu", "--policy lru with dispatch transfer, not cpu"),
        ("rules.extrapolate", False, "--extrapolate on, not off"),
        ("geometry.name", "big", "--geometry small, not big"),
        ("geometry.top_k", 3, "--geometry small with top_k 4, not 3"),
        ("profile.name", "h200", "--profile synthetic-small, not h200"),
        ("profile.sha256", "0" * 64, "--profile synthetic-small of checksum"),
        ("trace.name", "other/trace", "/trace, not other/trace"),
        ("trace.sha256", "0" * 64, "/trace of checksum"),
        ("history", [5], "history requests (none), not 5"),
        ("machine.hardware.workers", 2, "--workers 1, not 2"),
        ("machine.hardware.gpu", "H200", "GPU none (CPU threads), not H200"),
    ],
)
def test_the_setting_that_differs_is_named(replayed, home, path, value, says):
    assert replayed.returncode == 0, replayed.stderr
    from oled_sim.cli.replay_settings import difference
    from oled_sim.validation.measured import About

    text = (home / "points" / "lru-c5-trace-r2" / "point.json").read_text()
    there, wanted = json.loads(text), json.loads(text)
    *parents, last = path.split(".")
    part = wanted
    for name in parents:
        part = part[name]
    part[last] = value
    found, other = (msgspec.convert(about, About) for about in (there, wanted))
    assert difference(found, found) is None
    assert says in (difference(found, other) or "")


def test_verify_refuses_a_point_that_was_checked_less(capsys, replayed, home):
    assert replayed.returncode == 0, replayed.stderr
    main([str(a) for a in repeated(home, "--verify")])  # was run with --verify
    assert "1 of 1 points are in" in capsys.readouterr().err
    folder = home / "less" / "lru-c5-trace-r2"
    shutil.copytree(home / "points" / "lru-c5-trace-r2", folder)
    about = json.loads((folder / "point.json").read_text())
    about["lossless"]["events_checked"] = 19
    (folder / "point.json").write_text(json.dumps(about))
    main([str(a) for a in repeated(home, "--out", home / "less")])
    capsys.readouterr()
    code, error = refused(capsys, *repeated(home, "--out", home / "less", "--verify"))
    assert code == 2 and "19 of 20 events compared with full residency, and what has run" in error
    assert "leave out --verify, give another --out, or --force to measure it again" in error


def test_verify_adds_no_repetitions_to_one_that_was_not_verified(capsys, home, begun, tmp_path):
    shutil.copytree(begun, tmp_path / begun.name)
    more = ("--repetitions", "2", "--out", tmp_path, "--verify")
    code, error = refused(capsys, *begun_by(home, *more))
    assert code == 2 and " of 6 events compared with full residency, and what has run" in error
    assert read_point(tmp_path / begun.name).about.repetitions == 1


def test_the_share_of_events_that_were_checked_is_shown(capsys, replayed, home):
    """One verified repetition, and another of which nothing was checked."""
    assert replayed.returncode == 0, replayed.stderr
    assert [p["lossless"]["events"] for p in json.loads(replayed.stdout)["points"]] == [20, 20]
    folder = home / "half" / "lru-c5-trace-r2"
    shutil.copytree(home / "points" / "lru-c5-trace-r2", folder)
    about = json.loads((folder / "point.json").read_text())
    about["lossless"] |= {"events_checked": 10, "worst_relative_error": 1.5e-6}
    (folder / "point.json").write_text(json.dumps(about))
    main([str(a) for a in repeated(home, "--out", home / "half")])
    assert "1.5e-06 (50%)" in capsys.readouterr().out


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_a_file_in_place_of_a_points_folder_is_found_before_the_run(
    capsys, monkeypatch, home, tmp_path, more
):
    def run_tasks(*_, **__):
        raise AssertionError("nothing is to run")

    monkeypatch.setattr("oled_sim.hardware.replay_job.run_tasks", run_tasks)
    place = tmp_path / "lru-c5-trace-r2"
    place.write_text("mine")
    code, error = refused(capsys, *begun_by(home, "--out", tmp_path, *more))
    assert code == 2 and f"{place} is a file in the place of a point's folder: remove it" in error
    assert place.read_text() == "mine" and [*tmp_path.iterdir()] == [place]


@pytest.mark.parametrize("where", [".", "lru-c5-trace-r2"])
def test_a_link_that_leads_nowhere_is_found_before_the_run(
    capsys, monkeypatch, home, tmp_path, where
):
    def run_tasks(*_, **__):
        raise AssertionError("nothing is to run")

    monkeypatch.setattr("oled_sim.hardware.replay_job.run_tasks", run_tasks)
    place = tmp_path / "points" / where
    place.parent.mkdir(exist_ok=True)
    place.symlink_to("nowhere")
    code, error = refused(capsys, *begun_by(home, "--out", tmp_path / "points"))
    assert code == 2 and f"{place} is a symbolic link that leads nowhere" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_points_folder_that_may_not_be_written_to_is_found_before_the_run(
    capsys, home, begun, tmp_path
):
    place = shutil.copytree(begun, tmp_path / begun.name)
    place.chmod(0o500)
    code, error = refused(capsys, *begun_by(home, "--repetitions", "2", "--out", tmp_path))
    place.chmod(0o700)
    assert code == 2 and f"{place} may not be written to" in error


def test_a_damaged_table_can_be_measured_again(capsys, replayed, home):
    assert replayed.returncode == 0, replayed.stderr
    folder = home / "damaged" / "lru-c5-trace-r2"
    shutil.copytree(home / "points" / "lru-c5-trace-r2", folder)
    (folder / "events.parquet").write_bytes(b"no table")
    code, error = refused(capsys, *repeated(home, "--out", home / "damaged"))
    assert code == 1 and "events.parquet does not match its checksum" in error
    assert "give --force to measure it again" in error


def test_mistakes_are_found_before_torch_is_imported(home, tmp_path):
    code = (
        "import json, sys\nfrom oled_sim.cli.main import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    try:\n        main(arguments)\n    except SystemExit as stop:\n"
        "        print(bool(stop.code), 'torch' in sys.modules)"
    )
    base = ["--policy", "lru", "--cache", "5", "--out", tmp_path / "x"]
    mistakes = [
        ["--policy", "nobody"], ["--policy", "belady"], ["--cache", "many"], ["--trace", "none"],
        ["--profile", "none"], ["--workers", "9999"], ["--out", tmp_path / "no" / "x"],
    ]  # fmt: skip
    calls = [[str(a) for a in asked(home, *base, *more)] for more in mistakes]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(calls)], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["True False"] * len(mistakes), done.stderr


def test_refusals_leave_no_folder(capsys, home, tmp_path):
    code, _ = refused(
        capsys,
        *asked(home, "--policy", "lru", "--cache", "5", "--requests", "9", "--out", tmp_path / "x"),
    )
    assert code == 2 and list(tmp_path.iterdir()) == []
    code, error = refused(
        capsys, *asked(home, "--policy", "lru", "--cache", "5", "--out", "/proc/x")
    )
    assert code == 2 and "cannot write /proc/x: /proc takes no new files" in error


def test_a_cache_larger_than_a_layer_is_pointed_out(capsys, home, tmp_path):
    _, error = refused(
        capsys,
        *asked(
            home, "--policy", "lru", "--cache", "500", "--requests", "9", "--out", tmp_path / "x"
        ),
    )
    assert "--cache 500 exceeds a layer's 16 experts: all are resident" in error


def test_a_damaged_point_can_be_measured_again(capsys, home, tmp_path):
    folder = tmp_path / "points" / "lru-c5-trace-r2"
    folder.mkdir(parents=True)
    (folder / "point.json").write_text("{")
    code, error = refused(
        capsys, *asked(home, "--policy", "lru", "--cache", "5", "--out", tmp_path / "points")
    )
    assert code == 1 and "point.json breaks the format" in error
    assert "give --force to measure it again" in error


def test_more_workers_than_cores_are_refused(capsys, home, tmp_path):
    code, error = refused(
        capsys,
        *asked(home, "--policy", "lru", "--cache", "5", "--workers", "9999", "--out",
               tmp_path / "x"),
    )  # fmt: skip
    assert code == 2 and "exceeds this machine's" in error
