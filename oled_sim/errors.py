"""Errors that a user can act on.

Every one carries a single sentence: what is wrong, where, and what to do. The command line prints
that sentence and exits with :attr:`OledSimError.exit_code`; anything else that escapes is a bug.
"""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return type and message of any exception, without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


class OledSimError(Exception):
    """Base of all errors caused by input or environment, not by a bug of ours."""

    exit_code = 1


class UsageError(OledSimError):
    """The call itself is wrong: an unknown name, an impossible value, a contradiction."""

    exit_code = 2


class TraceError(OledSimError):
    """A trace is missing, damaged, of another version, or lacks a signal."""


class ProfileError(OledSimError):
    """A hardware profile is missing, damaged, or does not cover what is asked of it."""


class CheckpointError(OledSimError):
    """A model checkpoint is missing, damaged, or does not match its configuration."""


class PolicyError(OledSimError):
    """A policy broke the contract of :mod:`oled_sim.policy`, or raised."""


class CapacityError(OledSimError):
    """The machine has not enough memory (GPU or host) for what was asked."""


class MeasurementError(OledSimError):
    """A measured point is missing, damaged, or of another trace, profile or machine."""
