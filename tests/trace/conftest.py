import numpy as np
import pytest

from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace.schema import SIGNALS

GEOMETRY = RoutingGeometry((1, 2, 5), 12, 3)


@pytest.fixture
def geometry():
    return GEOMETRY


@pytest.fixture
def small_trace(tmp_path, geometry):
    """A trace of two requests with every signal: 3 layers (1, 2, 5), 12 experts, top-3."""
    rng = np.random.default_rng(7)
    requests = [
        random_request(rng, geometry, request=i, passes=8, prompt=5, signals=SIGNALS)
        for i in range(2)
    ]
    return write_trace(tmp_path / "trace", requests, geometry, signals=SIGNALS)
