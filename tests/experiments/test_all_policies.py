"""The table of all policies, and that docs/policies.md shows what the script finds."""

import re
from pathlib import Path

import pytest

from oled_sim import plugins
from oled_sim.experiments._tables import TRACES
from oled_sim.experiments.all_policies import markdown, measure, specifications

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
CACHES = ["16,40,80"]


def rows_of(text):
    """Return the lines of a table by trace and policy."""
    found, trace = {}, None
    for line in text.splitlines():
        if line.startswith("**nano"):
            trace = line.split("**")[1]
        elif line.startswith("| `") and trace:
            found[trace, line.split("`")[1]] = line
    return found


def test_page_shows_every_policy_on_every_trace():
    named = set(plugins.names(plugins.POLICIES))
    assert named <= {spec.split(":")[0] for spec in specifications()}
    assert set(rows_of(PAGE)) == {(t, spec) for t in TRACES for spec in specifications()}


@pytest.mark.slow
def test_page_shows_what_is_found():
    found = rows_of(markdown(measure(["nano-gsm8k"], CACHES, ["lru", "full", "oled", "ideal"])))
    assert len(found) == 4
    assert found == {key: rows_of(PAGE)[key] for key in found}


def test_page_has_a_sentence_on_every_policy():
    text = PAGE.split("**nano")[0]
    for name in plugins.names(plugins.POLICIES):
        assert re.search(rf"^\| `{re.escape(name)}`", text, re.MULTILINE), name


def test_fastest_stand_first():
    found = measure(["nano-gsm8k"], ["16", "80"], ["no-cache", "lru", "ideal"], requests=3)
    assert [(row.budget.cache, row.spec) for row in found.rows["nano-gsm8k"]] == [
        (16, "ideal"), (16, "lru"), (16, "no-cache"),
        (80, "ideal"), (80, "lru"), (80, "no-cache"),
    ]  # fmt: skip
