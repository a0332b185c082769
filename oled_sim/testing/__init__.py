"""Generators and contract tests for code that builds on oled-sim."""
