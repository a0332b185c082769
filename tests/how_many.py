"""How many examples a property is tried on."""

from hypothesis import settings

ALL = 100
"""Examples of a property that does not ask for a number, in the whole suite."""


def examples(number: int) -> int:
    """Return ``number`` in the whole suite; of the quick tests a share of it, but ten at least.

    The share is that of the hypothesis profile (tests/conftest.py).
    """
    return min(number, max(number * settings().max_examples // ALL, 10))
