"""Hold the simulator against this machine: measure a profile, replay a grid, compare.

On a machine with a GPU, where oled-sim is installed:

    python benchmarks/validation.py --out validation --passes 96

Every data set is replayed right after a profile of its own, since a machine that others share is
not as fast at one time as at another; all policies of a data set run in one process. What is there
already is not run again, so a run that was stopped goes on. Points must come from the machine of
the profile beside them. A grid that takes longer than a session on such a machine is spread over
several, each with a part of the grid and a folder of its own::

    python benchmarks/validation.py --out a --caches 20,40 --no-report
    python benchmarks/validation.py --out b --caches 60,100,160 --no-report
    oled-sim validate a b --out report --profile a/this-machine-mini-gsm8k.toml --profile ...
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

POLICIES = ("lru", "lfu", "oled", "fiddler", "hybrimoe", "moe-infinity")
CACHES = "20,40,60,100,160"
TRACES = ("mini-gsm8k", "mini-humaneval", "mini-science")


def main() -> None:
    """Run all steps."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    profiles = [_measure(args, trace) for trace in args.trace or TRACES]
    if args.no_report:
        return
    known = _repeated("--profile", profiles)
    _run("validate", args.out, *known, "--out", args.report or args.out / "report", "--force")


def _measure(args: argparse.Namespace, trace: str) -> Path:
    """Profile the machine and replay a data set; return the profile."""
    data = Path(trace).name
    profile = args.out / f"{args.name}-{data}.toml"
    if not profile.exists():
        _run("profile", "--geometry", args.geometry, "--name", args.name, "--out", profile)
    common = ["--geometry", args.geometry, "--profile", profile, "--out", args.out / data]
    common += ["--passes", args.passes, "--repetitions", args.repetitions, "--trace", trace]
    common += ["--requests", args.requests, "--cache", args.caches, "--patience", args.patience]
    common += _repeated("--policy", args.policy or POLICIES)
    if args.layers:
        common += ["--layers", args.layers]
    _run("replay", *common)
    return profile


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold the simulator against this machine.")
    parser.add_argument("--out", type=Path, required=True, help="folder of profiles and points")
    parser.add_argument("--report", type=Path, help="folder of the report, default: report in OUT")
    parser.add_argument("--geometry", default="llada2.0-mini")
    parser.add_argument("--name", default="this-machine", help="of all profiles")
    parser.add_argument("--caches", default=CACHES, help="slots per layer")
    parser.add_argument("--passes", type=int, default=96, help="decode passes of a request")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1, help="requests of every trace")
    parser.add_argument("--patience", type=float, default=0.0, help="as of `oled-sim replay`, s")
    parser.add_argument("--layers", type=int, help="first MoE layers to run, default all")
    parser.add_argument("--trace", action="append", help="default: " + ", ".join(TRACES))
    parser.add_argument("--policy", action="append", help="default: " + ", ".join(POLICIES))
    parser.add_argument("--no-report", action="store_true", help="measure and do not compare")
    return parser.parse_args()


def _repeated(option: str, values: Sequence[object]) -> list[object]:
    return [part for value in values for part in (option, value)]


def _run(*arguments: object) -> None:
    command = [sys.executable, "-m", "oled_sim", *map(str, arguments)]
    print("+", *command[1:], flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
