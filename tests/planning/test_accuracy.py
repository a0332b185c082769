"""What a validation says about a plan's predictions."""

import json

import msgspec
import pandas as pd
import pytest

from oled_sim.costs.store import load_profile
from oled_sim.costs.synthetic import affine_profile
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.geometry import find_geometry
from oled_sim.planning import accuracy
from oled_sim.planning.accuracy import find_accuracy

MINI = find_geometry("llada2.0-mini")
MEASURED = msgspec.structs.replace(affine_profile(MINI), status="measured")


def validation(folder, errors, gpu=MEASURED.hardware.gpu, model=MINI.name):
    folder.mkdir(parents=True)
    summary = {
        "machine": {"hardware": {"gpu": gpu}},
        "geometry": {"name": model},
        "profile": {"name": "p"},
        "points": [{}] * sum(map(len, errors.values())),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [(policy, e) for policy, values in errors.items() for e in values]
    pd.DataFrame(rows, columns=["policy", "error"]).to_parquet(folder / "points.parquet")


def test_a_policy_gets_its_own_points_and_others_all(tmp_path):
    validation(tmp_path / "validation-a", {"lru": [-0.2, 0.0], "oled": [0.1]})
    found = find_accuracy(MEASURED, ["lru", "new"], tmp_path)
    assert (found["lru"].points, found["lru"].policy) == (2, "lru")
    assert found["lru"].worst == pytest.approx(0.2)
    assert found["lru"].bias == pytest.approx(-0.1)
    assert found["lru"].margin == pytest.approx(1.0 + 0.9 * (1 / 0.8 - 1.0))
    assert (found["new"].points, found["new"].policy) == (3, None)


def test_the_newest_of_the_same_machine_and_model_counts(tmp_path):
    validation(tmp_path / "validation-1", {"lru": [0.1]})
    validation(tmp_path / "validation-2", {"lru": [0.2]})
    validation(tmp_path / "validation-3", {"lru": [0.3]}, gpu="another")
    validation(tmp_path / "validation-4", {"lru": [0.4]}, model="llada2.0-flash")
    assert find_accuracy(MEASURED, ["lru"], tmp_path)["lru"].source == "validation-2"


def test_of_a_day_the_validation_with_the_most_points_counts(tmp_path):
    validation(tmp_path / "validation-a-2026-12-01", {"lru": [0.1, 0.1]})
    validation(tmp_path / "validation-b-2026-12-01", {"lru": [0.2]})
    validation(tmp_path / "validation-c-2026-11-30", {"lru": [0.3, 0.3, 0.3]})
    assert find_accuracy(MEASURED, ["lru"], tmp_path)["lru"].source == "validation-a-2026-12-01"


def test_what_was_not_measured_has_no_accuracy(tmp_path):
    validation(tmp_path / "validation-1", {"lru": [0.1]})
    assert find_accuracy(affine_profile(MINI), ["lru"], tmp_path) == {}


def test_no_validation_is_an_error_only_where_one_was_named(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "results_folder", lambda: tmp_path / "nothing")
    assert find_accuracy(MEASURED, ["lru"]) == {}
    with pytest.raises(UsageError, match="holds no results of a validation"):
        find_accuracy(MEASURED, ["lru"], tmp_path)


def test_a_damaged_validation_is_said(tmp_path):
    validation(tmp_path / "validation-1", {"lru": [0.1]})
    (tmp_path / "validation-1" / "points.parquet").unlink()
    with pytest.raises(MeasurementError, match="validation-1"):
        find_accuracy(MEASURED, ["lru"], tmp_path)


def test_the_bundled_profile_has_a_validation_in_a_checkout():
    found = find_accuracy(load_profile("h200-llada2.0-mini"), ["oled"])
    assert found["oled"].policy == "oled"
    assert found["oled"].points > 0
