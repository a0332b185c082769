"""Collectors, one file per runtime a trace can be recorded from."""
