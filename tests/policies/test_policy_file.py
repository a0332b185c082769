"""Policies from a TOML file."""

import pytest

from oled_sim.errors import FileError, UsageError
from oled_sim.policies.lfu import LFU
from oled_sim.policies.lru import LRU
from oled_sim.policies.oled import OLED
from oled_sim.policy_spec import parse_policies, parse_policy

GRID = """
[[policy]]
name = "oled"
label = "oled-5"
allocate_every = 5
psi = "square"

[[policy]]
name = "oled:priority"
smoothing = 1

[[policy]]
name = "lru"
"""

MINE = '''
from dataclasses import dataclass
from oled_sim.policy import Policy, param

@dataclass
class Mine(Policy):
    """Mine."""

    weights: tuple[float, ...] = param((1.0,), "one per layer")
    deep: bool = param(False, "how deep")
'''


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


def test_every_table_is_a_policy_with_a_label(grid):
    assert parse_policies([str(grid)]) == {
        "oled-5": OLED(psi="square", allocate_every=5),
        "oled:priority,smoothing=1": OLED(
            allocate_by="uniform", dispatch_by="transfer", smoothing=1.0
        ),
        "lru": LRU(),
    }


def test_a_label_given_by_default_is_the_specification_that_means_the_same(grid):
    found = parse_policies([str(grid)])
    label = "oled:priority,smoothing=1"
    assert parse_policy(label) == found[label]


def test_one_policy_of_a_file(grid):
    assert list(parse_policies([f"{grid}:oled-5"])) == ["oled-5"]
    with pytest.raises(UsageError, match=r"labels no policy 'oled-6': labels are oled-5, oled:pri"):
        parse_policies([f"{grid}:oled-6"])


def test_files_and_specifications_keep_their_order(grid):
    assert list(parse_policies(["lfu:count=tokens", f"{grid}:lru", "ideal", "ideal"])) == [
        "lfu:count=tokens",
        "lru",
        "ideal",
    ]
    assert parse_policies(["lfu:count=tokens"]) == {"lfu:count=tokens": LFU("tokens")}


def test_two_policies_of_one_label_are_refused(grid):
    with pytest.raises(UsageError, match="two policies are called 'lru'"):
        parse_policies(["lru", str(grid)])
    grid.write_text('[[policy]]\nname="lru"\n[[policy]]\nname="lfu"\nlabel="lru"\n')
    with pytest.raises(FileError, match="policy 2: a policy before it is called 'lru' too"):
        parse_policies([str(grid)])


def test_a_python_file_is_looked_for_beside_the_toml_file(grid, monkeypatch, tmp_path):
    (grid.parent / "mine.py").write_text(MINE)
    grid.write_text('[[policy]]\nname = "./mine.py"\nweights = [0.5, 2]\ndeep = true\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    found = parse_policies(["../grid.toml"])
    (label,) = found
    # What a comma would tear apart on the command line.
    assert found[label].describe() == {"weights": (0.5, 2.0), "deep": True}
    assert label == "./mine.py:weights=[0.5, 2],deep=true"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[[policy]]\nname="oled"\nalocate_every=3',
            r"policy 1: policy 'oled' has no parameter 'alocate_every': did you mean"
            r" 'allocate_every'\? parameters are psi, stale, ",
        ),
        ('[[policy]]\nname="oled"\npsi="cube"', "cannot take psi=cube .*: give one of linear, sq"),
        ('[[policy]]\nname="oled"\nswaps="8"', "cannot take swaps=8 .*: give a whole number"),
        ('[[policy]]\nname="oled"\nswaps=true', "cannot take swaps=True .*: give a whole number"),
        ('[[policy]]\nname="oled"\nswaps=-1', "oled: swaps=-1 is out of range"),
        ('[[policy]]\nname="lru"\n[[policy]]\nname="oledd"', "policy 2: unknown policy 'oledd'"),
        ('[[policy]]\nlabel="a"', "policy 1: there is no name: write name = "),
        ('[[policy]]\nname="lru"\nlabel=3', "label = 3 is no text"),
        ('[[policy]]\nname=""', "name = '' is no text"),
        ('[policy]\nname="lru"', "holds no policy: write a ..policy.. table for each"),
        ("policy = [1]", "policy 1: 1 is no table"),
        ("", "holds no policy"),
        ('[[polices]]\nname="lru"', "holds 'polices': it may hold ..policy.. tables only"),
        ("[[policy]\n", r"is no TOML file: .*line 1"),
    ],
)
def test_mistakes_are_one_sentence(grid, text, words):
    grid.write_text(text)
    with pytest.raises(FileError, match=words) as caught:
        parse_policies([str(grid)])
    assert str(caught.value).startswith(str(grid)) and "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"no file .*none\.toml: give the path of a TOML file"):
        parse_policies([str(tmp_path / "none.toml")])
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(UsageError, match=r"cannot read policies .*folder\.toml: Is a directory"):
        parse_policies([str(tmp_path / "folder.toml")])
