"""Executing a run on hardware: measuring its lanes, replaying traces on them (needs torch)."""
