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
    """The call itself is wrong, and another call is what mends it.

    An unknown name, an impossible value, a contradiction; a path where nothing is or something of
    another kind; an output that is there already or cannot be written.
    """

    exit_code = 2


class StoppedError(OledSimError):
    """Ctrl-C or a signal stopped what was under way; the sentence says what is kept of it."""

    exit_code = 130


class FileError(OledSimError):
    """A file of the user's (prompts, policies, sizes, code) is damaged or holds something else."""


class TraceError(OledSimError):
    """A trace is damaged, of another version, lacks a signal, or could not be written."""


class ProfileError(OledSimError):
    """A hardware profile is damaged, or does not cover what is asked of it."""


class CheckpointError(OledSimError):
    """A model checkpoint is incomplete, damaged, or does not match its configuration."""


class PluginError(OledSimError):
    """A plug-in does not import, or its file holds something else."""


class PolicyError(OledSimError):
    """A policy broke the contract of :mod:`oled_sim.policy`, or raised."""


class CapacityError(OledSimError):
    """The machine has not enough memory (GPU or host) for what was asked."""


class MeasurementError(OledSimError):
    """A measured point is missing, damaged, or of another trace, profile or machine."""
