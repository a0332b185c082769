"""Experiments by name: entry points, ``module:attr``, or a file."""

from __future__ import annotations

from oled_sim import plugins
from oled_sim.errors import UsageError
from oled_sim.experiment.base import Experiment


def experiment_names() -> list[str]:
    """Return the registered names, figures in the order of the paper."""
    return plugins.names(plugins.EXPERIMENTS)


def load_experiment(name: str) -> Experiment:
    """Return an experiment.

    Args:
        name: a registered one, ``package.module:attr``, or ``./file.py:attr``.

    Raises:
        UsageError: none by that name, or it is no experiment.
    """
    found = plugins.load(plugins.EXPERIMENTS, name)
    if not isinstance(found, Experiment):
        raise UsageError(f"{name} is no experiment but a {type(found).__name__}")
    return found
