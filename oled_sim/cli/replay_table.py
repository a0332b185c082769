"""What ``oled-sim replay`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pandas as pd

from oled_sim.cli.tables import print_notes, print_table, table_console
from oled_sim.validation.measured import Point

LEGEND = (
    "pass: ms per decode pass, mean over repetitions, without decisions; spread: largest less"
    " smallest mean of a repetition, % of the mean. decide: µs per pass that decisions take. hit:"
    " |R ∩ A| / |A|. H2D, CPU: experts copied (ahead of need included) and computed there, per"
    " decode pass. busy: ms per decode pass that the lane works. lossless: worst error of checked"
    " events relative to full residency, and how many were checked, %."
)


def figures_of(point: Point) -> dict[str, Any]:
    """Return the figures of a point over its decode passes, times in µs."""
    passes, events = point.passes.to_pandas(), point.events.to_pandas()
    decode = passes[passes["kind"] != "prefill"]
    keys = ["repetition", "request", "pass_index"]
    mine = events.merge(decode[keys], on=keys)
    means = decode.groupby("repetition")["pass_us"].mean()
    count = len(decode)
    copied = mine["demand"].sum() + decode["prefetched"].sum()
    cpu = mine["cpu_misses"].sum() + mine["cpu_hits"].sum()
    about = point.about
    return {
        "trace": about.trace_name,
        "policy": about.policy.label,
        "cache": about.cache,
        "requests": list(about.requests),
        "decode_passes": count // about.repetitions,
        "repetitions": about.repetitions,
        "pass_us": float(means.mean()),
        "spread": float((means.max() - means.min()) / means.mean()),
        "prefill_us": float(passes[passes["kind"] == "prefill"]["pass_us"].mean()),
        "decide_us": float(decode["decide_us"].mean()),
        "hit_rate": _share(mine["hits"], mine["activated"]),
        "h2d_per_pass": float(copied / count),
        "cpu_per_pass": float(cpu / count),
        **{f"{lane}_busy_us": float(decode[f"{lane}_busy_us"].mean()) for lane in LANES},
        "lossless": _lossless(point),
    }


def _lossless(point: Point) -> dict[str, Any] | None:
    """Return what comparing events with full residency has found, and of how many events."""
    found = point.about.lossless
    return found and msgspec.to_builtins(found) | {"events": len(point.events)}


LANES = ("gpu", "h2d", "cpu")


def _share(part: pd.Series, whole: pd.Series) -> float:
    total = whole.sum()
    return float(part.sum() / total) if total else float("nan")


def print_json(points: Sequence[Point], out: Path) -> None:
    """Print all figures as one JSON object."""
    document = {"out": str(out), "points": [figures_of(point) for point in points]}
    click.echo(msgspec.json.encode(document).decode())


def print_points(points: Sequence[Point], out: Path) -> None:
    """Print a row per point."""
    console = table_console()
    if not points:
        return
    about = points[0].about
    hardware = about.machine.hardware
    click.echo(f"Machine  {hardware.gpu}, {hardware.cpu}, {hardware.workers} CPU workers")
    click.echo(f"Costs    {about.geometry.name}; decisions by profile {about.profile.name}")
    click.echo(f"Points   {len(points)} in {out}; {about.repetitions} repetitions each")
    names = ("trace", "policy", "cache", "pass", "spread", "decide", "hit", "H2D", "CPU",
             "busy GPU/H2D/CPU", "lossless")  # fmt: skip
    rows = [_row(figures_of(point)) for point in points]
    print_table(console, names, rows, keys=3, left=("trace", "policy"))
    print_notes(console, [LEGEND])


def _row(f: dict[str, Any]) -> list[str]:
    busy = "/".join(f"{f[f'{lane}_busy_us'] / 1e3:.2f}" for lane in LANES)
    found = f["lossless"]
    lossless = "-"
    if found is not None and found["events_checked"] > 0:
        share = found["events_checked"] / found["events"]
        lossless = f"{found['worst_relative_error']:.1e} ({share:.0%})"
    return [
        f["trace"], f["policy"], str(f["cache"]), f"{f['pass_us'] / 1e3:.2f}",
        f"{100 * f['spread']:.1f}", f"{f['decide_us']:.0f}",
        "n/a" if np.isnan(f["hit_rate"]) else f"{f['hit_rate']:.3f}",
        f"{f['h2d_per_pass']:.1f}", f"{f['cpu_per_pass']:.1f}", busy, lossless,
    ]  # fmt: skip
