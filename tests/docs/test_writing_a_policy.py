"""docs/writing-a-policy.md does what it says: its files and commands are run as printed."""

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from oled_sim.policy import (
    Event,
    LayerHistory,
    PassEnd,
    PassInfo,
    Policy,
    RequestInfo,
    RequestSummary,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-policy.md").read_text(encoding="utf-8")
FEW = ("--requests", "3")
"""Added to the page's runs: one request of history, one to warm up, one that counts."""


def blocks(comment):
    """Return (argument, code) of the code blocks below ``<!-- comment argument -->``."""
    found = re.findall(rf"<!-- {comment}(.*?) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    return [(argument.strip(), code) for argument, code in found]


FILES = dict(blocks("file:"))
COMMANDS = [
    (where, shlex.split(line)) for where, code in blocks("run") for line in code.splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of someone who has nothing but the page and an installed oled-sim."""
    path = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def site(folder):
    """What ``pip install .`` of the page's package puts into site-packages."""
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    path = folder / "site"
    info = path / f"my_policies-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (path / "decayed_mass.py").write_text(FILES["decayed_mass.py"])
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return path


def call(arguments, folder, **environment):
    """Run a program in ``folder`` as its user would, and return what it prints."""
    program, *rest = arguments
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *rest],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_what_the_tests_below_run():
    wanted = {"decayed_mass.py", "policies.toml", "test_decayed_mass.py", "pyproject.toml"}
    assert wanted < set(FILES)
    assert len(COMMANDS) == 7


def test_the_example_is_about_thirty_lines_of_plain_numpy():
    code = FILES["decayed_mass.py"]
    assert 25 <= len([line for line in code.splitlines() if line.strip()]) <= 35
    assert set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)) == {
        "dataclasses", "typing", "numpy", "oled_sim",
    }  # fmt: skip


@pytest.mark.parametrize(
    "number",
    [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(COMMANDS) - 1)), 6],
)
def test_command(folder, site, number):
    where, command = COMMANDS[number]
    environment = {"PYTHONPATH": str(site)} if where == "installed" else {}
    if command[1] == "policies":
        out = call(command, folder, **environment)
        assert "Keep the experts with the most gate mass" in out
        assert "cpu_tokens=1" in out and "decay=0.7" in out
        return
    found = json.loads(call([*command, *FEW, "--json"], folder, **environment))
    assert len(found["results"]) >= 1
    assert all(result["summary"]["tpot_us"] > 0 for result in found["results"])


def test_parameters_and_labels_reach_the_results(folder):
    command = ["oled-sim", "run", "--policy", "policies.toml", "--cache", "40", *FEW, "--json"]
    slow, priority = json.loads(call(command, folder))["results"]
    assert (slow["spec"], slow["parameters"]) == ("slow", {"decay": 0.95, "cpu_tokens": 1})
    assert (priority["spec"], priority["parameters"]["psi"]) == (
        "oled:priority,psi=square",
        "square",
    )


@pytest.mark.slow
def test_the_page_s_own_test_file_passes_outside_of_the_repository(folder):
    out = call(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder], folder)
    assert int(re.search(r"(\d+) passed", out)[1]) > 40


def test_the_page_s_python_prints_figures(folder):
    tpot_us, hit_rate = map(float, call(["python", "in_python.py"], folder).split())
    assert tpot_us > 0 and 0 < hit_rate < 1


def public(kind):
    return [name for name in vars(kind) if not name.startswith("_")]


def test_every_hook_is_described():
    hooks = [
        n for n in public(Policy) if inspect.isfunction(getattr(Policy, n)) and n != "describe"
    ]
    assert len(hooks) >= 12
    for hook in hooks:
        arguments = list(inspect.signature(getattr(Policy, hook)).parameters)[1:]
        assert f"| `{hook}({', '.join(arguments)})` |" in PAGE
    for attribute in (
        "needs",
        "wants",
        "learns",
        "variants",
        "replaces_queue",
        "allocation_period",
    ):
        assert hasattr(Policy, attribute) and f"`{attribute}" in PAGE


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("`event`, all", [f.name for f in fields(Event)] + ["missed"]),
        ("`end` (`end_iteration`)", PassEnd._fields),
        ("`history` (`allocate`)", LayerHistory._fields),
        ("`info` (`begin_request`)", RequestInfo._fields),
        ("`info` (`begin_iteration`)", PassInfo._fields),
        ("`summary` (`end_request`)", RequestSummary._fields),
    ],
)
def test_everything_that_a_policy_sees_is_described(heading, names):
    section = PAGE[PAGE.index(heading) : PAGE.index("## Needs")]
    assert [name for name in names if f"`{name}`" not in section] == []
