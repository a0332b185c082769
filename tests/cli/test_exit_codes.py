"""The rule of docs/exit-codes.md, held by every command: 2 for the call, 1 for what it named."""

import os
from importlib.util import find_spec

import pytest
from commands import oled_sim

NANO = "nano-gsm8k"
LRU = ("--policy", "lru", "--cache", "16")
PLAN = ("plan", "--model", "llada2.0-mini", "--target-tpot", "9ms", "--policy", "lru")
GENERATE = ("generate", "--cache", "4", "--limit", "1", "--device", "cpu")
COLLECT = ("collect", "--limit", "1", "--device", "cpu")

# What is wrong, or missing, or in the way. Files of suffix X are `broken.X`, folders `folder.X`.
SUFFIXES = ("toml", "json", "jsonl", "py", "csv", "npy", "parquet", "png", "pftrace")

OPENED = {
    "a trace": (
        ("run", *LRU, "--trace"),
        ("sweep", *LRU),
        ("compare", *LRU),
        ("bounds", *LRU),
        ("curve", "--policy", "lru"),
        ("analyze",),
        ("trace", "info"),
        ("trace", "validate"),
        ("trace", "reblock", "--as-blocks", "4", "--out", "new"),
        ("export", "csv", "--out", "new"),
        ("replay", *LRU, "--out", "new", "--trace"),
        (*PLAN, "--trace"),
    ),
    "a profile": (
        ("run", *LRU, "--trace", NANO, "--profile"),
        ("sweep", NANO, *LRU, "--profile"),
        ("compare", NANO, *LRU, "--profile"),
        ("bounds", NANO, *LRU, "--profile"),
        ("replay", *LRU, "--trace", NANO, "--out", "new", "--profile"),
        (*PLAN, "--profile"),
        (*GENERATE, "--profile"),
        ("profiles",),
    ),
    "a geometry": (
        ("run", *LRU, "--trace", NANO, "--geometry"),
        ("replay", *LRU, "--trace", NANO, "--out", "new", "--geometry"),
        ("profile", "--quick", "--device", "cpu", "--out", "new.toml", "--geometry"),
        ("plan", "--target-tpot", "9ms", "--model"),
        ("import", "csv", "broken.csv", "--out", "new", "--stands-for"),
        (*GENERATE, "--geometry"),
    ),
    "policies in TOML": (
        ("run", "--trace", NANO, "--cache", "4", "--policy"),
        ("sweep", NANO, "--cache", "4", "--policy"),
        ("compare", NANO, "--cache", "4", "--policy"),
        ("curve", NANO, "--policy"),
        ("replay", "--trace", NANO, "--cache", "4", "--out", "new", "--policy"),
        (*GENERATE, "--policy"),
    ),
    "a policy's code": (
        ("run", "--trace", NANO, "--cache", "4", "--policy"),
        ("bounds", NANO, "--cache", "4", "--policy"),
        ("policies",),
        ("experiment", "--quick"),
        ("import",),
        ("export",),
    ),
    "parameters of synth": (("synth", "--report", "--dataset"),),
    "prompts": ((*COLLECT, "--out", "new", "--prompts"), (*GENERATE[:3], "--prompts")),
    "a model": ((*COLLECT, "--out", "new", "--model"), (*GENERATE, "--model")),
    "weights": (("replay", *LRU, "--trace", NANO, "--out", "new", "--checkpoint"),),
    "a table to import": (
        ("import", "csv", "--out", "new"),
        ("import", "route-csv", "--out", "new"),
    ),
    "arrays to import": (("import", "routed-experts", "--out", "new"),),
    "a log to import": (("import", "route-jsonl", "--out", "new"),),
    "a dump to import": (("import", "sglang-dump", "--out", "new"),),
    "replays": (("validate",),),
    "a validation": ((*PLAN, "--trace", NANO, "--validation"), ("reproduce", "--measured")),
    "results": (("reproduce", "--no-run", "--out"),),
}
"""What is read: commands that take it, whose last argument is its path."""

WRONG = {
    "a trace": {"absent": 2, "text": 2, "folder": 2, "damaged": 1},
    "a profile": {"absent.toml": 2, "folder.toml": 2, "absent": 2, "broken.toml": 1},
    "a geometry": {"absent.toml": 2, "folder.toml": 2, "absent.json": 2, "broken.toml": 1},
    "policies in TOML": {"absent.toml": 2, "folder.toml": 2, "broken.toml": 1},
    "a policy's code": {"./absent.py": 2, "./folder.py": 2, "./broken.py": 1},
    "parameters of synth": {"absent.toml": 2, "folder.toml": 2, "absent": 2, "broken.toml": 1},
    "prompts": {"absent.jsonl": 2, "folder": 2, "broken.jsonl": 1},
    "a model": {"absent": 2, "folder": 2, "text": 2, "half": 1},
    "weights": {"absent": 2, "folder": 2, "text": 2},
    "a table to import": {"absent": 2, "folder": 2, "broken.csv": 1},
    "arrays to import": {"absent.npy": 2, "folder.npy": 2, "text": 2, "broken.npy": 1},
    "a log to import": {"absent": 2, "folder": 2, "broken.jsonl": 1},
    "a dump to import": {"absent": 2, "folder": 2, "text": 1},
    "replays": {"absent": 2, "folder": 2, "text": 2, "measured": 1},
    "a validation": {"absent": 2, "folder": 2, "text": 2, "validation": 1},
    "results": {"absent": 2, "folder": 2, "text": 2},
}
"""What is given instead: the exit code."""

NO_FILE = ("/proc/new", "text/new", "absent/new", "folder", "text")
NO_FOLDER = ("/proc/new", "text/new", "text")
OCCUPIED = (*NO_FOLDER, "full")

WRITTEN = (
    (("run", *LRU, "--trace", NANO, "--out"), ".csv", NO_FILE),
    (("run", *LRU, "--trace", NANO, "--events"), ".parquet", NO_FILE),
    (("run", *LRU, "--trace", NANO, "--timeline"), ".pftrace", NO_FILE),
    (("sweep", NANO, *LRU, "--out"), ".csv", NO_FILE),
    (("sweep", NANO, *LRU, "--plot"), ".png", NO_FILE),
    (("compare", NANO, *LRU, "--plot"), ".png", NO_FILE),
    (("curve", NANO, "--policy", "lru", "--out"), ".csv", NO_FILE),
    (("curve", NANO, "--policy", "lru", "--plot"), ".png", NO_FILE),
    ((*PLAN, "--plot"), ".png", NO_FILE),
    ((*GENERATE, "--out"), ".csv", NO_FILE),
    (("export", "csv", NANO, "--out"), ".csv", NO_FILE),
    (("profile", "--quick", "--device", "cpu", "--out"), ".toml", NO_FILE),
    ((*GENERATE, "--record"), "", OCCUPIED),
    ((*COLLECT, "--out"), "", OCCUPIED),
    (("import", "csv", "good.csv", "--out"), "", OCCUPIED),
    (("synth", "--requests", "1", "--coupling", "none", "--out"), "", OCCUPIED),
    (("synth", "--requests", "1", "--out"), "", NO_FOLDER),
    (("analyze", NANO, "--requests", "1", "--out"), "", NO_FOLDER),
    (("replay", *LRU, "--trace", NANO, "--out"), "", NO_FOLDER),
    (("experiment", "fig12", "--quick", "--out"), "", NO_FOLDER),
    (("reproduce", "--quick", "--out"), "", NO_FOLDER),
)
"""What is written: a command whose last argument is its path, its suffix, where it cannot be."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with everything that may be named by mistake."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").write_text("no use\n")
    for suffix in SUFFIXES:
        (home / f"broken.{suffix}").write_text("no use = [\n")
        (home / f"text.{suffix}").write_text("here before\n")
        (home / f"folder.{suffix}").mkdir()
    for name in ("folder", "full", "damaged", "half", "measured", "validation"):
        (home / name).mkdir()
    (home / "full" / "mine.txt").write_text("mine")
    (home / "damaged" / "manifest.json").write_text("{}")
    (home / "half" / "config.json").write_text("{}")
    (home / "measured" / "point.json").write_text("{}")
    (home / "validation" / "summary.json").write_text("{")
    made = oled_sim("export", "csv", NANO, "--requests", 1, "--out", home / "good.csv")
    assert made.returncode == 0
    return home


def refused(home, *arguments):
    """Run a command that is refused in one sentence and leaves everything as it was; its code."""
    if arguments[0] in ("collect", "generate", "replay", "profile") and find_spec("torch") is None:
        pytest.skip("the command needs torch")
    before = content(home)
    ended = oled_sim(*arguments, cwd=home)
    assert ended.stdout == ""
    said = ended.stderr.strip().splitlines()
    assert said[-1].startswith("Error: ") and "Traceback" not in ended.stderr, ended.stderr
    assert content(home) == before
    return ended.returncode


def content(home):
    return {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "path", "code"),
    [
        (command, path, code)
        for what, commands in OPENED.items()
        for command in commands
        for path, code in WRONG[what].items()
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_is_read(home, command, path, code):
    if command == ("experiment", "--quick"):
        path += ":MINE"
    if command in (("import",), ("export",)):
        command, path = (*command, f"{path}:mine"), NANO
    assert refused(home, *command, path) == code


@pytest.mark.parametrize(
    ("command", "path"),
    [(command, f"{path}{suffix}") for command, suffix, paths in WRITTEN for path in paths],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_is_written(home, command, path):
    assert refused(home, *command, path) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("command", [c for c, _, paths in WRITTEN if paths is NO_FOLDER])
def test_a_folder_that_may_not_be_written_to(home, tmp_path, command):
    tmp_path.chmod(0o500)
    assert refused(home, *command, tmp_path) == 2
