"""Importing tables: columns by name or by mapping, both shapes, and lines that are refused."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.collectors.route_table import import_table
from oled_sim.collectors.table_columns import parse_mapping
from oled_sim.errors import TraceError, UsageError
from oled_sim.trace import Kind, open_trace

LONG = """\
tok,l,e,w
0,1,4,0.75
0,1,2,0.25
1,1,3,0.5
1,1,5,0.5
0,3,6,0.5
0,3,1,0.5
1,3,2,3
1,3,4,1
2,1,5,0.5
2,1,6,0.5
2,3,1,0.875
2,3,2,0.125
"""
MAPPING = "token=tok,layer=l,expert=e,gate=w"

WIDE = """\
token,layer,expert_0,expert_1,gate_0,gate_1
0,1,4,2,0.75,0.25
1,1,3,5,0.5,0.5
0,3,6,1,0.5,0.5
1,3,2,4,3,1
2,1,5,6,0.5,0.5
2,3,1,2,0.875,0.125
"""


def imported(folder, text, name="routes.csv", columns=None, **options):
    notes = []
    path = folder / name
    path.write_text(text)
    options.setdefault("experts", 8)
    if columns:
        options["columns"] = parse_mapping(columns)
    import_table(path, folder / f"{name}.trace", on_note=notes.append, **options)
    return open_trace(folder / f"{name}.trace"), notes


def test_one_line_per_expert_by_hand(tmp_path):
    trace, notes = imported(tmp_path, LONG, columns=MAPPING, prompt_tokens=2)
    request = trace.read(0)
    assert notes == []
    assert trace.geometry.layers == (1, 3)
    assert request.kind.tolist() == [Kind.PREFILL, Kind.DENOISE]
    assert request.token_offset.tolist() == [0, 2, 3]
    assert request.event_offset.tolist() == [0, 2, 4, 5, 6]
    assert request.experts.tolist() == [[4, 2], [3, 5], [6, 1], [2, 4], [5, 6], [1, 2]]
    assert request.gates is not None
    assert request.gates[3].tolist() == [0.75, 0.25]  # 3 and 1, renormalised
    assert trace.manifest.decode is not None
    assert trace.manifest.decode.rule == "autoregressive"


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (WIDE, None),
        (WIDE.replace("expert_", "e").replace("gate_", "g"), "expert=e*,gate=g*"),
        (WIDE.replace("expert_0,expert_1", "first,second"), "expert=first/second"),
        ("# made by hand\n" + WIDE.replace("\n", "\r\n"), None),
        ("remark," + WIDE.replace("\n", "\nx,")[:-2], None),
        (WIDE.replace("token", '"token"'), None),
    ],
)
def test_one_line_per_token_says_the_same(tmp_path, text, columns):
    long, _ = imported(tmp_path, LONG, columns=MAPPING, prompt_tokens=2)
    wide, _ = imported(tmp_path, text, "wide.csv", columns, prompt_tokens=2)
    assert wide.manifest.files == long.manifest.files


@settings(max_examples=12)
@given(st.permutations(range(12)))
def test_lines_in_any_order_with_slots_say_the_same(tmp_path_factory, order):
    """Rows of an event then follow the first line of each token."""
    folder = tmp_path_factory.mktemp("any")
    lines = LONG.splitlines()
    slots = [f"{line},{i % 2}" for i, line in enumerate(lines[1:])]
    text = "\n".join([lines[0] + ",slot", *(slots[i] for i in order)]) + "\n"
    trace, _ = imported(folder, text, columns=MAPPING, prompt_tokens=2)
    request = trace.read(0)
    found = {
        (int(request.row_token[row]), int(layer)): request.experts[row].tolist()
        for v, layer in enumerate(request.event_layer)
        for row in range(request.event_offset[v], request.event_offset[v + 1])
    }
    assert found == {
        (0, 0): [4, 2], (1, 0): [3, 5], (0, 1): [6, 1], (1, 1): [2, 4], (2, 0): [5, 6],
        (2, 1): [1, 2],
    }  # fmt: skip
    firsts = [int(lines[1 + i].split(",")[0]) for i in order if lines[1 + i].split(",")[1] == "1"]
    rows = slice(*request.event_offset[:2])
    wanted = [t for t in dict.fromkeys(firsts) if t < 2]
    assert request.position[request.row_token[rows]].tolist() == wanted


def test_passes_and_facts_of_tokens(tmp_path):
    """A block of two tokens, denoised twice: position 4 is accepted first, then position 5."""
    text = """\
request,iteration,kind,block,token,layer,expert_0,expert_1,state,confidence,accepted
7,0,0,1,0,1,4,2,2,nan,0
7,1,1,1,4,1,3,5,0,0.75,1
7,1,1,1,5,1,3,6,0,0.25,0
7,2,1,1,4,1,2,5,1,1,0
7,2,1,1,5,1,6,7,0,0.5,1
9,0,1,0,0,1,1,2,0,0.5,1
"""
    trace, _ = imported(tmp_path, text)
    assert trace.requests == (7, 9)
    request = trace.read(7)
    assert request.kind.tolist() == [0, 1, 1]
    assert request.block.tolist() == [1, 1, 1]
    assert request.state.tolist() == [2, 0, 0, 1, 0]
    assert request.accepted_count.tolist() == [0, 1, 1]
    assert request.confidence[1:].tolist() == [0.75, 0.25, 1.0, 0.5]
    assert trace.manifest.signals == ("ids", "confidence", "token_state")
    assert trace.manifest.decode is None


def test_kinds_alone_tell_prompt_and_decoding_apart(tmp_path):
    """Columns of route-csv: its `phase` is 0 for prefill and 1 for decoding."""
    lines = WIDE.splitlines()
    text = "\n".join([lines[0] + ",phase", *(f"{x},{x[0] == '2':d}" for x in lines[1:])]) + "\n"
    trace, notes = imported(tmp_path, text, columns="kind=phase")
    assert notes == []
    assert trace.read(0).kind.tolist() == [Kind.PREFILL, Kind.DENOISE]


def test_without_any_word_every_token_is_decoded(tmp_path):
    trace, notes = imported(tmp_path, WIDE)
    assert trace.read(0).passes == 3
    assert "the table does not tell prompt and decoding apart" in notes[0]


def test_padding_is_left_out(tmp_path):
    padded = WIDE + "3,1,-1,-1,0,0\n3,3,-1,-1,0,0\n"
    trace, notes = imported(tmp_path, padded, prompt_tokens=2)
    clean, _ = imported(tmp_path, WIDE, "clean.csv", prompt_tokens=2)
    assert trace.manifest.files == clean.manifest.files
    assert notes == ["2 padding routes (ids -1) are left out"]
    long, notes = imported(tmp_path, LONG + "-1,0,-1,nan\n" * 4, "l.csv", MAPPING, prompt_tokens=2)
    assert long.manifest.files == clean.manifest.files
    assert notes == ["4 padding routes (ids -1) are left out"]


def test_a_profiling_batch_is_left_out(tmp_path):
    """Eighty equal tokens, weights and all, before the first real one."""
    dummies = "".join(f"{t},{layer},5,6,0.5,0.5\n" for t in range(80) for layer in (1, 3))
    rows = "".join(f"{80 + i},{layer},{1 + i},7,0.5,0.5\n" for i in range(3) for layer in (1, 3))
    trace, notes = imported(tmp_path, WIDE.splitlines()[0] + "\n" + dummies + rows)
    assert trace.read(0).experts[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert notes[0].startswith("80 tokens of an engine's profiling batch")


def test_a_missing_layer_makes_a_ragged_trace(tmp_path):
    assert not imported(tmp_path, WIDE)[0].manifest.ragged
    text = WIDE.replace("2,3,1,2,0.875,0.125\n", "")
    assert imported(tmp_path, text, "ragged.csv")[0].manifest.ragged


def test_unknown_weights_leave_gates_out(tmp_path):
    text = WIDE.replace("0.875", "nan")
    trace, _ = imported(tmp_path, text)
    assert trace.manifest.signals == ("ids",)


BROKEN = {
    "no column for tokens": (WIDE.replace("token,", "tok,"), "line 1: no column is called 'token'"),
    "a column twice": (WIDE.replace("gate_1", "expert_1"), "line 1: the column 'expert_1' is ther"),
    "fewer gates": (WIDE.replace(",gate_1", ",g"), "line 1: 1 columns of gates for 2 of exp"),
    "a value too few": (WIDE.replace("2,4,3,1", "2,4,3"), "line 5: 5 values, the columns are 6"),
    "no number": (WIDE.replace("2,4,3,1", "2,x,3,1"), "line 5: expert_1 is 'x', which is no integ"),
    "an id too high": (WIDE.replace("2,4,3,1", "2,8,3,1"), r"line 5: the ids \[2, 8\] are not all"),
    "half a padding": (WIDE.replace("2,4,3,1", "2,-1,3,1"), r"line 5: the ids \[2, -1\] are nega"),
    "an expert twice": (WIDE.replace("2,4,3,1", "2,2,3,1"), "line 5: an expert occurs twice"),
    "zeros": (WIDE.replace("2,4,3,1", "0,0,3,1"), "line 5: the ids are all 0, those of other tok"),
    "a negative weight": (WIDE.replace("2,4,3,1", "2,4,3,-1"), "line 5: a weight of the experts"),
    "no weight": (WIDE.replace("2,4,3,1", "2,4,0,0"), "line 5: the weights of .* are all 0"),
    "a negative token": (WIDE.replace("\n1,3", "\n-1,3"), "line 5: the token is negative"),
    "a token twice": (WIDE + "0,1,5,6,1,1\n", "line 8: the token is there twice in this layer"),
    "a state out of range": (
        "token,layer,expert_0,expert_1,state\n0,1,2,3,0\n1,1,2,4,7\n",
        r"line 3: state is 7, not within 0\.\.2",
    ),
    "states that disagree": (
        "token,layer,expert_0,expert_1,state\n0,1,2,3,0\n0,2,2,4,1\n",
        "line 3: state is 1, and 0 in another line of the same token",
    ),
    "blocks that disagree": (
        "iteration,block,token,layer,expert_0,expert_1\n0,0,1,1,2,3\n0,1,2,1,2,4\n",
        "line 3: block is 1, and 0 in another line of the same pass",
    ),
    "a request that comes back": (
        "request,token,layer,expert_0,expert_1\n0,0,1,2,3\n1,0,1,2,4\n0,1,1,2,5\n",
        "line 4: request 0 is over already",
    ),
    "a negative request": (
        "request,token,layer,expert_0\n-1,0,1,2\n",
        "line 2: the request is negative",
    ),
    "a masked token without confidence": (
        "token,layer,expert_0,confidence\n0,1,2,0.5\n1,1,2,nan\n",
        "position 1: a masked token has no confidence",
    ),
    "no rows": (WIDE.splitlines()[0] + "\n", "holds no route"),
    "nothing": ("", "line 1: no column is called 'token'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_tables_are_refused_in_a_sentence(tmp_path, name):
    text, problem = BROKEN[name]
    path = tmp_path / "routes.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as refusal:
        import_table(path, tmp_path / "trace", experts=8)
    sentence = str(refusal.value)
    assert sentence.startswith(str(path))
    assert re.search(problem, sentence)
    assert "\n" not in sentence
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("0,1,2,0.25\n", "line 2: the token has 1 experts in this layer, others have 2"),
        ("1,1,5,0.5\n", "line 4: the token has 1 experts in this layer, others have 2"),
    ],
)
def test_a_token_that_lacks_a_line_is_refused(tmp_path, line, problem):
    """The first token decides what k is, so the complaint about it names the next."""
    path = tmp_path / "routes.csv"
    path.write_text(LONG.replace(line, ""))
    if line.startswith("0"):
        problem = "line 3: the token has 2 experts in this layer, others have 1"
    with pytest.raises(TraceError, match=problem):
        import_table(path, tmp_path / "trace", columns=parse_mapping(MAPPING), experts=8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("token", "holds 'token': give pairs"),
        ("tokens=t", "maps 'tokens': known are request"),
        ("token=a,token=b", "maps 'token' twice"),
        ("token=a/b", "maps 'token' to 2 columns"),
        ("token=", "give pairs"),
    ],
)
def test_mappings_that_mean_nothing_are_refused(text, problem):
    with pytest.raises(UsageError, match=problem):
        parse_mapping(text)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("token=tok", "line 1: there is no column 'tok' for 'token'"),
        ("expert=x*", r"line 1: there is no column 'x\*' for 'expert'"),
        ("token=layer", "line 1: the column 'layer' is to mean several things"),
    ],
)
def test_mappings_that_the_table_does_not_have_are_refused(tmp_path, columns, problem):
    with pytest.raises(TraceError, match=problem):
        imported(tmp_path, WIDE, columns=columns)


def test_memory_holds_one_request(tmp_path):
    """Eight times the requests, at most a quarter more memory."""
    import tracemalloc

    def peak(requests):
        header = "request,token,layer,expert_0,expert_1\n"
        rows = (f"{r},{t},1,{1 + t % 5},7\n" for r in range(requests) for t in range(300))
        path = tmp_path / f"{requests}.csv"
        path.write_text(header + "".join(rows))
        tracemalloc.start()
        import_table(path, tmp_path / f"{requests}", experts=8)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)  # whatever is loaded once
    assert peak(16) < 1.25 * peak(2) + (1 << 20)


def test_row_order_of_the_source_is_kept(tmp_path):
    """Within an event the later row was used later, whatever its position."""
    text = "iteration,token,layer,expert_0\n0,5,1,3\n0,2,1,4\n0,9,1,1\n"
    request = imported(tmp_path, text)[0].read(0)
    assert request.position.tolist() == [2, 5, 9]
    assert request.row_token.tolist() == [1, 0, 2]
    assert np.array_equal(request.experts[:, 0], [3, 4, 1])
