"""Experiments, one file per figure or table of the paper."""
