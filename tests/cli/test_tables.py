"""What the commands print on terminals of several widths, and into a pipe."""

import json
import re

import numpy as np
import pytest
from test_sweep import call

from oled_sim.cli import run_table
from oled_sim.cli.tables import print_table
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace

GEOMETRY = RoutingGeometry((1, 2, 5), 16, 2)
WIDTHS = (80, *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 120)))


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(0)
    requests = [random_request(rng, GEOMETRY, request=i, passes=10, tokens=4) for i in range(5)]
    path = tmp_path_factory.mktemp("tables") / "made-up"
    write_trace(path, requests, GEOMETRY)
    return str(path)


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that makes rich see a terminal of that width."""

    def make(width):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.delenv("TERM", raising=False)

    return make


def printed(*arguments):
    """Return what a command prints, without colours."""
    code, out, _ = call(*arguments)
    assert code == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)


def tables_of(text, key):
    """Return, for every row, all its cells by column, over all tables that begin with ``key``."""
    rows, names, spans = [], None, []
    number = 0
    for line in text.splitlines():
        if line.split("  ")[0].strip() == key:
            spans = [(m.start(), m.end()) for m in re.finditer(r"\S+(?: \S+)*", line)]
            names, number = [line[a:b] for a, b in spans], 0
        elif names and re.match(r"\S+ +\d+ ", line):
            cells = re.findall(r"\S+(?: [kMGTi]*B\b)?", line)
            assert len(cells) == len(names)
            rows += [{}] if number == len(rows) else []
            rows[number] |= zip(names, cells, strict=True)
            number += 1
    return rows


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_of_a_run_is_whole_at_every_width(trace, terminal, width):
    arguments = ("run", "--trace", trace, "--policy", "lru", "--policy", "oled",
                 "--policy", "moe-infinity", "--cache", "2,4", "--batch", 2)  # fmt: skip
    results = json.loads(call(*arguments, "--json")[1])["results"]
    piped = tables_of(printed(*arguments), "policy")
    terminal(width)
    text = printed(*arguments)
    assert max(map(len, text[text.index("policy ") :].splitlines())) <= width
    rows = tables_of(text, "policy")
    assert rows == piped and len(rows) == len(results) == 6
    for row, result in zip(rows, results, strict=True):
        summary = result["summary"]
        passes = summary["passes"]
        assert (row["policy"], row["cache"]) == (result["spec"], str(result["cache"]))
        for name, key in (("TPOT", "tpot_us"), ("TTFT", "ttft_us"), ("p50", "pass_p50_us"),
                          ("p99", "pass_p99_us"), ("batch TPOT", "batch_tpot_us"),
                          ("commit", "commit_tpot_us")):  # fmt: skip
            assert row[name] == run_table.milliseconds(summary[key])
        assert row["hit"] == f"{100 * summary['hit_rate']:.2f}%"
        assert row["hit all"] == f"{100 * summary['hit_rate_with_prefill']:.2f}%"
        assert row["util"] == f"{100 * summary['utilization']:.1f}%"
        assert row["CPU"] == f"{summary['cpu_per_pass']:.1f}"
        copies = summary["demand_per_pass"] + summary["prefetched"] / passes
        assert row["H2D"] == f"{copies:.1f}"
        assert row["ahead"] == f"{summary['prefetched'] / passes:.1f}"
        fates = (summary[name] / passes for name in ("useful", "late", "wasted"))
        assert row["useful/late/wasted"] == "/".join(f"{fate:.1f}" for fate in fates)
        for what in ("busy", "critical"):
            times = (summary[f"{lane}_{what}_us"] for lane in ("gpu", "h2d", "cpu"))
            assert row[what] == "/".join(map(run_table.milliseconds, times))
    assert sum(r["summary"]["prefetched"] for r in results) > 0


def test_the_legend_explains_every_column(trace):
    out = printed("run", "--trace", trace, "--policy", "moe-infinity", "--cache", 2, "--batch", 2)
    head = next(line for line in out.splitlines() if line.startswith("policy"))
    legend = " ".join(out[out.index("cache: slots") :].split())
    explained = {name for names in re.findall(r"(?:^|[.;)] )([^.:;]+):", legend)
                 for name in names.split(", ")}  # fmt: skip
    assert set(re.findall(r"\S+(?: \S+)*", head)) - {"policy"} <= explained
    out = printed("run", "--trace", trace, "--policy", "lru", "--cache", 2)
    assert "batch TPOT" not in out and "wasted" not in out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "TRACE", "--policy", "lru", "--policy", "oled", "--cache", "2,4",
         "--h2d-gbs", "12,25", "--batch", "1,2"),
        ("compare", "TRACE", "--policy", "lru", "--policy", "oled:priority,psi=square",
         "--cache", "2,4", "--h2d-gbs", "12,25", "--batch", "1,2"),
        ("bounds", "TRACE", "--policy", "lru", "--policy", "oled:priority,psi=square",
         "--policy", "lfu:count=tokens", "--cache", "2", "--request", "3"),
        ("curve", "TRACE", "--policy", "lru", "--policy", "lfu:count=tokens", "--policy", "lfu"),
        ("trace", "info", "TRACE"),
        ("policies",),
        ("policies", "oled"),
    ],
    ids=lambda a: " ".join(a[:2]),
)  # fmt: skip
def test_no_table_loses_a_figure(trace, terminal, width, arguments):
    given = [trace if a == "TRACE" else a for a in arguments]
    words = set(printed(*given).split())
    terminal(width)
    narrow = printed(*given)
    assert "…" not in narrow.replace("=…", "")
    figures = {word for word in words if re.search(r"\d", word) and not word.startswith("/")}
    assert figures - set(narrow.split()) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--trace", "TRACE", "--policy", "lru", "--cache", "2,4"),
        ("bounds", "TRACE", "--policy", "lru", "--cache", "2"),
        ("trace", "info", "TRACE"),
        ("policies",),
    ],
    ids=lambda a: a[0],
)
def test_a_pipe_gets_no_blanks_at_the_ends_of_lines(trace, arguments):
    out = printed(*(trace if a == "TRACE" else a for a in arguments))
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_a_row_wider_than_the_console_overflows_whole(capsys):
    from rich.console import Console

    names, row = ["policy", "cache", "TPOT", "hit"], ["p" * 30, "4", "1.25", "66.11%"]
    print_table(Console(width=20), names, [row, None, row], keys=2, left=("policy",))
    line = "p" * 30 + "      4"
    first, second = capsys.readouterr().out.split("\n\npolicy", 1)
    assert first.splitlines()[1:] == [f"{line}  1.25", "", f"{line}  1.25"]
    assert second.splitlines()[1:] == [f"{line}  66.11%", "", f"{line}  66.11%"]


def test_names_stand_at_the_bottom_of_several_lines_and_cells_at_the_top(capsys):
    from rich.console import Console

    rows = [["cosine", "0.9", "not\nrecorded"], None, ["hits", "3", "4"]]
    print_table(Console(width=80), ["", "paper", "a\nreal"], rows, left=("",))
    assert capsys.readouterr().out.splitlines() == [
        "                      a",
        "        paper      real",
        "cosine    0.9       not",
        "               recorded",
        "",
        "hits        3         4",
    ]
