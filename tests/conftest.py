import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Test processes share cores; spinning OpenMP threads would starve each other (set before torch).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A busy machine is no failure. In CI the examples are the same in every run.
slow = [HealthCheck.too_slow]
settings.register_profile("default", deadline=None, suppress_health_check=slow)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
QUICK = "not slow"

TESTS = Path(__file__).parent
FIRST = (
    "engine/test_golden_results.py",
    "synthesis",
    "training",
    "model",
    "trace",
    "collectors",
)
"""Files and folders whose tests come first, in this order."""


def pytest_configure(config):
    """Try properties on a quarter of their examples where slow tests are left out."""
    if config.getoption("markexpr") == QUICK:
        settings.register_profile("quick", settings(), max_examples=25)
        settings.load_profile("quick")


def pytest_collection_modifyitems(items):
    """Have every kernel compiled by one process of the session, and by none twice.

    The golden results run every policy. While the first process compiles the engine for them, the
    second has a minute or two of tests that need other kernels or none, and then finds all on disk.
    """

    def place(item):
        path = item.path.relative_to(TESTS)
        return next((n for n, name in enumerate(FIRST) if path.is_relative_to(name)), len(FIRST))

    items.sort(key=place)
