"""``oled-sim policies`` from the outside."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from oled_sim import plugins
from oled_sim.cli.main import main
from oled_sim.policies.oled import OLED
from oled_sim.policy import parameters
from oled_sim.policy_spec import parse_policy

MINE = '''
from dataclasses import dataclass, field
from oled_sim.policy import Policy, param

@dataclass
class Mine(Policy):
    """Keeps what I like.

    Follows no paper.
    """

    needs = frozenset({"ids", "gates", "future"})
    learns = True
    variants = {"deep": {"depth": 9}}

    depth: int = param(3, "how deep [bold]")
    wide: bool = param(False, "whether wide")
    weights: tuple[float, ...] = field(default=(1.0,), metadata={"help": "one per layer"})
    must: str = field(kw_only=True, metadata={"help": "no default"})
'''


def policies(*arguments):
    """Return exit code, stdout and stderr of ``oled-sim policies``."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(["policies", *map(str, arguments)])
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def listed(*arguments):
    code, out, err = policies(*arguments, "--json")
    assert (code, err) == (0, "")
    return {policy["name"]: policy for policy in json.loads(out)["policies"]}


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package with one module and its entry points."""

    def put(module, text, **names):
        site = tmp_path / "site"
        info = site / f"{module}-1.5.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.5\n")
        lines = [f"{name} = {module}:{attribute}\n" for name, attribute in names.items()]
        (info / "entry_points.txt").write_text("[oled_sim.policies]\n" + "".join(lines))
        monkeypatch.syspath_prepend(str(site))

    yield put
    for module in ("theirs", "ruins"):
        sys.modules.pop(module, None)


def test_what_is_installed_meanwhile_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = plugins.names(plugins.POLICIES)
    info = tmp_path / "later-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[oled_sim.policies]\nlater = later:Later\n")
    # Clocks of file systems are coarse: as if the package had come a second later.
    seconds = tmp_path.stat().st_mtime + 1
    os.utime(tmp_path, (seconds, seconds))
    assert set(plugins.names(plugins.POLICIES)) - set(before) == {"later"}


def test_every_registered_policy_is_listed_with_its_parameters():
    code, out, err = policies()
    assert (code, err) == (0, "")
    for name in plugins.names(plugins.POLICIES):
        assert f"\n{name}\n" in f"\n{out}"
    assert "OLED-MoE, section 4 of the paper" in out
    assert "allocate_every=5" in out and "denoise and commit passes between allocations" in out
    assert "(linear | square | sqrt | one)" in out
    assert "needs confidence, gates, ids" in out
    assert "oled:priority+adapt is dispatch=transfer" in out


def test_json_says_the_same_for_programs():
    found = listed()
    assert sorted(found) == plugins.names(plugins.POLICIES)
    oled = found["oled"]
    assert oled["package"].startswith("oled-sim ")
    assert oled["needs"] == ["confidence", "gates", "ids"]
    assert (oled["clairvoyant"], oled["learns"]) == (False, False)
    assert oled["variants"]["priority+adapt"] == {"dispatch": "transfer"}
    assert [p["name"] for p in oled["parameters"]] == list(parameters(OLED))
    assert oled["parameters"][0] == {
        "name": "psi", "type": "linear | square | sqrt | one", "default": "linear",
        "required": False, "help": "ψ, how confidence weighs",
    }  # fmt: skip
    assert found["ideal"]["clairvoyant"] is True


def test_defaults_that_are_listed_are_those_in_force():
    for name, policy in listed().items():
        assert parse_policy(name).describe() == {
            p["name"]: p["default"] for p in policy["parameters"]
        }


def test_name_prints_the_whole_docstring():
    code, out, _ = policies("oled")
    assert code == 0
    assert "What the paper leaves open, and what is chosen here:" in out
    assert "Order among residents of priority 0" in out
    assert "lfu" not in out


def test_file(mine):
    code, out, _ = policies(mine)
    assert code == 0
    for words in (
        "Keeps what I like.",
        "Follows no paper.",
        "needs gates, ids\n",
        "clairvoyant: sees the future",
        "learns from the requests of the history split",
        ":deep is depth=9",
        "depth=3",
        "how deep [bold] (int)",
        "wide=false",
        "must=…",
    ):
        assert words in out.replace(" \n", "\n")
    (policy,) = listed(mine).values()
    assert policy["summary"] == "Keeps what I like."
    assert policy["package"] is None
    assert policy["parameters"][-1]["required"] is True
    assert policy["parameters"][2]["default"] == [1.0]


def test_policy_of_an_installed_package(install):
    install("theirs", MINE, their_own="Mine")
    code, out, err = policies()
    assert (code, err) == (0, "")
    assert "their_own" in out and "from theirs 1.5" in out and "Keeps what I like." in out
    assert listed("their_own")["their_own"]["package"] == "theirs 1.5"


def test_package_that_does_not_load_does_not_hide_the_others(install):
    install("ruins", "raise RuntimeError('fell\\nover')", fallen="Mine")
    code, out, err = policies()
    assert (code, err) == (0, "")
    assert "plug-in 'fallen' (ruins:Mine) does not import: RuntimeError: fell over" in " ".join(
        out.split()
    )
    assert "allocate_every=5" in out
    assert "RuntimeError" in listed()["fallen"]["error"]
    code, out, err = policies("fallen")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and "RuntimeError: fell over" in err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("olde", "unknown policy 'olde': did you mean 'oled'"),
        ("oled:psi=one", "'oled:psi=one' is more than a policy's name: give 'oled' alone"),
        ("./nowhere.py", "no file nowhere.py"),
    ],
)
def test_mistakes_are_one_sentence(name, words):
    code, out, err = policies(name)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_policy_without_docstring_and_parameters(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom oled_sim.policy import Policy\n"
        "@dataclass\nclass Bare(Policy):\n    pass\n"
    )
    assert "Its author says nothing about it." in policies(path)[1]
    assert listed(path)[str(path)]["doc"] == ""


def test_help_imports_nothing_heavy():
    program = (
        "import sys, oled_sim.cli.policies\n"
        "print(sorted({'torch', 'numba', 'numpy', 'rich', 'msgspec'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
