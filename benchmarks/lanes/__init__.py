"""Measuring the lanes of one machine: the parts behind ``measure_lanes.py``."""
