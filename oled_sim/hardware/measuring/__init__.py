"""Measuring the lanes of one machine, for a profile (docs/cost-model.md)."""
