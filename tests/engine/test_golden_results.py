"""Every built-in policy gives the figures that it gave before, to the last bit."""

import json

import pytest
from golden_results import FIGURES, FOLDER, RUNS, TRACES, built_in, results_of

from oled_sim import plugins

ADVICE = """
{name}: {count} figures differ from tests/engine/golden/{name}.json, such as
{examples}
If that is on purpose, run `python tests/engine/golden_results.py`, look at the diff, and commit the
files together with the change and the reason for it. If it is not, the change broke something."""
EXAMPLES = 12


def flat(results, path=()):
    """Yield (path, value) of every figure."""
    if isinstance(results, dict):
        for key, value in results.items():
            yield from flat(value, (*path, key))
    else:
        yield path, results


def differences(expected, found):
    """Return one line per figure that differs, by the repr of both values."""
    before, after = dict(flat(expected)), dict(flat(found))
    return [
        f"  {', '.join(path)}: {before.get(path, 'absent')!r} -> {after.get(path, 'absent')!r}"
        for path in before | after
        if repr(before.get(path, "absent")) != repr(after.get(path, "absent"))
    ]


@pytest.mark.parametrize("name", [TRACES[0], pytest.param(TRACES[1], marks=pytest.mark.slow)])
def test_golden_results(name):
    expected = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    lines = differences(expected, results_of(name))
    if lines:
        examples = "\n".join(lines[:EXAMPLES])
        pytest.fail(ADVICE.format(name=name, count=len(lines), examples=examples), pytrace=False)


@pytest.mark.parametrize("name", TRACES)
def test_golden_results_cover_every_policy_and_say_something(name):
    expected = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert list(expected) == list(RUNS)
    specs = built_in()
    assert {spec.split(":")[0] for spec in specs} <= set(plugins.names(plugins.POLICIES))
    rows = expected["layer"]
    assert set(rows) <= set(specs) and {"lru", "lfu", "oled", "ideal"} <= set(rows)
    # Policies differ, and so do capacities: nothing is compared with itself.
    references = {name: rows.pop(name) for name in ("full", "no-cache")}
    times = [policy["C=40"]["tpot_us"] for policy in rows.values()]
    assert len(set(times)) == len(rows)
    assert all(p["C=8"]["tpot_us"] > p["C=40"]["tpot_us"] > p["C=100"]["tpot_us"]
               for p in rows.values())  # fmt: skip
    assert {name: list(row) for name, row in references.items()} == {
        "full": ["C=128"], "no-cache": ["C=0"],
    }  # fmt: skip
    assert all(set(row) == set(FIGURES) for policy in [*rows.values(), *references.values()]
               for row in policy.values())  # fmt: skip


def test_a_difference_in_the_last_bit_is_seen():
    assert differences({"a": {"b": 0.1 + 0.2}}, {"a": {"b": 0.3}}) == [
        "  a, b: 0.30000000000000004 -> 0.3"
    ]
    assert differences({"a": 1, "b": None}, {"b": None}) == ["  a: 1 -> 'absent'"]
    assert differences({"a": None}, {"a": None}) == []
