"""One small trace and a few simulated points for all tests of validation."""

import pytest
from measured_points import made_trace, simulated_point


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    return made_trace(tmp_path_factory.mktemp("validation") / "gsm")


@pytest.fixture(scope="session")
def lru(trace):
    """Two repetitions that took exactly as long as predicted."""
    return simulated_point(trace, "lru", 4, factors=(1.0, 1.0))


@pytest.fixture(scope="session")
def prefetching(trace):
    return simulated_point(trace, "moe-infinity", 4, factors=(1.0,))
