"""Whether the values of synthesis parameters can be meant, beyond their names and types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from oled_sim.errors import FileError
from oled_sim.synthesis.parameters import COUPLINGS, DataSet

SHARES = frozenset({
    "neighbour_masked", "neighbour_word", "carry", "boundary_carry", "drift", "drift_word",
    "jitter_shared", "block_persistence", "persistence_masked", "persistence_word", "shrink",
    "edit_rate", "threshold",
})  # fmt: skip
"""Shares, chances and correlations: 0 to 1."""

SPREADS = frozenset({
    "popularity", "state_contrast", "request_taste", "block_taste", "masked_sharpness",
    "layer_spread", "jitter_masked", "jitter_word", "jitter_spread", "block_spread",
    "token_spread", "pass_spread", "word_spread", "word_pass_spread", "log_spread",
})  # fmt: skip
"""Standard deviations of logarithms, and factors on them: 0 to 20; beyond that lies overflow."""

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(SHARES, (0.0, 1.0)),
    **dict.fromkeys(SPREADS, (0.0, 20.0)),
    "reach": (1e-3, 1e6),
    "stretch": (1e-3, 1e3),
    "slope": (1e-3, 1e3),
    "median_tokens": (1.0, 1e5),
    "layers": (1, 4096),
    "experts": (1, 65536),
    "top_k": (1, 4096),
    "block_length": (1, 4096),
}
"""Least and largest value by the name of a parameter."""


def check_values(data: DataSet, path: object) -> None:
    """Refuse parameters that no routing can have.

    Raises:
        FileError: a value is not finite or out of its range, or a relation is missing or
            unknown; the sentence names the parameter.
    """
    for name, value in _numbers(msgspec.to_builtins(data), ""):
        low, high = RANGES.get(name.rpartition(".")[2], (-1e6, 1e12))
        if not (math.isfinite(value) and low <= value <= high):
            raise FileError(f"{path}: {name} = {value:g} must lie between {low:g} and {high:g}")
    if data.top_k > data.experts:
        raise FileError(f"{path}: top_k = {data.top_k} exceeds experts = {data.experts}")
    for unknown in sorted(set(data.couplings) - set(COUPLINGS)):
        known = ", ".join(COUPLINGS)
        raise FileError(f"{path}: couplings.{unknown} is no relation: known are {known}")
    for missing in sorted(set(COUPLINGS) - {"none"} - set(data.couplings)):
        raise FileError(f"{path}: the relation couplings.{missing} is missing")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield every number of nested tables with the path of its name; targets say what they like."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "targets":
                yield from _numbers(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
