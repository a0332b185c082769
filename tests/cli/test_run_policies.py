"""Policies of a user's own under ``oled-sim run``: what goes wrong is said in one sentence."""

import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from oled_sim.cli.main import main
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace

GEOMETRY = RoutingGeometry((1, 2, 5), 16, 2)

HEADER = """\
from dataclasses import dataclass
import numpy as np
from oled_sim.policy import Lane, Policy, Prefetch, param


@dataclass
class Bad(Policy):
    '''Breaks the contract.'''

"""
FIRST_LINE = HEADER.count("\n") + 1


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(0)
    requests = [random_request(rng, GEOMETRY, request=i, passes=8, tokens=4) for i in range(3)]
    path = tmp_path_factory.mktemp("run") / "made-up"
    write_trace(path, requests, GEOMETRY)
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    """Return exit code, stdout and stderr of ``oled-sim run``."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(["run", *map(str, arguments)])
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def write_policy(folder, body):
    lines = [f"    {line}".rstrip() for line in body.strip("\n").split("\n")]
    (folder / "bad.py").write_text(HEADER + "\n".join(lines) + "\n")


def hook(name, arguments, statement):
    """Return the source of a hook that does one thing."""
    return f"def {name}(self{arguments}):\n    {statement}"


def dispatch(statement):
    return hook("dispatch", ", event", statement)


def score(statement):
    return hook("score", ", layer, event", statement)


def allocate(statement):
    return "allocation_period = 1\n" + hook("allocate", ", history", statement)


RAISES = "raise ValueError('first\\nsecond')"
RAISED = r"{hook}\(\) raised ValueError: first second \(bad.py, line \d+\)"

# Requests: one is history, which Bad does not learn from, one warm-up, one counted. So the first
# event is that of request 1, pass 0, layer 1.
GATE = "request 1, pass 0, layer 1"
BROKEN = {
    # What the body does: (its source, where the sentence puts it, what the sentence says)
    "dispatch raises": (dispatch(RAISES), GATE, RAISED.format(hook="dispatch")),
    "dispatch exits": (
        dispatch("raise SystemExit(0)"),
        GATE,
        r"dispatch\(\) raised SystemExit: 0 \(bad.py, ",
    ),
    "score raises": (score(RAISES), GATE, RAISED.format(hook="score")),
    "prefetch raises": (hook("prefetch", ", event", RAISES), GATE, RAISED.format(hook="prefetch")),
    "place raises": (
        hook("place", ", setting", RAISES),
        "the start of the run",
        RAISED.format(hook="place"),
    ),
    "begin_request raises": (
        hook("begin_request", ", info", RAISES),
        "request 1",
        RAISED.format(hook="begin_request"),
    ),
    "end_iteration raises": (
        hook("end_iteration", ", end", RAISES),
        "request 1, pass 0",
        RAISED.format(hook="end_iteration"),
    ),
    "end_request raises": (
        hook("end_request", ", summary", RAISES),
        "request 1",
        RAISED.format(hook="end_request"),
    ),
    "allocate raises": (allocate(RAISES), "request 1, pass 1", RAISED.format(hook="allocate")),
    "allocation_period raises": (
        "@property\n" + hook("allocation_period", "", RAISES),
        "request 1, pass 1",
        "allocation_period raised ValueError: first second",
    ),
    "allocation_period is no number": (
        "allocation_period = 'often'",
        "request 1, pass 1",
        "allocation_period is 'often' instead",
    ),
    "late": (
        score("return np.zeros(self.experts) / (event.pass_index < 4 or 1 // (event.layer != 2))"),
        "request 1, pass 4, layer 5",
        r"score\(\) raised ZeroDivisionError: .* \(bad.py, line \d+\)",
    ),
    "mistyped name": (
        dispatch("return event.mised"),
        GATE,
        r"dispatch\(\) raised AttributeError: 'Event' object has no attribute 'mised'",
    ),
    "asks for the future": (
        score("return -event.next_use"),
        GATE,
        r"score\(\) raised AttributeError: 'Event' object has no attribute 'next_use'",
    ),
    "sets residents without declaring it": (
        hook("reside", ", event", "return event.experts[:1]"),
        None,
        r"implements reside\(\), which looks into the future, without declaring 'future'",
    ),
    "NaN score": (
        score("return np.where(np.arange(self.experts) == 3, np.nan, 0.0)"),
        GATE,
        r"score\(\) returned NaN for expert 3",
    ),
    "NaN priority": (
        hook("prefetch", ", event", "return [Prefetch(0, 1, float('nan'))]"),
        GATE,
        r"prefetch\(\) returned the impossible prefetch \[0.0, 1.0, nan\]",
    ),
    "score per activated expert": (
        score("return np.zeros(self.experts + 1)"),
        GATE,
        r"score\(\) returned float64 \[17\] instead of numbers \[16\]",
    ),
    "score returns nothing": (
        score("np.zeros(self.experts)"),
        GATE,
        r"score\(\) returned None instead of numbers",
    ),
    "score is ragged": (
        score("return [[1.0], [1.0, 2.0]]"),
        GATE,
        r"score\(\) returned a list that is no array of numbers",
    ),
    "lanes per expert of the layer": (
        dispatch("return np.zeros(self.experts, dtype=int)"),
        GATE,
        r"dispatch\(\) returned int64 \[16\] instead of integers \[\d\]",
    ),
    "lanes are a mask": (
        dispatch("return event.missed"),
        GATE,
        r"dispatch\(\) returned bool \[\d\] instead of integers \[\d\]",
    ),
    "no such lane": (
        dispatch("return np.full(len(event.experts), 3)"),
        GATE,
        r"dispatch\(\) returned something that is no lane for expert \d+",
    ),
    "GPU for a miss": (
        dispatch("return np.full(len(event.experts), Lane.GPU)"),
        GATE,
        r"dispatch\(\) sends expert \d+ to the GPU, but it is not resident",
    ),
    "transfer of a resident": (
        dispatch("return np.full(len(event.experts), Lane.TRANSFER)"),
        "request 1, pass [1-7], layer",
        r"dispatch\(\) transfers expert \d+, but it is resident",
    ),
    "capacities exceed the budget": (
        allocate("return history.capacity + 1.0"),
        "request 1, pass 1",
        r"allocate\(\) returned 15 slots in all, but the budget is 12",
    ),
    "capacities leave slots unused": (
        allocate("return history.capacity * 0.5"),
        "request 1, pass 1",
        "6 slots in all, but the",
    ),
    "negative capacity": (
        allocate("return np.array([-1.0, 6.0, 7.0])"),
        "request 1, pass 1",
        "a negative or NaN cap",
    ),
    "NaN capacity": (
        allocate("return history.utilization * np.nan"),
        "request 1, pass 1",
        "a negative or NaN c",
    ),
    "capacity of all layers together": (
        allocate("return float(history.budget)"),
        "request 1, pass 1",
        r"allocate\(\) returned float64 \[\] instead of numbers \[3\]",
    ),
    "residents of one layer": (
        hook("place", ", setting", "return np.zeros(self.experts, dtype=bool)"),
        "the start of the run",
        r"place\(\) returned bool \[16\] instead of bool \[3, 16\]",
    ),
    "residents beyond the budget": (
        hook("place", ", setting", "return np.ones((3, self.experts), dtype=bool)"),
        "the start of the run",
        r"place\(\) fills 16 of 4 slots of layer 1",
    ),
    "prefetch of a layer's own number": (
        hook("prefetch", ", event", "return [Prefetch(5, 0, 1.0)]"),
        GATE,
        r"prefetch\(\) returned the impossible prefetch \[5.0, 0.0, 1.0\]",
    ),
    "prefetch of half an expert": (
        hook("prefetch", ", event", "return [(0, 0.5, 1.0)]"),
        GATE,
        "the impossible prefetch",
    ),
    "prefetch without priority": (
        hook("prefetch", ", event", "return [(0, 1)]"),
        GATE,
        r"prefetch\(\) returned int64 \[1, 2\] instead of \(layer, expert, priority\)s",
    ),
    "prefetches of different lengths": (
        hook("prefetch", ", event", "return [(0, 1), (0, 1, 2.0)]"),
        GATE,
        "a list that is no array",
    ),
    "changes what it is shown": (
        dispatch("event.tokens[:] = 0"),
        GATE,
        "raised ValueError: .* read-only",
    ),
    "changes the setting": (
        hook("place", ", setting", "setting.expert_bytes[:] = 1"),
        "the start of the run",
        "raised ValueError: .* read-only",
    ),
    "changes the trace": (
        hook("end_iteration", ", end", "end.confidence[:] = 1"),
        "request 1, pass 0",
        "raised ValueError: .* read-only",
    ),
    "compiled raises": (hook("compiled", "", RAISES), "request 1", RAISED.format(hook="compiled")),
    "compiled is no kernel": (
        hook("compiled", "", "return self.score"),
        "request 1",
        r"compiled\(\) returned .* instead of a Compiled",
    ),
    "cannot be copied": (
        "def __post_init__(self):\n    self._file = open(__file__)",
        None,
        "cannot be copied, which every run does: TypeError",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_policy_is_one_sentence(trace, folder, case):
    body, where, words = BROKEN[case]
    write_policy(folder, body)
    code, out, err = run("--trace", trace, "--policy", "./bad.py", "--cache", 4)
    assert (code, out) == (1, "")
    assert err.startswith("Error: policy './bad.py'") and err.count("\n") == 1
    assert "Traceback" not in err
    assert re.search(words, err)
    if where is not None:
        assert re.search(f" at {where}[:,]? ?", err)


def test_exception_names_the_line_of_the_policy(trace, folder):
    # The division fails inside numpy's code, called from the second line of the hook.
    write_policy(
        folder, "def score(self, layer, event):\n    return np.linalg.inv(np.zeros((2, 2)))"
    )
    _, _, err = run("--trace", trace, "--policy", "./bad.py", "--cache", 4)
    assert f"(bad.py, line {FIRST_LINE + 1})" in err


@pytest.mark.parametrize(
    ("body", "option", "words"),
    [
        (hook("rescore", ", resident", RAISES), ("--scope", "global"), "rescore() raised"),
        (
            hook("rescore", ", resident", "return np.full(resident.shape, np.nan)"),
            ("--scope", "global"),
            "rescore() returned NaN",
        ),
        (hook("revise", ", layer, event", RAISES), ("--confidence", "end"), "revise() raised"),
        (
            hook("revise", ", layer, event", "return np.full(self.experts, np.nan)"),
            ("--confidence", "end"),
            "revise() returned NaN",
        ),
        (hook("clear", "", RAISES), ("--cold",), "clear() raised"),
    ],
)
def test_hooks_of_other_rules(trace, folder, body, option, words):
    write_policy(folder, body)
    arguments = ("--trace", trace, "--policy", "./bad.py", "--cache", 4)
    assert run(*arguments)[0] == 0  # not asked otherwise
    code, out, err = run(*arguments, *option)
    assert (code, out) == (1, "")
    assert words in err and err.count("\n") == 1


def test_real_command_prints_one_sentence_and_no_traceback(trace, folder):
    write_policy(folder, dispatch("return event.experts / 0 @ event.experts"))
    done = subprocess.run(
        [Path(sys.executable).parent / "oled-sim", "run", "--trace", trace, "--policy", "./bad.py",
         "--cache", "4"],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    # numpy's own warning about the division comes first, with file and line.
    *_, last = done.stderr.splitlines()
    assert last.startswith(f"Error: policy './bad.py' at {GATE}: dispatch() returned ")
    assert "Traceback" not in done.stderr


def test_kernel_that_raises_is_one_sentence(trace, folder):
    write_policy(folder, "def compiled(self):\n    return Compiled(divide, (0,))")
    text = (folder / "bad.py").read_text().replace("import Lane", "import Compiled, Lane")
    (folder / "bad.py").write_text(
        f"{text}\n\ndef divide(own, gate, v, layer, resident, lanes, scores):\n"
        "    lanes[:] = 1 // own[0]\n"
    )
    done = subprocess.run(
        [Path(sys.executable).parent / "oled-sim", "run", "--trace", trace, "--policy", "./bad.py",
         "--cache", "4"],
        capture_output=True, text=True, check=False, cwd=folder,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},  # compiling the whole loop takes its time
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Error: policy './bad.py' at {GATE}: the kernel of compiled() raised ZeroDivisionError:"
        f" integer division or modulo by zero (bad.py, line {text.count(chr(10)) + 4})\n"
    )


def test_policies_of_a_toml_file(trace, folder):
    (folder / "grid.toml").write_text(
        '[[policy]]\nname = "oled"\nlabel = "often"\nallocate_every = 1\n'
        '[[policy]]\nname = "lfu"\ncount = "tokens"\n'
    )
    arguments = ("--trace", trace, "--cache", 4, "--json", "--policy")
    code, out, err = run(*arguments, "grid.toml", "--policy", "lru")
    assert code == 0, err  # a slow machine shows progress
    results = {r["spec"]: r for r in json.loads(out)["results"]}
    assert list(results) == ["often", "lfu:count=tokens", "lru"]
    assert results["often"]["parameters"]["allocate_every"] == 1
    # The same figures as by a specification.
    for label, spec in (("often", "oled:allocate_every=1"), ("lfu:count=tokens",) * 2):
        (same,) = json.loads(run(*arguments, spec)[1])["results"]
        assert same["summary"] == results[label]["summary"]


def test_unknown_parameter_of_a_toml_file_is_one_sentence(trace, folder):
    (folder / "grid.toml").write_text('[[policy]]\nname = "oled"\nallocate_evry = 1\n')
    code, out, err = run("--trace", trace, "--cache", 4, "--policy", "grid.toml")
    assert (code, out) == (1, "")
    assert err.startswith("Error: grid.toml, policy 1: policy 'oled' has no parameter")
    assert "did you mean 'allocate_every'? parameters are psi, stale, " in err
    assert err.count("\n") == 1
