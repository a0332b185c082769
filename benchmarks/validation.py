"""Hold the simulator against this machine: measure a profile, replay a grid, compare.

On a machine with a GPU, where oled-sim is installed:

    python benchmarks/validation.py --out validation --caches 20,60,160
    python benchmarks/validation.py --out validation --caches 40,100 --requests 2

All points of a call run in one process and take turns, so that what disturbs a shared machine for a
while meets one repetition of many. What is there already, profile and repetitions, is not run
again: a run that was stopped goes on. Points must come from the machine of the profile beside them;
a grid that takes longer than a session on such a machine is spread over several, each with a part
of the grid and a folder of its own::

    python benchmarks/validation.py --out a --caches 20,60,160 --no-report
    python benchmarks/validation.py --out b --caches 40,100 --requests 2 --no-report
    oled-sim validate a b --out report --profile a/this-machine.toml --profile b/this-machine.toml
"""

from __future__ import annotations

import argparse
import signal
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
    profile = args.out / f"{args.name}.toml"
    if not profile.exists():
        _run("profile", "--geometry", args.geometry, "--name", args.name, "--out", profile)
    _replay(args, profile)
    if not args.no_report:
        report = args.report or args.out / "report"
        _run("validate", args.out, "--profile", profile, "--out", report, "--force")


def _replay(args: argparse.Namespace, profile: Path) -> None:
    """Run the grid in one process."""
    asked = ["--geometry", args.geometry, "--profile", profile, "--out", args.out / "points"]
    asked += ["--passes", args.passes, "--repetitions", args.repetitions]
    asked += ["--requests", args.requests, "--cache", args.caches, "--patience", args.patience]
    asked += _repeated("--trace", args.trace or TRACES)
    asked += _repeated("--policy", args.policy or POLICIES)
    if args.layers:
        asked += ["--layers", args.layers]
    _run("replay", *asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold the simulator against this machine.")
    parser.add_argument("--out", type=Path, required=True, help="folder of profiles and points")
    parser.add_argument("--report", type=Path, help="folder of the report, default: report in OUT")
    parser.add_argument("--geometry", default="llada2.0-mini")
    parser.add_argument("--name", default="this-machine", help="of the profile")
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
    """Run a command of oled-sim; stop as it stops."""
    command = [sys.executable, "-m", "oled_sim", *map(str, arguments)]
    print("+", *command[1:], flush=True)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # and wait for its end
    try:
        code = process.wait()
    except KeyboardInterrupt:  # which it has got, too
        process.wait()
        raise
    if code:
        sys.exit(code)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the command has said what it leaves
        sys.exit(130)
