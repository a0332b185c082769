"""Tables of experiments relative to one of their policies, with intervals over requests."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from oled_sim.comparison import paired_ratio

SETTING = ("profile", "origin", "model")
"""What figures keep apart: costs, real or synthetic routing, size of the model."""


def relative(
    table: pd.DataFrame, reference: str, by: Sequence[str], *, quantity: str = "tpot_us"
) -> pd.DataFrame:
    """Return mean over mean of a reference policy's, with 95 % paired-bootstrap intervals.

    Args:
        table: a row per ``by``, ``policy``, ``trace`` and ``request`` with ``quantity``.
        reference: the policy that the others are divided by, itself among them.
        by: columns whose values are kept apart; requests of all traces within are pooled.

    Returns:
        Rows per ``by`` and ``policy``, in the order of the table, with ``ratio``, ``low``,
        ``high`` (NaN below two requests) and ``requests``.

    Raises:
        KeyError: the reference is missing somewhere.
    """
    rows = []
    for key, inside in table.groupby(list(by), sort=False):
        values = inside.pivot(index=["trace", "request"], columns="policy", values=quantity)
        base = values[reference].to_numpy(float)
        for policy in dict.fromkeys(inside["policy"]):
            found = paired_ratio(values[policy].to_numpy(float), base)
            names = dict(zip(by, key, strict=True))
            rows.append(
                names
                | {
                    "policy": policy,
                    "ratio": found.value,
                    "low": found.low,
                    "high": found.high,
                    "requests": found.requests,
                }
            )
    return pd.DataFrame(rows)
