import os

from hypothesis import HealthCheck, settings

# Test processes share cores; spinning OpenMP threads would starve each other (set before torch).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A busy machine is no failure. In CI the examples are the same in every run.
slow = [HealthCheck.too_slow]
settings.register_profile("default", deadline=None, suppress_health_check=slow)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
