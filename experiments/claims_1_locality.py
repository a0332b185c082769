"""Claims about routing: figures 4, 7 and 10, sections 3.1, 3.3, 4.3 and 5.2."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from oled_sim.scoreboard.claim import Claim, Evidence
from oled_sim.scoreboard.estimate import Panel, Statistic
from oled_sim.scoreboard.verdict import Stated, above, between, direction, exactly

from ._claims import Array

PER_REQUEST = "requests"
"""Name of the part of an analysis that has a row per request."""

SYNTHETIC: tuple[Evidence, ...] = ("synthetic",)
EVERYWHERE: tuple[Evidence, ...] = ("synthetic", "real")


def _mean(column: str, scale: float = 1.0) -> Statistic:
    return lambda panel: scale * panel.mean(column)


def _fall(panel: Panel) -> Array:
    """Return how much less is kept eight passes on than one pass on, in points."""
    return 100 * (panel.mean("overlap_within_8") - panel.mean("overlap_within"))


def per_request(model: str = "") -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return what selects rows of requests, of a model's synthetic traces and of recorded ones.

    Traces that were made under another relation of confidence and stability are left out.
    """

    def select(table: pd.DataFrame) -> pd.DataFrame:
        rows = table[(table["table"] == PER_REQUEST) & ~table["group"].str.contains("relation")]
        real, synthetic = rows["origin"] == "real", rows["group"] == model
        if not model:
            return rows
        return rows[synthetic | real] if model == "llada2.0-mini" else rows[synthetic]

    return select


def _claim(
    key: str, section: str, text: str, stated: Stated, unit: str, experiment: str, column: str,
    *, scale: float = 1.0, statistic: Statistic | None = None, columns: tuple[str, ...] = (),
    model: str = "", constructed: tuple[Evidence, ...] = (), why: str = "",
) -> Claim:  # fmt: skip
    return Claim(
        key, section, text, stated, unit, experiment, statistic or _mean(column, scale),
        names=("group",), columns=columns or (column,), rows=per_request(model),
        constructed=constructed, why=why,
    )  # fmt: skip


FITTED = "Synthetic traces were fitted to it."

FEWER = FITTED + " Our trained model activates 53 experts where LLaDA2.0-mini has 60 (figure 10c)."

CONFIDENCE = (
    "In our trained models it depends on the token's state; tokens just accepted change their"
    " route, and sure ones are accepted (docs/real-and-synthetic.md)."
)


def _correlation(key: str, which: str, column: str) -> Claim:
    return _claim(
        key, "4.3, fig. 10", f"Confidence goes with route stability, {which}",
        direction("strongly", no_effect=0.0), "", "fig10", column,
        constructed=SYNTHETIC, why=CONFIDENCE,
    )  # fmt: skip


CLAIMS = (
    _claim(
        "footprint", "3.1, fig. 4", "Experts that a pass of a block activates per layer, over one"
        " token's", exactly(8, no_effect=1), "×", "fig04", "footprint_ratio",
        model="llada2.0-mini", constructed=SYNTHETIC, why=FEWER,
    ),
    _claim(
        "flops", "3.1, fig. 4", "Expert FLOPs of a pass of a block, over one token's",
        exactly(16, no_effect=1), "×", "fig04", "flops_ratio",
        model="llada2.0-mini", constructed=EVERYWHERE,
        why="A block of 16 tokens with k experts each does 16 times the work of one by definition.",
    ),
    _claim(
        "cosine", "3.3, fig. 7", "Cosine of hidden states, adjacent passes",
        exactly(98, no_effect=0), "%", "fig07", "cosine", scale=100,
        why="Synthetic traces have no hidden states.",
    ),
    _claim(
        "overlap", "3.3, fig. 7", "Activated experts kept by the next pass of the block",
        between(85, 90, no_effect=0), "%", "fig07", "overlap_within", scale=100,
        constructed=SYNTHETIC, why=FITTED,
    ),
    _claim(
        "boundary", "3.3, fig. 7", "Activated experts kept across a block boundary",
        above(65, no_effect=0), "%", "fig07", "overlap_across", scale=100,
        constructed=SYNTHETIC,
        why=FITTED + " Our trained model keeps far fewer: its routes follow the words of a block,"
        " and it was trained for minutes (docs/traces.md).",
    ),
    _claim(
        "overlap-falls", "3.3, fig. 7", "Overlap falls with the gap: 8 passes against 1",
        direction("falls", no_effect=0.0, rises=False), "points", "fig07", "",
        statistic=_fall, columns=("overlap_within", "overlap_within_8"),
        why="Synthetic traces fall as those they were made after do.",
    ),
    Claim(
        "families", "3.3", "SDAR and RND1-Base show the same locality",
        direction("similar", no_effect=0.0), "", None, lambda panel: np.array([np.nan]),
        why="Their weights are not at hand; a trace of either can be imported and analysed.",
    ),
    _correlation("confidence", "all tokens", "correlation_all"),
    _correlation("confidence-masked", "tokens still masked", "correlation_masked"),
    _correlation("confidence-accepted", "tokens just accepted", "correlation_accepted"),
    _correlation("confidence-decoded", "decoded tokens", "correlation_decoded"),
    _claim(
        "activated-mini", "5.2, fig. 10c", "Experts that LLaDA2.0-mini activates per layer",
        exactly(60, no_effect=8, text="≈ 60"), "", "fig10", "activated",
        model="llada2.0-mini", constructed=SYNTHETIC, why=FITTED,
    ),
    _claim(
        "activated-flash", "5.2, fig. 10c", "Experts that LLaDA2.0-flash activates per layer",
        exactly(90, no_effect=8, text="≈ 90"), "", "fig10", "activated",
        model="llada2.0-flash", constructed=SYNTHETIC, why=FITTED,
    ),
)  # fmt: skip
"""In the order of the paper."""
