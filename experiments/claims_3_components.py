"""Claims about OLED's components: figure 15, section 5.3."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from oled_sim.scoreboard.claim import Claim
from oled_sim.scoreboard.estimate import MissingSettingError, Panel, Statistic
from oled_sim.scoreboard.verdict import Stated, direction, exactly

from ._claims import Array, at_paper_caches, average, both, only, settings

MIXED = ("model", "policy", "cache")
"""Requests of the three data sets count together, as in the paper's mixed workload."""

ACTIVATED = {"llada2.0-mini": 60, "llada2.0-flash": 100}
"""The capacity next to what a model's layers activate, among those of the figure."""


def reduction(before: str, after: str) -> Statistic:
    """Return by how many % TPOT falls from one policy to another, mean over model and cache."""

    def figure(panel: Panel) -> Array:
        return average(
            [
                100
                * (
                    1
                    - panel.mean("tpot_us", policy=after, **s)
                    / panel.mean("tpot_us", policy=before, **s)
                )
                for s in settings(panel, ("model", "cache"))
            ]
        )

    return figure


def more_used(policy: str, other: str, caches: Callable[[str, int], bool]) -> Statistic:
    """Return how many points more of the cache a policy uses, mean over some model and cache."""

    def figure(panel: Panel) -> Array:
        chosen = [s for s in settings(panel, ("model", "cache")) if caches(s["model"], s["cache"])]
        if not chosen:
            raise MissingSettingError("no such capacity")
        return average(
            [
                100
                * (
                    panel.mean("utilization", policy=policy, **s)
                    - panel.mean("utilization", policy=other, **s)
                )
                for s in chosen
            ]
        )

    return figure


def more_effective(panel: Panel) -> Array:
    """Return how many points more of OLED's transfers are used again than by load alone."""

    def ratio(policy: str, s: dict[str, object]) -> Array:
        used = panel.mean("reused", policy=policy, **s)
        return 100 * used / panel.mean("followed", policy=policy, **s)

    return average(
        [
            ratio("oled", s) - ratio("oled:dispatch=load", s)
            for s in settings(panel, ("model", "cache"))
        ]
    )


def _step(
    key: str, text: str, stated: float, before: str, after: str,
    rows: Callable[[pd.DataFrame], pd.DataFrame] = at_paper_caches, why: str = "",
) -> Claim:  # fmt: skip
    number: Stated = exactly(stated, no_effect=0)
    return Claim(
        key, "5.3, fig. 15a", text, number, "%", "fig15", reduction(before, after),
        names=MIXED, rows=rows, replayed=True, why=why,
    )  # fmt: skip


def _small(model: str, cache: int) -> bool:
    return cache <= 40


def _beside_activated(model: str, cache: int) -> bool:
    return cache == ACTIVATED[model]


PRIORITY = (
    "Leaving confidence out (ψ = 1) changes TPOT by 1.5 % at most (docs/oled-sensitivity.md): it"
    " says little about which routes last here, and the rest orders experts nearly as recency does."
)
ADAPT = (
    "Layers activate nearly as many experts as each other here, 18 to 25 % on real traces and 34 to"
    " 35 % on flash's (docs/real-and-synthetic.md), so there is little to move."
)
SPLIT = (
    "Where few misses are left they cost more on the CPU than over this link, and OLED's fixed"
    " ratio sends some there all the same; `oled:exact` does not (docs/oled-sensitivity.md)."
)
COOP = (
    "More than in the paper with 40 slots, where the link decides; a loss on mini with 100, where"
    " OLED's fixed ratio computes on the CPU what the link would bring sooner, `oled:exact`"
    " not (figure 13)."
)
TOTAL = (
    "Nearly all of it is the split of misses: LRU with a split by load is 1 to 2 % ahead of OLED at"
    " 40 slots (docs/policies-mini.md)."
)
TOTAL_FLASH = (
    "39 % with 40 slots and 2 % with 100 (the H200), where OLED's fixed ratio costs 10 %"
    " (`oled:exact`, figure 13); the CPU of flash's profile is rather slow (docs/cost-model.md)."
)

CLAIMS = (
    _step("priority", "TPOT less by +Priority", 20.56, "lru", "oled:priority", why=PRIORITY),
    _step("adapt", "TPOT less by +LayerAdapt", 9.09, "oled:priority", "oled:priority+adapt",
          why=ADAPT),
    _step("coop", "TPOT less by +Coop", 9.14, "oled:priority+adapt", "oled", why=COOP),
    _step("total-40", "TPOT of OLED below Naive-LRU's, 40 slots", 53.7, "lru", "oled",
          only(cache=40), why=TOTAL),
    _step("total-100", "… 100 slots", 34.5, "lru", "oled", only(cache=100), why=SPLIT),
    _step("total-flash", "… flash", 50.5, "lru", "oled",
          both(at_paper_caches, only(model="llada2.0-flash")), why=TOTAL_FLASH),
    _step("total-mini", "… mini", 37.8, "lru", "oled",
          both(at_paper_caches, only(model="llada2.0-mini")), why=SPLIT),
    Claim("priority-lru", "5.3, fig. 15b", "Priority uses more of a small cache (≤ 40) than LRU",
          direction("more", no_effect=0.0), "points", "fig15",
          more_used("oled:priority", "lru", _small), names=MIXED, columns=("utilization",)),
    Claim("priority-lfu", "5.3, fig. 15b", "… than LFU",
          direction("more", no_effect=0.0), "points", "fig15",
          more_used("oled:priority", "lfu", _small), names=MIXED, columns=("utilization",)),
    Claim("adapt-uniform", "5.3, fig. 15b", "LayerAdapt uses more than uniform shares, capacity"
          " near the activated experts", direction("more", no_effect=0.0), "points", "fig15",
          more_used("oled:priority+adapt", "oled:priority", _beside_activated),
          names=MIXED, columns=("utilization",), why=ADAPT),
    Claim("coop-load", "5.3, fig. 15b", "More transfers are used again than by load alone",
          direction("more", no_effect=0.0), "points", "fig15", more_effective,
          names=MIXED, columns=("reused", "followed")),
)  # fmt: skip
"""In the order of the paper."""
