import os

# Test processes share cores; spinning OpenMP threads would starve each other (set before torch).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
