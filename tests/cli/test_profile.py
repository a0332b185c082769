"""``oled-sim profile``, end to end on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from oled_sim.cli import profile as command
from oled_sim.cli.main import cli, main
from oled_sim.cli.profile_summary import print_tables
from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.store import load_profile

torch = pytest.importorskip("torch", reason="measuring runs real kernels, which need torch")

from oled_sim.hardware.identity import NO_GPU, hardware  # noqa: E402
from oled_sim.hardware.measuring.measure import Measured  # noqa: E402

QUICK = ["profile", "--quick", "--device", "cpu", "--workers", "1"]

TINY = """\
hidden_size = 32
dense_intermediate_size = 64
moe_intermediate_size = 16
layers = 3
dense_layers = 1
experts = 16
top_k = 2
shared_experts = 1
heads = 2
kv_heads = 1
head_dim = 16
vocabulary = 64
weight_bytes = 4
"""


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
    return stop.value.code, capsys.readouterr().err


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    (folder / "tiny.toml").write_text(TINY)
    done = run(*QUICK, "--geometry", folder / "tiny.toml", "--out", folder / "here.toml", "--json")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_a_quick_run_gives_a_usable_profile(measured):
    folder, _ = measured
    profile = load_profile(folder / "here.toml")
    costs = LaneCosts(profile)
    assert (profile.name, profile.status, profile.hardware.workers) == ("here", "measured", 1)
    assert profile.geometry.name == "tiny"
    assert costs.gpu_experts_us(2, 3) > 0
    assert costs.cpu_experts_us(4, 10) > 0
    assert costs.h2d_us(profile.cost_geometry.expert_bytes) > 0
    assert costs.dense_us(8, 16) > 0
    assert costs.slowdown(0, 4) >= 1
    profile.require_hardware(hardware(torch.device("cpu"), 1))


def test_key_figures_are_those_of_the_profile(measured):
    folder, figures = measured
    profile = load_profile(folder / "here.toml")
    assert figures["out"] == str(folder / "here.toml")
    assert (figures["gpu"], figures["workers"]) == (NO_GPU, 1)
    at = profile.h2d.points.index(profile.cost_geometry.expert_bytes)
    assert figures["figures_us"]["h2d_expert"]["median"] == profile.h2d.median_us[at]
    assert figures["figures_us"]["cpu_experts_1x1"]["median"] == profile.cpu_experts.median_us[0][0]
    assert figures["interference"]["h2d"]["cpu"] == profile.interference.h2d.cpu.median
    assert figures["seconds"]["total"] > 0


def test_a_simulation_runs_on_what_was_measured(measured):
    folder, _ = measured
    done = CliRunner().invoke(
        cli,
        ["run", "--trace", "nano-gsm8k", "--requests", "1", "--policy", "lru", "--cache", "4",
         "--geometry", str(folder / "tiny.toml"), "--profile", str(folder / "here.toml"),
         "--extrapolate", "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["profile"]["name"] == "here"


def test_what_a_quick_profile_lacks_names_the_way_out(measured, capsys):
    folder, _ = measured
    code, message = refused(
        capsys, "run", "--trace", "nano-gsm8k", "--requests", "1", "--policy", "lru", "--cache",
        "4", "--geometry", folder / "tiny.toml", "--profile", folder / "here.toml",
    )  # fmt: skip
    assert code == 1 and message.count("\n") == 1
    assert "of profile 'here' covers" in message and "(--extrapolate)" in message


def test_an_existing_file_is_refused_before_measuring(capsys, measured):
    folder, _ = measured
    before = (folder / "here.toml").read_bytes()
    code, message = refused(capsys, *QUICK, "--out", folder / "here.toml")
    assert code == 2
    assert "exists" in message
    assert (folder / "here.toml").read_bytes() == before


def test_the_table_for_people_names_the_machine_and_the_file(measured, capsys):
    folder, _ = measured
    print_tables(Measured(load_profile(folder / "here.toml"), {"total": 7.0}), Path("mine.toml"))
    shown = capsys.readouterr().out
    assert shown.startswith("here: tiny on none (CPU threads)")
    assert "one expert from pinned memory" in shown
    assert "Measured in 7 s, written to mine.toml." in shown


def test_an_interrupt_leaves_no_file(monkeypatch, capsys, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("oled_sim.hardware.measuring.measure.measure_gpu_experts", interrupt)
    code, message = refused(capsys, *QUICK, "--out", tmp_path / "toy.toml")
    says = "Error: profile stopped: nothing is kept, a profile is measured in one go"
    assert (code, message.strip().splitlines()[-1]) == (130, says)
    assert list(tmp_path.iterdir()) == []


def test_without_torch_one_sentence_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "torch" else name)
    code, message = refused(capsys, *QUICK, "--out", tmp_path / "toy.toml")
    assert code == 1
    assert message == "Error: measuring needs torch: pip install 'oled-sim[torch]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "toy.txt"], "toy.toml"),
        (["--out", "toy.toml", "--geometry", "lada"], "unknown geometry 'lada'"),
        (["--out", "toy.toml", "--geometry", "none.toml"], "cannot read geometry none.toml"),
        (["--out", "toy.toml", "--device", "tpu"], "unknown device 'tpu'"),
        (["--out", "toy.toml", "--workers", "100000"], "give fewer"),
        (["--out", "toy.toml", "--block", "100000000"], "1<=x<=4096"),
        (["--out", "/proc/toy.toml"], "cannot write /proc/toy.toml: /proc takes no new files"),
    ],
)
def test_a_wrong_call_is_a_usage_error(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    if message == "toy.toml":
        message = "ends in .toml"
    code, found = refused(capsys, "profile", "--quick", *arguments)
    assert code == 2
    assert message in found
    assert list(tmp_path.iterdir()) == []


def test_help_imports_no_torch():
    code = (
        "import sys; from click.testing import CliRunner; from oled_sim.cli.main import cli;"
        "done = CliRunner().invoke(cli, ['profile', '--help']);"
        "print(done.exit_code, 'torch' in sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False", "False"]
    assert "Examples:" in CliRunner().invoke(cli, ["profile", "--help"]).output
