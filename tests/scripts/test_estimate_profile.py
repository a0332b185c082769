"""The bundled estimates are what their script makes of the bundled measurements."""

from __future__ import annotations

import pytest

from benchmarks import estimate_profile
from oled_sim.costs.store import load_profile, to_toml


@pytest.mark.parametrize("geometry", list(estimate_profile.RATES))
def test_the_bundled_estimate_is_up_to_date(geometry: str):
    measured = load_profile(estimate_profile.measured_for(geometry))
    made = estimate_profile.testbed(geometry, measured)
    assert to_toml(made) == to_toml(load_profile(made.name)), (
        "run python benchmarks/estimate_profile.py"
    )
