"""What ``oled-sim profile`` prints: the figures that decide, out of thousands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.tables import print_notes, print_table, table_console
from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.profile import Curve, Grid, Quantiles

if TYPE_CHECKING:
    from oled_sim.hardware.measuring.measure import Measured

Figure = tuple[str, str, Quantiles]
"""Key, words, and the measured median with its spread, µs."""


def print_json(measured: Measured, out: Path) -> None:
    """Print one JSON object: what was measured where, and the key figures in µs."""
    profile = measured.profile
    lanes = ("gpu", "h2d", "cpu")
    document: dict[str, Any] = {
        "out": str(out),
        "name": profile.name,
        "geometry": profile.geometry.name,
        "gpu": profile.hardware.gpu,
        "cpu": profile.hardware.cpu,
        "workers": profile.hardware.workers,
        "link_gb_s": round(LaneCosts(profile).link_bandwidth_gb_s, 3),
        "figures_us": {
            key: {"median": q.median, "p10": q.p10, "p90": q.p90} for key, _, q in figures(measured)
        },
        "interference": {
            lane: {o: q.median for o in (*lanes, "both") if (q := getattr(beside, o)) is not None}
            for lane in lanes
            if (beside := getattr(profile.interference, lane))
        },
        "seconds": measured.seconds,
    }
    click.echo(json.dumps(document))


def print_tables(measured: Measured, out: Path) -> None:
    """Print the key figures as a table, and where the profile is."""
    profile, console = measured.profile, table_console()
    hardware, costs = profile.hardware, LaneCosts(profile)
    workers = f"{hardware.workers} worker{'s' if hardware.workers > 1 else ''}"
    console.print(
        f"{profile.name}: {profile.geometry.name} on {hardware.gpu}, {hardware.cpu} with {workers},"
        f" link {costs.link_bandwidth_gb_s:.1f} GB/s",
        soft_wrap=True,
    )
    rows = [(words, *(f"{v:,.1f}" for v in (q.median, q.p10, q.p90)))
        for _, words, q in figures(measured)]  # fmt: skip
    print_table(console, ["µs", "median", "p10", "p90"], rows, left=["µs"])
    console.print()
    slow = [[lane, *(_factor(getattr(getattr(profile.interference, lane), o)) for o in _OTHERS)]
        for lane in ("gpu", "h2d", "cpu")]  # fmt: skip
    print_table(console, ["slow-down of", *(f"beside {o}" for o in _OTHERS)], slow)
    print_notes(console, [f"Measured in {measured.seconds['total']:.0f} s, written to {out}."])


_OTHERS = ("gpu", "h2d", "cpu", "both")


def figures(measured: Measured) -> list[Figure]:
    """Return the key figures of a profile, as far as it has these points."""
    p = measured.profile
    size = p.geometry
    expert_bytes = p.cost_geometry.expert_bytes
    tokens = _usual(p.gate.points)
    context = _usual(p.dense.columns, 512)
    found: list[Figure] = [
        ("h2d_expert", "one expert from pinned memory", _at(p.h2d, expert_bytes)),
        ("h2d_pageable_expert", "the same, pageable", _at(p.h2d_pageable, expert_bytes)),
    ]
    for n in (1, 16, 64):
        if n <= size.experts and n in p.cpu_experts.rows:
            words = f"{n} on the CPU workers, 1 token each"
            found.append((f"cpu_experts_{n}x1", words, _cell(p.cpu_experts, n, 1)))
    for n in (1, 32, 64):
        if n in p.gpu_experts.rows:
            words = f"{n} on the GPU, 1 token each"
            found.append((f"gpu_experts_{n}x1", words, _cell(p.gpu_experts, n, 1)))
    return [
        *found,
        ("cpu_link", f"CPU lane besides its workers, {tokens} tokens", _at(p.cpu_link, tokens)),
        ("dense", f"attention part, {tokens} tokens, context {context}",
         _cell(p.dense, tokens, context)),
        ("gate", "router until its choice is on the host", _at(p.gate, tokens)),
        ("shared_expert", "shared expert", _at(p.shared_expert, tokens)),
        ("merge", "merge", _at(p.merge, tokens)),
        ("lm_head", "LM head and sampling", _at(p.lm_head, _usual(p.lm_head.points))),
        ("launch", "launch of a kernel", p.launch),
        ("synchronize", "wait for a kernel", p.synchronize),
    ]  # fmt: skip


def _usual(points: list[int], wanted: int = 32) -> int:
    """Return the point nearest to what is usual in decoding."""
    return min(points, key=lambda p: abs(p - wanted))


def _at(curve: Curve, point: int) -> Quantiles:
    i = curve.points.index(point)
    return Quantiles(curve.median_us[i], curve.p10_us[i], curve.p90_us[i], curve.repeats[i])


def _cell(grid: Grid, row: int, column: int) -> Quantiles:
    i, j = grid.rows.index(row), grid.columns.index(column)
    return Quantiles(grid.median_us[i][j], grid.p10_us[i][j], grid.p90_us[i][j], grid.repeats[i][j])


def _factor(found: Quantiles | None) -> str:
    return "" if found is None else f"{found.median:.2f}"
