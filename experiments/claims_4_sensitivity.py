"""Claims about sensitivity and overhead: figures 16, 17 and 18, section 5.4."""

from __future__ import annotations

import numpy as np

from oled_sim.scoreboard.claim import Claim
from oled_sim.scoreboard.estimate import MissingSettingError, Panel, Statistic
from oled_sim.scoreboard.verdict import at_most, between, direction

from ._claims import Array, average, both, least, only, settings

BATCHES = ("model", "cache", "batch")
BLOCKS = ("model", "cache", "block_length")
LINKS = ("model", "cache", "link_gb_s")


def ends(panel: Panel, name: str, **setting: object) -> tuple[object, object]:
    """Return the smallest and the largest value of a name in a setting.

    Raises:
        MissingSettingError: there are fewer than two.
    """
    found = sorted(v for v in panel.levels(name) if panel.has(**{name: v}, **setting))
    if len(found) < 2:
        raise MissingSettingError(f"fewer than two of {name}")
    return found[0], found[-1]


def growth(column: str, per: str = "") -> Statistic:
    """Return how much a column (over another) is more in the largest batch than alone."""

    def value(panel: Panel, **setting: object) -> Array:
        found = panel.mean(column, **setting)
        return found / panel.mean(per, **setting) if per else 100 * found

    def figure(panel: Panel) -> Array:
        found = []
        for s in settings(panel, ("model", "cache")):
            alone, many = ends(panel, "batch", **s)
            found.append(value(panel, batch=many, **s) - value(panel, batch=alone, **s))
        return average(found)

    return figure


def _by_block(panel: Panel, s: dict[str, object]) -> tuple[list[int], Array]:
    blocks = sorted(b for b in panel.levels("block_length") if panel.has(block_length=b, **s))
    if len(blocks) < 2:
        raise MissingSettingError("fewer than two block lengths")
    return blocks, np.stack([panel.mean("tpot_us", block_length=b, **s) for b in blocks])


def token_by_token(panel: Panel) -> Array:
    """Return TPOT of blocks of one token over that of the best length, least over capacities."""
    return least(
        [
            times[0] / times.min(axis=0)
            for s in settings(panel, ("model", "cache"))
            for _, times in [_by_block(panel, s)]
        ]
    )


def shift_of_best(panel: Panel) -> Array:
    """Return by how many doublings the best length is more with the largest cache, mean."""
    found = []
    for model in panel.levels("model"):
        best = []
        for cache in ends(panel, "cache", model=model):
            blocks, times = _by_block(panel, {"model": model, "cache": cache})
            best.append(np.log2(np.array(blocks, np.float64))[times.argmin(axis=0)])
        found.append(best[1] - best[0])
    return average(found)


def over_full(panel: Panel) -> Array:
    """Return by how many % TPOT with 100 slots is above that with all experts resident."""
    return 100 * (panel.mean("tpot_us", cache=100) / panel.mean("tpot_us", cache=256) - 1)


def link_matters_less(panel: Panel) -> Array:
    """Return how much more a slow link costs with 40 slots than with 100, as ratios, mean."""
    found = []
    for model in panel.levels("model"):
        slow, fast = ends(panel, "link_gb_s", model=model)
        ratios = [
            panel.mean("tpot_us", model=model, cache=cache, link_gb_s=slow)
            / panel.mean("tpot_us", model=model, cache=cache, link_gb_s=fast)
            for cache in (40, 100)
        ]
        found.append(ratios[0] - ratios[1])
    return average(found)


def faster_with_more(panel: Panel) -> Array:
    """Return by how many % TPOT is less with 100 slots than with 40."""
    return 100 * (panel.mean("tpot_us", cache=100) / panel.mean("tpot_us", cache=40) - 1)


def _full(model: str, stated: float) -> Claim:
    return Claim(
        f"full-{model}", "5.4, fig. 17a", f"TPOT with 100 of 256 experts above full residency's,"
        f" {model}", at_most(stated), "%", "fig17", over_full,
        names=("model", "cache"), rows=both(only(part="capacity"), only(model=f"llada2.0-{model}")),
        why="With all experts resident a token takes the H200 2 (mini) or 9 ms (flash), so misses"
        " weigh much; beside the estimated machine's 3 and 18 ms they weigh half or less (figure"
        " 17). A split without OLED's fixed ratio takes 15 to 22 % (mini) or 10 % (flash) off"
        " (`oled:exact`, figure 13).",
    )  # fmt: skip


def _overhead(key: str, text: str, low: float, high: float, unit: str, column: str,
              scale: float, replays: str) -> Claim:  # fmt: skip
    """Return a claim on replays of all MoE layers (``whole``) or of the first ones (``part``)."""
    return Claim(
        key, "5.4, fig. 18b", text, between(low, high, no_effect=0), unit, "fig18",
        lambda panel: scale * panel.mean(column),
        names=("folder", "cache"), columns=(column,),
        rows=both(only(part="overhead"), only(policy="oled", replays=replays)),
        why="Ours decides in compiled code, the paper's in Python hooks of a serving system.",
    )  # fmt: skip


CLAIMS = (
    Claim("batch-used", "5.4, fig. 16a", "Utilization rises with the batch: largest against one",
          direction("rises", no_effect=0.0), "points", "fig16", growth("utilization"),
          names=BATCHES, columns=("utilization",), rows=only(part="batch")),
    Claim("batch-active", "5.4, fig. 16a", "Experts activated per pass, in all layers"
          " together, rise with the batch: largest against one",
          direction("rise", no_effect=0.0), "experts", "fig16", growth("activations", "passes"),
          names=BATCHES, columns=("activations", "passes"), rows=only(part="batch")),
    Claim("block-one", "5.4, fig. 16b", "TPOT of blocks of one token over that of the best length,"
          " least over capacities", direction("> 1", no_effect=1.0), "×", "fig16", token_by_token,
          names=BLOCKS, rows=only(part="block")),
    Claim("block-best", "5.4, fig. 16b", "The best block length grows with the cache, in doublings",
          direction("grows", no_effect=0.0), "", "fig16", shift_of_best,
          names=BLOCKS, rows=only(part="block"),
          why="From 4 tokens with 20 slots to 32 with all experts resident on mini, from 2 to 8 on"
          " flash (figure 16, the H200)."),
    _full("mini", 32.0),
    _full("flash", 23.0),
    Claim("link", "5.4, fig. 17b", "A link of 16 against 128 GB/s costs more with 40 slots than 100"
          " (difference of ratios)", direction("more", no_effect=0.0), "×", "fig17",
          link_matters_less, names=LINKS, rows=only(part="link"),
          why="As a ratio; in ms a slow link costs more with 40 slots on all traces (figure 17)."),
    Claim("version", "5.4, fig. 18a", "LLaDA2.1 gains from 100 slots over 40 as 2.0 does",
          direction("falls", no_effect=0.0, rises=False), "%", "fig18", faster_with_more,
          names=("model", "cache"), rows=both(only(part="version"), only(version="llada2.1"))),
    _overhead("overhead", "Deciding, per forward pass", 3.69, 6.03, "ms", "decide_us", 1e-3,
              "whole"),
    _overhead("overhead-share", "… of the pass", 0.59, 4.53, "%", "share", 100.0, "whole"),
    _overhead("overhead-flash", "… of the pass, flash (its first layers alone)", 0.59, 4.53, "%",
              "share", 100.0, "part"),
)  # fmt: skip
"""In the order of the paper."""
