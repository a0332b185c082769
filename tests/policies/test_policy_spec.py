"""What users write after ``--policy``."""

import hashlib
import os

import pytest

from oled_sim.errors import PluginError, PolicyError, UsageError
from oled_sim.plugins import content_sha256
from oled_sim.policies.lfu import LFU
from oled_sim.policies.oled import OLED
from oled_sim.policy_spec import load_policy, parse_policy

MINE = '''
from dataclasses import dataclass
from oled_sim.policy import Policy, param

@dataclass
class Mine(Policy):
    """Mine."""

    decay: float = param(0.5, "how fast")
    deep: bool = param(False, "how deep")
'''


def test_name_variant_and_parameters():
    assert parse_policy("oled") == OLED()
    assert parse_policy("oled:priority") == OLED(allocate_by="uniform", dispatch_by="transfer")
    assert parse_policy("oled:priority+adapt") == OLED(dispatch_by="transfer")
    assert parse_policy("oled:priority+adapt+coop") == OLED()
    assert parse_policy("oled:dispatch=load") == OLED(dispatch_by="load")
    assert parse_policy("lfu:count=tokens, reset=request") == LFU("tokens", "request")
    wanted = OLED(allocate_by="uniform", dispatch_by="transfer", psi="square")
    assert parse_policy("oled:priority,psi=square") == wanted


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_file(mine):
    assert parse_policy(f"{mine}").describe() == {"decay": 0.5, "deep": False}
    assert parse_policy(f"{mine}:decay=2,deep=true").describe() == {"decay": 2.0, "deep": True}
    assert parse_policy(f"{mine}:Mine:decay=2").describe() == {"decay": 2.0, "deep": False}


def test_module():
    assert parse_policy("oled_sim.policies.lfu:LFU:count=tokens") == LFU("tokens")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("oledd", "unknown policy 'oledd': did you mean 'oled'"),
        ("oledd:priority", "unknown policy 'oledd': did you mean 'oled'"),
        ("oledd:psi=one", "unknown policy 'oledd': did you mean 'oled'"),
        ("oled:prioriti", "no variant 'prioriti': did you mean 'priority'"),
        ("oled:stail=id", "no parameter 'stail': did you mean 'stale'. parameters are psi, stale,"),
        ("oled:psi=cube", "cannot take psi=cube .*: give one of linear, square, sqrt, one"),
        ("oled:swaps=few", "cannot take swaps=few .*: give a whole number"),
        ("oled:slack=", "cannot take slack= .*: give a number"),
        ("oled:swaps=-1", "out of range"),
        ("oled:", "empty option"),
        ("oled:priority:psi=one", "too many colons"),
        ("nowhere.at_all:Thing", r"is not found .* or give the file itself, as in ./nowhere.py:T"),
        ("nowhere:Thing", "module 'nowhere' is not found"),
        ("json:JSONDecoder", "is not a policy"),
        ("oled_sim.policies.lfu:Nothing", "has no attribute 'Nothing'"),
        ("./nowhere.py", "no file nowhere.py"),
        ("./:x", "'./' is no name of a module"),
        ("", "unknown policy ''"),
    ],
)
def test_mistakes_are_one_sentence(spec, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse_policy(spec)
    assert "\n" not in str(caught.value)


def test_file_with_two_classes_must_be_told_which(mine):
    mine.write_text(MINE + MINE.replace("Mine", "Yours").replace('"""Yours."""', '"""Y."""'))
    with pytest.raises(UsageError, match="defines 2 classes"):
        parse_policy(f"{mine}")
    assert type(parse_policy(f"{mine}:Yours")).__name__ == "Yours"


def test_files_of_one_name_are_two_policies(mine, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / mine.name).write_text(MINE.replace("0.5", "0.25").replace("float", "int | float"))
    assert parse_policy(f"{mine}").describe()["decay"] == 0.5
    assert parse_policy(f"{other / mine.name}:decay=1").describe() == {"decay": 1, "deep": False}
    assert parse_policy(f"{mine}:decay=1").describe()["decay"] == 1.0


LIST = "xs: list[float] = param([1.0, 2.0], 'a list')\n    decay: float"
SEVERAL = MINE.replace("decay: float", LIST)


def test_a_file_is_what_it_holds_when_it_is_loaded(mine):
    """Also where bytecode of before has the same size and time."""
    first = load_policy(str(mine))
    assert content_sha256(first) == hashlib.sha256(mine.read_bytes()).hexdigest()
    before, time = mine.read_bytes(), mine.stat().st_mtime_ns
    mine.write_bytes(before.replace(b"0.5", b"0.7"))
    os.utime(mine, ns=(time, time))
    assert parse_policy(str(mine)).decay == 0.7
    assert content_sha256(load_policy(str(mine))) == hashlib.sha256(mine.read_bytes()).hexdigest()
    assert content_sha256(load_policy("lru")) is None


def test_parameters_with_several_values(mine):
    mine.write_text(SEVERAL)
    assert parse_policy(f"{mine}").describe()["xs"] == [1.0, 2.0]
    assert parse_policy(f"{mine}:xs=0.5/3,decay=2").describe() == {
        "xs": [0.5, 3.0], "decay": 2.0, "deep": False,
    }  # fmt: skip
    assert parse_policy(f"{mine}:xs=4").describe()["xs"] == [4.0]
    one, other = parse_policy(f"{mine}"), parse_policy(f"{mine}")
    assert one.describe()["xs"] is not other.describe()["xs"]
    with pytest.raises(UsageError, match=r"cannot take xs=1/two .*: give values such as 0.5/2"):
        parse_policy(f"{mine}:xs=1/two")


REFUSED = {
    **dict.fromkeys(("syntax", "exception", "exits", "nothing in it"), PluginError),
    **dict.fromkeys(("no dataclass", "needs", "unknown signal", "hidden hook"), PolicyError),
}
"""What is mended in the file; of the others another --policy may be meant."""

BROKEN = {
    "syntax": ("def", r"mine.py does not import: SyntaxError: .*line 1"),
    "exception": ("raise ValueError('a\\nb')", "does not import: ValueError: a b$"),
    "no dataclass": (
        MINE.replace("@dataclass", ""),
        "has parameters but is no dataclass: write @dataclass above it",
    ),
    "no policy": ("class Mine:\n    pass", "is not a policy"),
    "unknown annotation": (
        "from __future__ import annotations\n" + MINE.replace("float", "flaot"),
        "annotation that means nothing: NameError: name 'flaot' is not defined",
    ),
    "required parameter": (
        MINE.replace('param(0.5, "how fast")', "field(kw_only=True)").replace(
            "import dataclass", "import dataclass, field"
        ),
        "needs a value for 'decay': write .*mine.py:decay=value",
    ),
    "exits": ("import sys; sys.exit('usage: mine')", "does not import: SystemExit: usage: mine"),
    "needs": (
        MINE.replace("    decay", "    needs = 'gates'\n    decay"),
        r"has needs = 'gates': write frozenset\(",
    ),
    "unknown signal": (
        MINE.replace("    decay", "    needs = frozenset({'idz'})\n    decay"),
        r"needs the signal 'idz', which no trace has: did you mean 'ids'\? signals are ids, gates",
    ),
    "hidden hook": (
        MINE.replace("    decay", "    score: int = 1\n    decay"),
        "has a parameter called 'score', which is a hook: write score_by",
    ),
    "nothing in it": ("", "defines no class"),
    "refused by its own words": (
        MINE
        + "\n    def __post_init__(self):\n        from oled_sim.errors import UsageError\n"
        + "        raise UsageError('too fast')\n",
        "policy '.*mine.py': too fast",
    ),
    "refused": (
        MINE + "\n    def __post_init__(self):\n        raise ValueError('too\\nfast')\n",
        "refuses its parameters: ValueError: too fast",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_one_sentence(mine, case):
    text, words = BROKEN[case]
    mine.write_text(text)
    options = ":decay=2" if case in ("unknown annotation", "refused") else ""
    with pytest.raises(REFUSED.get(case, UsageError), match=words) as caught:
        parse_policy(f"{mine}{options}")
    assert "\n" not in str(caught.value)
