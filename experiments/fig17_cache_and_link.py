"""Figure 17: what cache capacity and link bandwidth do to OLED."""

from __future__ import annotations

from collections.abc import Iterator

from oled_sim.experiment import Experiment, Size
from oled_sim.plotting.sensitivity import draw_fig17

from ._grids import CACHES, On, traces_of
from ._parts import PartPoint

CAPACITIES = (10, 20, 40, 60, 80, 100, 120, 140, 160, 200, 256)
"""Slots per layer; 256 is full residency."""

LINKS_GB_S = (16.0, 32.0, 48.0, 64.0, 96.0, 128.0)


def points(size: Size) -> list[PartPoint]:
    """Return the capacities of (a) and the links of (b) by trace; OLED needs no history."""
    quick = size == "quick"
    capacities, links = (CAPACITIES[1::2], LINKS_GB_S[::2]) if quick else (CAPACITIES, LINKS_GB_S)
    return [
        point for on in traces_of(size) for point in (*_caches(on, capacities), *_links(on, links))
    ]


def _caches(on: On, capacities: tuple[int, ...]) -> Iterator[PartPoint]:
    for cache in dict.fromkeys((*capacities, 100, 256)):
        yield PartPoint(
            on.trace, cache=cache, profile=on.profile, requests=on.requests, history=0,
            part="capacity",
        )  # fmt: skip


def _links(on: On, links: tuple[float, ...]) -> Iterator[PartPoint]:
    for cache in CACHES:
        for link in links:
            yield PartPoint(
                on.trace, cache=cache, profile=on.profile, requests=on.requests,
                history=0, link_gb_s=link, part="link",
            )  # fmt: skip


EXPERIMENT = Experiment(
    "fig17",
    "TPOT of OLED by cache capacity and by link bandwidth",
    "5.4, figure 17",
    points,
    draw_fig17,
)
