"""Output that nobody takes: a full disk is one sentence, a reader that went away is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
NANO = "nano-gsm8k"
RUN = ("run", "--trace", NANO, "--policy", "lru", "--cache", "16")
SAID = "Error: standard output takes no more (No space left on device): send it elsewhere"

PRINTING = (
    ("--help",),
    ("run", "--help"),
    ("policies",),
    ("trace", "info", NANO),
    ("trace", "validate", NANO),
    RUN,
    (*RUN, "--json"),
)


def ended(arguments, unbuffered="", **streams):
    """Run the command in a process of its own; return what it says on stderr, and its code."""
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-m", "oled_sim", *map(str, arguments)],
        text=True,
        timeout=120,
        env=env,
        **streams,
    )
    return done.stderr, done.returncode


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(a, marks=pytest.mark.slow) if i > 3 else a for i, a in enumerate(PRINTING)],
    ids=" ".join,
)
def test_a_full_disk(arguments):
    with FULL.open("w") as full:
        said, code = ended(arguments, stdout=full, stderr=subprocess.PIPE)
    assert (said.strip().splitlines()[-1], code) == (SAID, 1)
    assert "Traceback" not in said and "Exception" not in said


@pytest.mark.parametrize("arguments", [("--help",), ("policies",), RUN], ids=" ".join)
def test_a_reader_that_went_away(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        assert ended(arguments, stdout=gone, stderr=subprocess.PIPE) == ("", 1)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_with_any_buffer(unbuffered):
    with FULL.open("w") as full:
        said, code = ended(("policies", "--json"), unbuffered, stdout=full, stderr=subprocess.PIPE)
    assert (said.strip(), code) == (SAID, 1)


def test_files_are_written_all_the_same(tmp_path):
    out = tmp_path / "requests.csv"
    with FULL.open("w") as full:
        said, code = ended((*RUN, "--out", out), stdout=full, stderr=subprocess.PIPE)
    assert (said.strip(), code) == (SAID, 1) and out.is_file()


@pytest.mark.parametrize("arguments", [("no-such",), ("run", "--policy", "no-such")], ids=" ".join)
def test_a_full_disk_for_errors_leaves_the_exit_code(arguments):
    with FULL.open("w") as full:
        assert ended(arguments, stdout=subprocess.DEVNULL, stderr=full) == (None, 2)
