from __future__ import annotations

import pytest

from oled_sim.costs.profile import Profile
from oled_sim.costs.synthetic import Affine, affine_profile
from oled_sim.geometry import GEOMETRIES, CostGeometry


@pytest.fixture(scope="session")
def mini() -> CostGeometry:
    return GEOMETRIES["llada2.0-mini"]


@pytest.fixture(scope="session")
def affine(mini: CostGeometry) -> Profile:
    return affine_profile(
        mini,
        Affine(
            h2d_fixed_us=8.0,
            h2d_gb_s=50.0,
            gpu_fixed_us=90.0,
            gpu_per_expert_us=2.0,
            gpu_per_token_us=0.25,
            cpu_per_expert_us=100.0,
            dense_us=100.0,
            dense_per_token_us=0.5,
            dense_per_context_us=0.0625,
            attention_per_request_us=3.0,
            attention_per_key_us=0.03125,
        ),
    )
