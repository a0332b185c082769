"""Hooks that few policies use: the start of a pass, residents everywhere, notes, wanted signals."""

import json
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pyarrow.parquet as pq
import pytest

from oled_sim.cli.main import main
from oled_sim.engine.runner import simulate
from oled_sim.engine.source import MemoryTrace
from oled_sim.errors import PolicyError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.lru import LRU
from oled_sim.policy import Policy, Prefetch
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace.schema import SIGNALS, Kind

ONE = RoutingGeometry((1,), 8, 1)
TWO = RoutingGeometry((3, 7), 8, 1)


class AtStart(Policy):
    """Asks for expert 5 of layer 1 at the start of every pass."""

    wants = frozenset({"embedding"})

    def place(self, setting):
        self.infos = []

    def begin_iteration(self, info):
        self.infos.append(info)
        return [Prefetch(1, 5, 1.0)]


def test_start_of_a_pass():
    # The copy of 150 starts with the pass and has arrived at the first gate, at 275: a hit.
    trace = request_by_hand(TWO, [[[[0]], [[5]]], [[[1]], [[5]]]], request=4)
    run = Run(AtStart(), TWO, trace, 2)
    assert run.count("hits") == [0, 1, 0, 1]
    [prefetch] = run.jobs("prefetch")  # once: in pass 1 it is resident already
    assert prefetch == ("prefetch", 0, 150)
    infos = run.simulation.policy.infos
    assert [(i.request, i.pass_index, i.kind, i.block) for i in infos] == [
        (4, 0, Kind.PREFILL, 0),
        (4, 1, Kind.DENOISE, 0),
    ]
    assert all(i.embedding is None for i in infos)


def test_start_of_a_pass_of_a_batch_names_a_request_that_is_there():
    long, short = ([[[[0]]]] * n for n in (3, 2))
    traces = [request_by_hand(ONE, short, request=1), request_by_hand(ONE, long, request=2)]

    class Watching(AtStart):
        def begin_iteration(self, info):
            self.infos.append(info.request)
            return ()

    run = Run(Watching(), ONE, traces, 1, batch=2)
    assert run.simulation.policy.infos == [1, 1, 2]


def test_embedding_is_that_of_the_pass():
    rng = np.random.default_rng(0)
    trace = random_request(rng, TWO, passes=3, signals=SIGNALS)
    run = Run(AtStart(), TWO, trace, 2)
    for info, expected in zip(run.simulation.policy.infos, trace.embedding, strict=True):
        assert info.embedding.tolist() == expected.astype(np.float32).tolist()
        assert not info.embedding.flags.writeable


def test_a_subclass_that_prefetches_at_the_start_is_not_run_compiled():
    class Eager(LRU):
        begin_iteration = AtStart.begin_iteration

        def compiled(self):
            self.infos = []
            return super().compiled()

    class Quiet(Eager):
        def place(self, setting):
            super().place(setting)
            self.infos = []

    trace = request_by_hand(TWO, [[[[0]], [[5]]]])
    run = Run(Quiet(), TWO, trace, 2)
    assert run.simulation._compiled() is None
    assert run.count("hits") == [0, 1]


class Looking(Policy):
    """Notes who is resident anywhere at each gate."""

    def place(self, setting):
        self.setting, self.seen = setting, []

    def dispatch(self, event):
        found = self.setting.residents()
        self.seen.append([np.flatnonzero(layer).tolist() for layer in found])
        found[:] = True  # its own copy
        return super().dispatch(event)


def test_residents_of_all_layers():
    trace = request_by_hand(TWO, [[[[0]], [[5]]], [[[1]], [[5]]]])
    run = Run(Looking(), TWO, trace, 1)
    assert run.simulation.policy.seen == [[[], []], [[0], []], [[0], [5]], [[1], [5]]]


def test_scores_age_before_an_arrival_too():
    """Under global scope an arriving prefetch meets the scores of the moment, not of the gate."""

    class Ageing(Policy):
        def place(self, setting):
            self.arriving = False

        def score(self, layer, event):
            self.arriving = event is None
            return super().score(layer, event)

        def rescore(self, resident):
            # At gates all are equal; at an arrival expert 0 of layer 0 is worth nothing.
            table = np.ones(resident.shape)
            table[0, 0] = 0.0 if self.arriving else 1.0
            return table

        def prefetch(self, event):
            return [Prefetch(1, 5, 1.0)] if event.layer == 0 else ()

    # Pool of 2 with 0 and then 1 of layer 0 (equal scores, 1 used last); 5 of layer 1 arrives
    # while layer 0 runs and is admitted when it ends. At the gate's scores 5, never used, would
    # be dropped.
    trace = request_by_hand(TWO, [[[[0], [1]], [[7]]]])
    run = Run(Ageing(), TWO, trace, 1, scope="global")
    assert run.jobs("prefetch") == [("prefetch", 575, 725)]
    assert run.residents(0) == [1]


def result_of(policy):
    source = MemoryTrace(ONE, [request_by_hand(ONE, [[[[0]]]] * 2, request=i) for i in range(2)])
    return simulate(source, policy, costs_by_hand(), 1, spec="mine")


def test_notes_reach_the_results():
    class Talking(Policy):
        def notes(self):
            return ["it could not see."]

    assert result_of(Talking()).notes == ("it could not see.",)
    assert result_of(Talking()).to_dict()["notes"] == ("it could not see.",)
    assert result_of(Policy()).notes == ()


def test_notes_must_be_sentences():
    class Mute(Policy):
        def notes(self):
            return "a single string"

    with pytest.raises(
        PolicyError, match=r"notes\(\) returned 'a single string' instead of a list"
    ):
        result_of(Mute())


WANTS = '''
from dataclasses import dataclass
from oled_sim.policy import Policy


@dataclass
class Wanting(Policy):
    """Says whether it met what it wants."""

    wants = frozenset({"full_gate", "embedding"})

    def place(self, setting):
        self.met = set()

    def begin_iteration(self, info):
        self.met |= {"embedding"} if info.embedding is not None else set()
        return ()

    def prefetch(self, event):
        self.met |= {"full_gate"} if event.full_gate is not None else set()
        return ()

    def notes(self):
        return [f"met {', '.join(sorted(self.met)) or 'nothing'}."]
'''


@pytest.mark.parametrize(
    ("signals", "met"),
    [(SIGNALS, "embedding, full_gate"), (("ids", "gates", "full_gate"), "full_gate")],
)
def test_wanted_signals_are_read_where_the_trace_holds_them(tmp_path, signals, met):
    (tmp_path / "wanting.py").write_text(WANTS)
    rng = np.random.default_rng(1)
    few = [random_request(rng, TWO, request=i, passes=4, signals=signals) for i in range(2)]
    write_trace(tmp_path / "trace", few, TWO, signals=signals)
    command = ["run", "--policy", str(tmp_path / "wanting.py"), "--cache", "2",
               "--trace", str(tmp_path / "trace")]  # fmt: skip
    results = json.loads(printed(*command, "--json"))["results"]
    assert results[0]["notes"] == [f"met {met}."]
    table = tmp_path / "results.parquet"
    assert f"wanting.py: met {met}." in " ".join(printed(*command, "--out", str(table)).split())
    metadata = json.loads(pq.read_schema(table).metadata[b"oled_sim.run"])
    assert list(metadata["notes"].values()) == [[f"met {met}."]]


def printed(*command):
    """Return what ``oled-sim`` prints."""
    out = StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as stop:
        main(list(command))
        raise SystemExit(0)
    assert not stop.value.code
    return out.getvalue()
