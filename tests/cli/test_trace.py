"""`oled-sim trace` from the outside."""

import json
import subprocess
import sys

import numpy as np
import pytest
from commands import oled_sim, oled_sim_process

from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_manifest, random_request, write_trace
from oled_sim.trace.manifest import Prompts

GEOMETRY = RoutingGeometry((1, 2, 5), 12, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    rng = np.random.default_rng(0)
    requests = [random_request(rng, GEOMETRY, request=i, passes=20) for i in range(3)]
    manifest = random_manifest(GEOMETRY, prompts=Prompts(source="a [bold]set[/bold]"))
    folder = tmp_path_factory.mktemp("cli") / "my-trace"
    return write_trace(folder, requests, GEOMETRY, manifest=manifest).path


def test_info_prints_tables_for_people(path):
    result = oled_sim("trace", "info", path)
    assert result.returncode == 0
    assert result.stderr == ""
    for text in (
        "3 MoE layers (1..5), 12 experts, top-3",
        "synthetic, recorded by oled_sim.testing",
        "rule 2.0, block length 4",
        "Activated experts of 12",
        "█",
        "expert set kept across a block boundary",
        "just accepted",
        "a [bold]set[/bold]",
    ):
        assert text in result.stdout


def test_info_prints_json_for_programs(path):
    result = oled_sim_process("trace", "info", path, "--json")
    found = json.loads(result.stdout)
    statistics = found["statistics"]
    assert found["manifest"]["model"]["layers"] == [1, 2, 5]
    assert len(found["manifest"]["requests"]) == 3
    assert sum(statistics["passes"].values()) == 60
    assert set(statistics["activated"]) == {"1", "2", "5"}
    assert 0 <= statistics["adjacent_overlap"] <= 1
    assert statistics["stability"]["masked"]["transitions"] > 0
    assert found["size_bytes"] == sum(p.stat().st_size for p in path.glob("*/*.parquet"))


def test_validate_accepts_a_whole_trace(path):
    result = oled_sim("trace", "validate", path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "3 requests" in result.stdout
    assert "no problem" in result.stdout


def test_validate_lists_every_damaged_request(path, tmp_path):
    import shutil

    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    (damaged / "tokens" / "00000.parquet").unlink()
    file = damaged / "routing" / "00002.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    result = oled_sim("trace", "validate", damaged)
    assert result.returncode == 1
    first, second = result.stdout.splitlines()
    assert "tokens/00000.parquet is missing" in first
    assert "routing/00002.parquet does not match its checksum" in second
    assert result.stderr == f"Error: {damaged}: 2 of 3 requests damaged\n"
    report = json.loads(oled_sim("trace", "validate", damaged, "--json").stdout)
    assert report["ok"] is False
    assert len(report["problems"]) == 2


@pytest.mark.parametrize("command", ["info", "validate"])
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("nowhere", 2, "no trace 'nowhere'"), ("file", 2, "is a file"), ("empty", 2, "no manifest")],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path, command, name, code, message):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    result = oled_sim("trace", command, name, cwd=tmp_path)
    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_help_shows_examples():
    for command in ("info", "validate"):
        result = oled_sim("trace", command, "--help")
        assert f"oled-sim trace {command} my-trace" in result.stdout


def test_output_may_be_cut_short(path):
    """`oled-sim trace info ... | head -1` ends without a traceback."""
    command = f"{sys.executable} -m oled_sim trace info {path} | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
