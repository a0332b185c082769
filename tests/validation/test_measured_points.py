"""Measured points as files, and requests cut short."""
