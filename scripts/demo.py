"""What `make demo` runs: collect a trace, simulate four policies, draw one figure.

Everything is done through the real command line; the commands are printed as they run.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd

from oled_sim.plotting.results import draw_capacity
from oled_sim.plotting.style import save

FOLDER = Path("demo")
TRACE = FOLDER / "trace"
RESULTS = FOLDER / "results.parquet"
FIGURE = FOLDER / "policies.png"

COMMANDS = [
    f"collect --limit 4 --max-new-tokens 64 --out {TRACE} --overwrite",
    f"trace info {TRACE}",
    f"run --trace {TRACE} --history 0 --policy lru --policy lfu --policy oled --policy ideal"
    f" --cache 8 --cache 16 --cache 32 --cache 64 --out {RESULTS} --force",
]


def main() -> None:
    """Run the commands one after the other; stop at the first that fails."""
    began = time.monotonic()
    FOLDER.mkdir(exist_ok=True)
    for command in COMMANDS:
        print(f"\n$ oled-sim {command}", flush=True)
        code = subprocess.run([sys.executable, "-m", "oled_sim", *shlex.split(command)]).returncode
        if code:
            sys.exit(code)
    figure = draw_capacity(pd.read_parquet(RESULTS), "3 requests of the demo prompts, llada2-nano")
    save(figure, FIGURE)
    print(f"\nwrote {FIGURE} ({time.monotonic() - began:.0f} s in all)")


if __name__ == "__main__":
    main()
