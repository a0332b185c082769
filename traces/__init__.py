"""Bundled traces (package data)."""
