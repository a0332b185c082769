"""Measure every lane cost of this machine, and write a hardware profile.

On a machine with a GPU, from the repository's root:

    python benchmarks/measure_lanes.py --geometry llada2.0-mini --name h200-llada2.0-mini \\
        --raw lanes.json --out h200-llada2.0-mini.toml

Measuring needs torch alone; writing the profile needs oled-sim installed, and may be done
elsewhere from the raw file with --from-raw. With --quick it runs all code in seconds, on any
machine, for a geometry of toy size. What each table means: docs/cost-model.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))  # the measuring machine need not have oled-sim installed

from oled_sim.geometry import GEOMETRIES, CostGeometry, find_geometry  # noqa: E402

QUICK = CostGeometry("quick", 64, 128, 32, 4, 1, 8, 2, 1, 4, 2, 16, 512)
QUICK_BYTES = 4 << 20


def main(argv: list[str] | None = None) -> None:
    """Measure, or convert a raw file; write what was asked for."""
    parser = _arguments()
    args = parser.parse_args(argv)
    _refuse(parser, args)
    raw = _measure(args) if args.from_raw is None else json.loads(args.from_raw.read_text())
    if args.note:
        raw["origin"]["note"] = args.note
    if args.out is not None:
        from lanes.assemble import write_profile

        write_profile(raw, args.out)
    _print_summary(raw)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure every lane cost of this machine.")
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), help="sizes to measure at")
    parser.add_argument("--name", default="this-machine", help="name of the profile")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--workers", type=int, default=None, help="default: cores - 1")
    parser.add_argument("--quick", action="store_true", help="few points, toy size")
    parser.add_argument("--note", default="", help="remark to keep in the profile")
    parser.add_argument("--raw", type=Path, help="write all figures here (JSON)")
    parser.add_argument("--from-raw", type=Path, help="do not measure: read figures from here")
    parser.add_argument("--out", type=Path, help="write the profile here (TOML)")
    return parser


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a sentence on what cannot work, before minutes are spent on it."""
    for path in (args.raw, args.out):
        if path is not None and path.exists():
            parser.error(f"{path} exists: move it away, or give another name")
    if args.from_raw is None and not args.quick and args.geometry is None:
        parser.error("--geometry is missing: say whose sizes to measure")


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all tables; return them with the identity of the machine."""
    import torch
    from lanes import machine, sweeps
    from lanes.axes import full_axes, quick_axes
    from lanes.cpu import Workers
    from lanes.kernels import Place
    from lanes.timing import Clock

    start = time.perf_counter()
    # One core stays free for the thread that launches kernels and copies.
    workers = args.workers or max(1, len(os.sched_getaffinity(0)) - 1)
    cost = QUICK if args.quick and not args.geometry else find_geometry(args.geometry)
    axes = (quick_axes if args.quick else full_axes)(cost)
    device = torch.device(args.device)
    clock = Clock(device, rounds=1, most=3) if args.quick else Clock(device)
    place = Place(device, QUICK_BYTES) if args.quick else Place(device)
    pool = sweeps.cpu_pool(cost, axes, device, QUICK_BYTES if args.quick else sweeps.CPU_POOL_BYTES)
    _say(f"{cost.name} on {args.device}, {workers} workers, {pool.bytes >> 20} MiB of experts")
    raw: dict[str, Any] = {
        "name": args.name,
        "origin": {
            "date": datetime.date.today().isoformat(),
            "script": "benchmarks/measure_lanes.py",
            "revision": machine.revision(),
            "note": args.note,
        },
        "hardware": machine.hardware(device, workers),
        "software": machine.software(),
        "geometry": asdict(cost),
    }
    with torch.inference_mode():
        sweep = sweeps.Sweep(clock, cost, axes, place, Workers(pool, workers))
        for found in sweeps.everything(sweep, tries=4 if args.quick else 40):
            raw |= found
            raw |= {"tables": sweep.tables, "seconds": sweep.seconds}
            _save(raw, args.raw)  # a run that is cut short keeps what it has
    raw["seconds"]["total"] = round(time.perf_counter() - start, 1)
    _save(raw, args.raw)
    return raw


def _save(raw: dict[str, Any], path: Path | None) -> None:
    """Write the raw figures, replacing those of an earlier step of this run."""
    if path is not None:
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(json.dumps(_without_nan(raw), separators=(",", ":")) + "\n")
        temporary.replace(path)


def _without_nan(value: Any) -> Any:
    """Return the value with null for NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _print_summary(raw: dict[str, Any]) -> None:
    """Print the key figures, last, so that the end of a log holds them."""
    tables = raw["tables"]
    for name, table in tables.items():
        if "points" in table:
            pairs = zip(table["points"], table["median_us"], strict=True)
            print(f"{name} µs by {table['axis']}: " + "  ".join(f"{p}:{t:.1f}" for p, t in pairs))
    for name in ("gpu_experts", "cpu_experts", "dense", "block_attention"):
        table = tables[name]
        print(f"{name} µs, rows {table['axes'][0]}, columns {table['axes'][1]} {table['columns']}")
        for n, row in zip(table["rows"], table["median_us"], strict=True):
            print(f"  {n:>5} " + " ".join("-" if t is None or t != t else f"{t:.0f}" for t in row))
    for lane, beside in raw["interference"].items():
        factors = "  ".join(f"{k} {v['median']:.3f}" for k, v in beside.items())
        print(f"interference of {lane}: {factors}")
    print(f"launch {raw['launch']['median']:.2f} µs, sync {raw['synchronize']['median']:.2f} µs, "
          f"{raw['seconds']['total']} s in all")  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
