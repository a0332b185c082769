"""What the scripts behind the bundled mini traces decide: thresholds, prompts, rounding."""

import importlib.util
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace import open_trace

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


record, bundle = script("record_mini"), script("bundle_trace")


def test_rounded_gates_sum_to_one_by_hand():
    # In eighths: 3.6, 2.4, 2.0 -> 3, 2, 2 and one missing, which goes to the largest remainder.
    gates = np.array([[0.45, 0.30, 0.25]], np.float16)
    assert bundle.round_to_unit(gates, 8).tolist() == [[4 / 8, 2 / 8, 2 / 8]]
    # Equal remainders: 2.5, 2.5, 3.0 -> the earlier slot.
    gates = np.array([[0.3125, 0.3125, 0.375]], np.float16)
    assert bundle.round_to_unit(gates, 8).tolist() == [[3 / 8, 2 / 8, 3 / 8]]


@given(st.lists(st.floats(0.01, 1.0), min_size=8, max_size=8), st.sampled_from([128, 256, 512]))
def test_rounding_keeps_sum_order_and_size(scores, unit):
    row = np.sort(np.array(scores))[::-1] / np.sum(scores)
    gates = row[None].astype(np.float16)
    rounded = bundle.round_to_unit(gates, unit)
    assert rounded.sum(dtype=np.float64) == 1.0
    assert (np.diff(rounded[0].astype(np.float64)) <= 0).all()
    exact = gates.astype(np.float64) / gates.sum(dtype=np.float64)
    assert np.abs(rounded - exact).max() < 1 / unit


def test_mantissa_bits_by_hand():
    # 0.3 = 1.2 · 2^-2; with 2 stored bits the steps are 0.25: 1.25 · 2^-2 = 0.3125.
    values = np.array([0.3, 0.25, 0.0], np.float16)
    assert bundle.round_mantissa(values, 2).tolist() == [0.3125, 0.25, 0.0]


def test_a_bundled_copy_is_a_shorter_trace_that_says_so(tmp_path, monkeypatch):
    geometry = RoutingGeometry((1, 2, 5), 12, 3)
    rng = np.random.default_rng(0)
    requests = [random_request(rng, geometry, request=n) for n in range(3)]
    write_trace(tmp_path / "full", requests, geometry)
    command = ["bundle_trace", str(tmp_path / "full"), str(tmp_path / "small"), "--requests", "2"]
    monkeypatch.setattr("sys.argv", command)
    bundle.main()
    small, full = open_trace(tmp_path / "small"), open_trace(tmp_path / "full")
    assert small.requests == full.requests[:2]
    assert "first 2 of 3" in small.manifest.notes
    for one, other in zip(small, full, strict=False):
        np.testing.assert_array_equal(np.sort(one.experts, 1), np.sort(other.experts, 1))
        np.testing.assert_array_equal(one.confidence, other.confidence)


@pytest.mark.parametrize(
    ("measured", "threshold"),
    [
        ({0.3: 4.5, 0.5: 2.9, 0.7: 2.4}, 0.5),
        ({0.3: 4.5, 0.5: 2.5, 0.7: 2.5}, 0.7),
        ({0.3: 1.2, 0.5: 1.0, 0.7: 1.0}, 0.3),
    ],
)
def test_the_highest_threshold_with_enough_tokens_is_taken(measured, threshold):
    assert record.pick(measured) == threshold


def test_a_recording_that_failed_accepts_nothing(tmp_path):
    (tmp_path / "good.json").write_text(json.dumps({"tokens_per_denoise_pass": 2.5}))
    (tmp_path / "bad.json").write_text("Error")
    assert record.tokens_per_pass(tmp_path / "good.json") == 2.5
    assert record.tokens_per_pass(tmp_path / "bad.json") == 0.0
    assert record.tokens_per_pass(tmp_path / "none.json") == 0.0


def test_science_prompts_take_turns_among_subjects():
    rows = [
        {"type": s, "question": f"{s} {n}?", "choices": ["1", "2", "3", "4"]}
        for s in ("abstract_algebra", *reversed(record.SUBJECTS))
        for n in range(2)
    ]
    found = list(record.science_rows(rows))
    subjects = [rows[r["mmlu_stem_row"]]["type"] for r in found]
    assert subjects == [*record.SUBJECTS] * 2
    assert found[0]["question"] == "college_physics 0?\n(A) 1 (B) 2 (C) 3 (D) 4"


def test_pieces_join_to_the_traces(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "PIECE_BYTES", 4096)
    trace = tmp_path / "traces" / "one"
    trace.mkdir(parents=True)
    (trace / "data").write_bytes(bytes(range(256)) * 40)
    record.pack(tmp_path / "traces", ["one", "absent"], tmp_path / "t.tar")
    pieces = sorted(tmp_path.glob("t.tar.*"))
    assert len(pieces) > 2
    (tmp_path / "joined.tar").write_bytes(b"".join(p.read_bytes() for p in pieces))
    with tarfile.open(tmp_path / "joined.tar") as tar:
        member = tar.extractfile("one/data")
        assert member is not None
        assert member.read() == bytes(range(256)) * 40
