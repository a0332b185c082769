"""The command ``oled-sim`` from the outside."""

import subprocess
import sys
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper

from oled_sim.cli.main import main


def oled_sim(*arguments, cwd=None):
    """Run the command in this process, which saves the second that imports take."""
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with redirect_stdout(out), redirect_stderr(err), chdir(cwd) if cwd else nullcontext():
        try:
            main([str(a) for a in arguments])
        except SystemExit as stop:
            code = stop.code
    shown = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(arguments, code, *shown)


def oled_sim_process(*arguments):
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "oled_sim", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
