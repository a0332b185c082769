"""Importing route CSVs: a hand-made file against hand-worked arrays, and every way to be wrong."""

import gzip
import json
import lzma
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from commands import oled_sim, oled_sim_process
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim import plugins
from oled_sim.collectors.route_csv import build_request, import_route_csv, read_residency
from oled_sim.collectors.route_csv_rows import RouteCsv
from oled_sim.errors import TraceError, UsageError
from oled_sim.trace import Kind, TokenState, open_trace

RECORDING = (
    Path(__file__).parents[2].parent
    / "shared/data/traces/bigmoeonedge_qwen.route.csv.xz"
)  # fmt: skip

# Layer 0 is dense (no experts), layer 2 is never routed to.
HEADER = """\
# route_trace v1
# model=/sdcard/my models/tiny-Q4.gguf arch=toy n_layer=4 n_expert=5 n_expert_used=2
# rows are made up
# layer=0 expert_bytes=0 dense_bytes=9
# layer=1 expert_bytes=300 dense_bytes=9
# layer=2 expert_bytes=300 dense_bytes=9
# layer=3 expert_bytes=200 dense_bytes=9
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""
FIRST_ROW = HEADER.count("\n") + 1

# Turn 0: prompt tokens 0, 1, 2 (layer 3 keeps the last only), decoded tokens 3 and 4.
# Turn 1: the prompt's new token 5, decoded token 6 without layer 3.
ROWS = """\
0,0,0,1,0,4,0.75,0,300
0,0,0,1,1,1,0.25,0,300
0,0,1,1,0,1,0.5,0,0
0,0,1,1,1,3,0.5,0,300
0,0,2,1,0,0,0.625,0,300
0,0,2,1,1,4,0.375,0,0
0,0,2,3,0,2,0.5,0,200
0,0,2,3,1,0,0.5,0,200
0,1,3,1,0,3,3,1,0
0,1,3,1,1,2,1,0,300
0,1,3,3,0,4,0.75,0,200
0,1,3,3,1,2,0.25,1,0
0,1,4,1,0,0,0.5,2,0
0,1,4,1,1,1,0.5,1,0
0,1,4,3,0,1,0.875,0,200
0,1,4,3,1,4,0.125,1,0
1,0,5,1,0,2,0.75,1,0
1,0,5,1,1,0,0.25,0,300
1,0,5,3,0,3,0.75,0,200
1,0,5,3,1,0,0.25,1,0
1,1,6,1,0,4,0.5,0,300
1,1,6,1,1,3,0.5,1,0
"""


def write(folder, rows=ROWS, header=HEADER, name="made.route.csv"):
    path = folder / name
    path.write_text(header + rows)
    return path


def imported(folder, rows=ROWS, header=HEADER, **options):
    """Import a text and return the trace."""
    import_route_csv(write(folder, rows, header), folder / "trace", **options)
    return open_trace(folder / "trace")


def routes(trace):
    """List (request, pass, layer, position, ids) of every routing row, in order."""
    found = []
    for request in trace:
        for v in range(request.events):
            p, layer = int(request.event_pass[v]), trace.geometry.layers[request.event_layer[v]]
            for row in range(request.event_offset[v], request.event_offset[v + 1]):
                position = int(request.position[request.row_token[row]])
                ids = tuple(request.experts[row].tolist())
                found.append((request.request, p, layer, position, ids))
    return found


# --- a file worked out by hand ------------------------------------------------------------------


def test_first_turn_by_hand(tmp_path):
    request = imported(tmp_path).read(0)
    assert request.kind.tolist() == [Kind.PREFILL, Kind.DENOISE, Kind.DENOISE]
    assert request.context.tolist() == [0, 3, 4]
    assert request.block.tolist() == [3, 3, 4]  # prefill leads to the block of token 3
    assert request.token_offset.tolist() == [0, 3, 4, 5]
    assert request.position.tolist() == [0, 1, 2, 3, 4]
    assert request.state.tolist() == [TokenState.PROMPT] * 3 + [TokenState.MASKED] * 2
    assert request.accepted.tolist() == [False] * 3 + [True] * 2
    assert request.accepted_count.tolist() == [0, 1, 1]
    assert request.token_id.tolist() == [-1] * 5
    assert np.isnan(request.confidence).all()
    assert np.isnan(request.time_us).all()
    # Events: layers 1 and 3 (index 0 and 1) of each pass; layer 3 of the prefill has one token.
    assert request.event_pass.tolist() == [0, 0, 1, 1, 2, 2]
    assert request.event_layer.tolist() == [0, 1, 0, 1, 0, 1]
    assert request.event_offset.tolist() == [0, 3, 4, 5, 6, 7, 8]
    assert request.row_token.tolist() == [0, 1, 2, 2, 3, 3, 4, 4]
    assert request.experts.tolist() == [
        [4, 1], [1, 3], [0, 4], [2, 0], [3, 2], [4, 2], [0, 1], [1, 4],
    ]  # fmt: skip
    assert request.gates is not None
    assert request.gates.tolist() == [
        [0.75, 0.25], [0.5, 0.5], [0.625, 0.375], [0.5, 0.5],
        [0.75, 0.25],  # 3 and 1, renormalised
        [0.75, 0.25], [0.5, 0.5], [0.875, 0.125],
    ]  # fmt: skip


def test_second_turn_by_hand(tmp_path):
    """A turn is a request of its own; its prompt starts after the tokens of the first."""
    trace = imported(tmp_path)
    request = trace.read(1)
    assert trace.requests == (0, 1)
    assert request.kind.tolist() == [Kind.PREFILL, Kind.DENOISE]
    assert request.context.tolist() == [5, 6]
    assert request.position.tolist() == [5, 6]
    assert request.event_pass.tolist() == [0, 0, 1]
    assert request.event_layer.tolist() == [0, 1, 0]
    assert request.experts.tolist() == [[2, 0], [3, 0], [4, 3]]
    entries = [(e.prompt_tokens, e.output_tokens) for e in trace.manifest.requests]
    assert entries == [(3, 2), (6, 1)]


def test_manifest_says_what_the_file_says(tmp_path):
    manifest = imported(tmp_path).manifest
    assert manifest.origin == "imported"
    assert manifest.model.name == "tiny-Q4"  # without the folder of whoever recorded it
    assert manifest.model.layers == (1, 3)
    assert (manifest.model.experts, manifest.model.top_k, manifest.model.total_layers) == (5, 2, 4)
    assert manifest.expert_bytes == (300, 200)
    assert manifest.signals == ("ids", "gates")
    assert manifest.ragged
    assert manifest.row_order == "source"
    assert manifest.stands_for is None
    assert manifest.decode is not None
    assert (manifest.decode.rule, manifest.decode.block_length) == ("autoregressive", 1)
    assert "made.route.csv (SHA-256 " in manifest.notes
    assert "architecture toy; rows are made up" in manifest.notes


def test_stands_for_is_what_is_asked_for(tmp_path):
    assert imported(tmp_path, stands_for="llada2.0-mini").manifest.stands_for == "llada2.0-mini"


def test_residency_by_hand(tmp_path):
    """One lookup per distinct expert of an event; 2 (brought by speculation) is a hit too."""
    hits = {
        (0, 1, 1, 3), (0, 1, 3, 2), (0, 2, 1, 0), (0, 2, 1, 1), (0, 2, 3, 4),
        (1, 0, 1, 2), (1, 0, 3, 0), (1, 1, 1, 3),
    }  # fmt: skip
    found = read_residency(write(tmp_path))
    assert {lookup for lookup, hit in found.items() if hit} == hits
    # Prefill of turn 0: experts 0, 1, 3, 4 and 0, 2; then 2 for each of 4 + 2 + 1 events.
    assert len(found) == 4 + 2 + 7 * 2


def test_residency_that_changes_within_an_event_is_refused(tmp_path):
    rows = ROWS.replace("0,0,1,1,0,1,0.5,0,0", "0,0,1,1,0,1,0.5,1,0")
    with pytest.raises(TraceError, match=f"line {FIRST_ROW + 2}: residency differs"):
        read_residency(write(tmp_path, rows))


# --- what the file may look like ----------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_packed_files_give_the_same_tables(tmp_path, suffix, pack):
    plain = imported(tmp_path)
    packed = tmp_path / f"made.route.csv{suffix}"
    packed.write_bytes(pack((HEADER + ROWS).encode()))
    manifest = import_route_csv(packed, tmp_path / "packed")
    assert manifest.files == plain.manifest.files


def test_the_same_file_gives_the_same_bytes(tmp_path):
    source = write(tmp_path)
    for name in ("a", "b"):
        import_route_csv(source, tmp_path / name)
    files = sorted(f.relative_to(tmp_path / "a") for f in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 1 + 2 * 3
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "\n\n"])
def test_line_ends_and_a_missing_last_one(tmp_path, end, tail):
    wanted = routes(imported(tmp_path))
    path = tmp_path / "other.csv"
    path.write_bytes(((HEADER + ROWS).rstrip("\n") + tail).replace("\n", end).encode())
    import_route_csv(path, tmp_path / "other")
    assert routes(open_trace(tmp_path / "other")) == wanted


def test_columns_are_found_by_name(tmp_path):
    """Later writers append columns; unknown ones, numbers or not, are ignored."""
    names = "remark,weight,expert,slot,layer,step,phase,turn\n"
    order = (6, 5, 4, 3, 2, 1, 0)
    lines = [line.split(",") for line in ROWS.splitlines()]
    rows = "".join("x y," + ",".join(line[i] for i in order) + "\n" for line in lines)
    header = HEADER[: HEADER.rindex("turn,")] + names
    (tmp_path / "other").mkdir()
    assert routes(imported(tmp_path / "other", rows, header)) == routes(imported(tmp_path))


def test_a_prompt_in_chunks_is_one_pass(tmp_path):
    """Tokens 0 and 1 go through both layers before token 2 does; rows of a layer keep order."""
    rows = """\
0,0,0,1,0,4,0.5,0,300
0,0,0,1,1,1,0.5,0,300
0,0,1,1,0,2,0.5,0,300
0,0,1,1,1,1,0.5,0,0
0,0,0,3,0,4,0.5,0,200
0,0,0,3,1,1,0.5,0,200
0,0,1,3,0,3,0.5,0,200
0,0,1,3,1,1,0.5,0,0
0,0,2,1,0,4,0.5,0,0
0,0,2,1,1,0,0.5,0,300
0,0,2,3,0,2,0.5,0,200
0,0,2,3,1,0,0.5,0,200
"""
    trace = imported(tmp_path, rows)
    assert routes(trace) == [
        (0, 0, 1, 0, (4, 1)), (0, 0, 1, 1, (2, 1)), (0, 0, 1, 2, (4, 0)),
        (0, 0, 3, 0, (4, 1)), (0, 0, 3, 1, (3, 1)), (0, 0, 3, 2, (2, 0)),
    ]  # fmt: skip
    assert not trace.manifest.ragged
    assert trace.manifest.requests[0].output_tokens == 0


def test_decoding_without_a_prefill(tmp_path):
    """A recording that starts late: what came before counts as prompt."""
    rows = "".join(line for line in ROWS.splitlines(True) if line.startswith("0,1,"))
    trace = imported(tmp_path, rows)
    request = trace.read(0)
    assert request.kind.tolist() == [Kind.DENOISE] * 2
    assert request.context.tolist() == [3, 4]
    assert not trace.manifest.ragged
    entry = trace.manifest.requests[0]
    assert (entry.prompt_tokens, entry.output_tokens) == (3, 2)


def test_whole_turns_that_lack_a_layer_of_another_make_a_ragged_trace(tmp_path):
    rows = "".join(
        line for line in ROWS.splitlines(True) if line.startswith(("0,1,3", "1,1,6"))
    )  # turn 0 has layers 1 and 3, turn 1 has layer 1
    assert imported(tmp_path, rows).manifest.ragged


def test_a_prompt_out_of_order_keeps_its_rows(tmp_path):
    """Which token a row belongs to is stored in ragged traces only."""
    rows = """\
0,0,1,1,0,4,0.5,0,300
0,0,1,1,1,1,0.5,0,300
0,0,0,1,0,2,0.5,0,300
0,0,0,1,1,3,0.5,0,300
"""
    trace = imported(tmp_path, rows)
    assert routes(trace) == [(0, 0, 1, 1, (4, 1)), (0, 0, 1, 0, (2, 3))]
    assert trace.manifest.ragged


def test_decoding_in_blocks(tmp_path):
    """Positions 3 and 4 of the first turn are one block of 4 each; the second turn's 6 too."""
    trace = imported(tmp_path, as_blocks=4)
    first, second = trace
    assert first.position[first.token_offset[:-1]].tolist() == [0, 3, 4]
    trace = imported(tmp_path, as_blocks=8, overwrite=True)
    first, second = trace
    assert first.token_offset.tolist() == [0, 3, 5]
    assert first.experts[4:6].tolist() == [[3, 2], [0, 1]]  # layer 1 of both decoded tokens
    assert second.block.tolist() == [0, 0]
    assert trace.manifest.decode is not None
    assert trace.manifest.decode.block_length == 8


def test_unknown_weights_leave_gates_out(tmp_path):
    """One nan is enough: gates that are there in part could mislead a policy."""
    notes = []
    rows = ROWS.replace("0,1,4,1,1,1,0.5,1,0", "0,1,4,1,1,1,nan,1,0")
    trace = imported(tmp_path, rows, on_note=notes.append)
    assert trace.manifest.signals == ("ids",)
    assert all(request.gates is None for request in trace)
    assert notes == ["the trace has no gates, because the weight of 1 rows is unknown (nan)"]


def test_padding_rows_are_left_out_and_counted(tmp_path):
    """Whatever stands in their other columns."""
    notes = []
    padding = "".join(f"0,1,-1,0,{slot},-1,nan,0,0\n" for slot in (0, 1))
    lines = ROWS.splitlines(True)
    rows = padding + "".join(lines[:10]) + padding + "".join(lines[10:]) + padding
    trace = imported(tmp_path, rows, on_note=notes.append)
    assert notes == ["6 padding rows (expert -1) are left out"]
    (tmp_path / "clean").mkdir()
    assert routes(trace) == routes(imported(tmp_path / "clean"))


def test_more_than_256_experts(tmp_path):
    header = HEADER.replace("n_expert=5", "n_expert=1000")
    trace = imported(tmp_path, ROWS.replace("0,0,0,1,0,4,", "0,0,0,1,0,999,"), header)
    assert trace.read(0).experts[0].tolist() == [999, 1]


# --- any file -----------------------------------------------------------------------------------


@st.composite
def recordings(draw):
    """Rows of a random recording, and its routes as (turn, pass, layer, position, ids)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    k = draw(st.integers(1, 3))
    rows, expected = [], []

    def token(turn, phase, number, step, layer):
        ids = rng.choice(6, k, replace=False).tolist()
        weights = np.sort(rng.random(k) + 0.01)[::-1]
        for slot, (expert, weight) in enumerate(zip(ids, weights, strict=True)):
            rows.append(f"{turn},{phase},{step},{layer},{slot},{expert},{weight:.6g},0,0\n")
        expected.append((turn, number, layer, step, tuple(ids)))

    position = 0
    for turn in range(draw(st.integers(1, 3))):
        prompt = draw(st.integers(0, 3))
        for layer in (1, 3):
            kept = sorted(
                {0, *np.flatnonzero(rng.random(prompt) < 0.8).tolist()} & {*range(prompt)}
            )
            for i in kept:
                token(turn, 0, 0, position + i, layer)
        position += prompt
        for i in range(draw(st.integers(0 if prompt else 1, 4))):
            for layer in [[1, 3], [1], [3]][rng.choice(3, p=[0.8, 0.1, 0.1])]:
                token(turn, 1, i + (prompt > 0), position, layer)
            position += 1
    return k, "".join(rows), expected


@settings(max_examples=examples(30), deadline=None)
@given(recordings(), st.sampled_from([1, 60, 200, 1 << 20]))
def test_any_recording_keeps_its_routes(tmp_path_factory, recording, block_bytes):
    """The same routes in the same order, wherever the blocks of text happen to end."""
    k, rows, expected = recording
    header = HEADER.replace("n_expert=5", "n_expert=6").replace("used=2", f"used={k}")
    folder = tmp_path_factory.mktemp("any")
    assert routes(imported(folder, rows, header)) == expected
    path = write(folder, rows, header)
    with RouteCsv(path, block_bytes=max(block_bytes, 100)) as file:
        turns = [build_request(turn, (1, 2, 3)) for turn in file.turns()]
    with RouteCsv(path) as file:
        whole = [build_request(turn, (1, 2, 3)) for turn in file.turns()]
    for one, other in zip(turns, whole, strict=True):
        for field in ("experts", "gates", "row_token", "event_offset", "event_layer", "position"):
            assert np.array_equal(getattr(one, field), getattr(other, field))


def test_memory_is_bounded_by_a_turn(tmp_path):
    """Eight times the turns, at most a quarter more memory."""

    def peak(turns):
        rows = "".join(
            f"{turn},1,{step},1,{slot},{(step + slot) % 5},0.5,0,0\n"
            for turn in range(turns)
            for step in range(200)
            for slot in (0, 1)
        )
        path = write(tmp_path, rows)
        tracemalloc.start()
        with RouteCsv(path, block_bytes=20_000) as file:
            events = sum(build_request(turn, (1,)).events for turn in file.turns())
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert events == turns * 200
        return most

    peak(1)  # first use of the libraries
    assert peak(80) < 1.25 * peak(10)


# --- malformed files ----------------------------------------------------------------------------

BROKEN_ROWS = {
    "too few values": ("0,0,1,1,0,1,0.5,0,0", "0,0,1,1,0,1,0.5,0", 2, "8 values, the columns"),
    "too many values": ("0,0,1,1,0,1,0.5,0,0", "0,0,1,1,0,1,0.5,0,0,7", 2, "10 values"),
    "an empty line": ("0,0,1,1,0,1", "\n0,0,1,1,0,1", 2, "1 values, the columns are 9"),
    "no integer": ("0,0,1,1,0,1,0.5", "0,0,1,1,0,x,0.5", 2, "expert is 'x', which is no integer"),
    "a fraction": ("0,0,1,1,0,1,0.5", "0,0,1.0,1,0,1,0.5", 2, "step is '1.0', which is no integer"),
    "a huge number": ("0,0,1,1,0,1,", "0,0,3000000000,1,0,1,", 2, "no integer of 32 bits"),
    "an empty value": ("0,0,1,1,0,1,0.5", "0,0,1,1,0,,0.5", 2, "expert is ''"),
    "no number": ("0,0,1,1,0,1,0.5", "0,0,1,1,0,1,half", 2, "weight is 'half', which is no number"),
    "an id too high": ("0,0,1,1,1,3,", "0,0,1,1,1,5,", 3, "expert 5 is not within 0..4"),
    "an id below -1": ("0,0,1,1,1,3,", "0,0,1,1,1,-2,", 3, "expert -2 is not within 0..4"),
    "an expert twice": ("0,0,1,1,1,3,", "0,0,1,1,1,1,", 3, "expert 1 occurs twice"),
    "a missing row": ("0,0,1,1,1,3,0.5,0,300\n", "", 2, "the token has 1 experts in this layer"),
    "a row too many": (
        "0,0,1,1,1,3,0.5,0,300\n", "0,0,1,1,1,3,0.5,0,300\n0,0,1,1,2,0,0.5,0,300\n", 2,
        "the token has 3 experts in this layer, n_expert_used is 2",
    ),
    "half a token of padding": ("0,0,1,1,1,3,", "0,0,1,1,1,-1,", 2, "the token has 1 experts"),
    "slots out of turn": ("0,0,1,1,0,1,", "0,0,1,1,1,1,", 2, "slot 1 is out of turn"),
    "a negative step": ("0,1,3,1,0,3,3", "0,1,-1,1,0,3,3", 8, "the step is negative"),
    "a negative turn": ("0,0,0,1,0,4", "-1,0,0,1,0,4", 0, "the turn is negative"),
    "an unknown phase": ("0,0,0,1,0,4", "0,2,0,1,0,4", 0, "the phase is not 0 or 1"),
    "a dense layer": ("0,0,0,1,0,4", "0,0,0,0,0,4", 0, "no expert_bytes for layer 0"),
    "an unknown layer": ("0,0,0,1,0,4", "0,0,0,4,0,4", 0, "no expert_bytes for layer 4"),
    "a negative weight": ("0.875", "-0.875", 14, "weight -0.875 is negative or infinite"),
    "an infinite weight": ("0.875", "inf", 14, "weight inf is negative or infinite"),
    "no weight at all": ("0.875,0,200\n0,1,4,3,1,4,0.125", "0,0,200\n0,1,4,3,1,4,0", 14, "all 0"),
    "a token twice in a prompt": ("\n0,0,1,1,", "\n0,0,0,1,", 0, "4 experts in this layer"),
    "a token twice in decoding": ("\n0,1,4,1,", "\n0,1,3,3,", 10, "4 experts in this layer"),
    "a layer that goes back": ("0,1,3,1,", "0,1,4,1,", 10, "decoding goes back"),
    "a prefill after decoding": ("0,1,4,1,", "0,0,4,1,", 12, "prefill follows decoding"),
    "a turn that comes back": ("1,1,6,", "0,1,6,", 20, "the turn is over already"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_malformed_rows_are_refused_by_line(tmp_path, name):
    old, new, row, problem = BROKEN_ROWS[name]
    assert old in ROWS
    path = write(tmp_path, ROWS.replace(old, new))
    with pytest.raises(TraceError) as refusal:
        import_route_csv(path, tmp_path / "trace")
    sentence = str(refusal.value)
    assert sentence.startswith(f"{path}, line {FIRST_ROW + row}: ")
    assert problem in sentence
    assert "\n" not in sentence
    assert not (tmp_path / "trace").exists()


def test_a_token_that_comes_again_later_in_a_prompt(tmp_path):
    again = "0,0,0,1,0,4,0.75,0,300\n0,0,0,1,1,1,0.25,0,300\n"
    rows = "".join(ROWS.splitlines(True)[:8]) + again
    with pytest.raises(TraceError, match=f"line {FIRST_ROW + 8}: the token is there twice"):
        import_route_csv(write(tmp_path, rows), tmp_path / "trace")


def test_lines_are_counted_across_blocks(tmp_path):
    rows = "".join(
        f"0,1,{step},1,{slot},{slot},0.5,0,0\n" for step in range(100) for slot in (0, 1)
    )
    path = write(tmp_path, rows.replace("0,1,70,1,1,1,", "0,1,70,1,1,9,"))
    with RouteCsv(path, block_bytes=150) as file, pytest.raises(TraceError) as refusal:
        list(file.turns())
    assert f"line {FIRST_ROW + 141}: expert 9" in str(refusal.value)


BROKEN_HEADERS = {
    "another version": (
        "route_trace v1",
        "route_trace v2",
        "line 1: route_trace v2, this importer",
    ),
    "another format": ("# route_trace v1\n", "", "line 1: not a route CSV"),
    "no model line": ("# model=", "# nodel=", "lines 1 to 8: no comment line '# model=...'"),
    "no k": ("n_expert_used=2", "n_used=2", "line 2: n_expert_used= is missing"),
    "k no number": ("n_expert_used=2", "n_expert_used=two", "line 2: n_expert_used= is missing"),
    "k too high": ("n_expert_used=2", "n_expert_used=6", "line 2: n_expert_used=6 of n_expert=5"),
    "no sizes": ("expert_bytes=", "bytes=", "line 4: not of the form"),
    "only dense layers": ("expert_bytes=300", "expert_bytes=0", "no expert_bytes for layer 1"),
    "layers too many": ("n_layer=4", "n_layer=3", "layer=3 is given, n_layer is 3"),
    "a missing column": (",expert,", ",experts,", "line 8: the column 'expert' is missing"),
    "a column twice": ("residency,", "weight,", "line 8: the column 'weight' is there twice"),
    "no line of names": ("turn,phase,step", "# turn,phase,step", "line 9: the column 'turn' is"),
}


@pytest.mark.parametrize("name", BROKEN_HEADERS)
def test_malformed_headers_are_refused(tmp_path, name):
    old, new, problem = BROKEN_HEADERS[name]
    assert old in HEADER
    path = write(tmp_path, header=HEADER.replace(old, new))
    with pytest.raises(TraceError) as refusal:
        import_route_csv(path, tmp_path / "trace")
    sentence = str(refusal.value)
    assert sentence.startswith(f"{path}, line")
    assert problem in sentence
    assert not (tmp_path / "trace").exists()


def test_no_expert_sizes_at_all(tmp_path):
    header = "".join(line for line in HEADER.splitlines(True) if "# layer=" not in line)
    with pytest.raises(TraceError, match="tells the size of an expert"):
        imported(tmp_path, header=header)


@pytest.mark.parametrize("rows", ["", "0,0,0,1,0,-1,0.5,0,0\n0,0,0,1,1,-1,0.5,0,0\n"])
def test_a_file_without_routes_is_refused(tmp_path, rows):
    with pytest.raises(TraceError, match="holds no route"):
        imported(tmp_path, rows)


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_archives_are_refused(tmp_path, pack, damage):
    data = bytearray(pack((HEADER + ROWS * 50).encode()))
    if damage == "cut":
        del data[-20:]
    else:
        data[-12] ^= 0xFF
    path = tmp_path / "packed"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="is cut short or damaged"):
        read_residency(path)


def test_binary_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x00\xff\xfe" * 1000)
    with pytest.raises(TraceError, match="line 1: not a route CSV"):
        import_route_csv(path, tmp_path / "trace")


def test_a_line_without_end_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "endless"
    path.write_text(HEADER + ROWS + "0" * 5000)
    with RouteCsv(path, block_bytes=1000) as file, pytest.raises(TraceError, match="has no end"):
        list(file.turns())


def test_a_profiling_batch_is_refused_before_anything_is_written(tmp_path):
    """Equal rows in sequence are dummies; no trace may hold them."""
    rows = "".join(f"0,0,{step},1,{slot},{slot},0.5,0,0\n" for step in range(70) for slot in (0, 1))
    with pytest.raises(TraceError, match="profiling batch"):
        imported(tmp_path, rows)
    assert not (tmp_path / "trace").exists()


# --- files that are there, and the command line -------------------------------------------------


def test_nothing_is_overwritten_unasked(tmp_path):
    imported(tmp_path)
    before = (tmp_path / "trace" / "manifest.json").read_bytes()
    with pytest.raises(UsageError, match="not empty"):
        imported(tmp_path, stands_for="llada2.0-mini")
    assert (tmp_path / "trace" / "manifest.json").read_bytes() == before
    assert imported(tmp_path, stands_for="llada2.0-mini", overwrite=True).manifest.stands_for


def test_a_malformed_file_does_not_cost_the_trace_that_is_there(tmp_path):
    wanted = routes(imported(tmp_path))
    with pytest.raises(TraceError):
        imported(tmp_path, ROWS.replace("0,1,4,3,1,4,", "0,1,4,3,1,9,"), overwrite=True)
    assert routes(open_trace(tmp_path / "trace")) == wanted


def test_progress_runs_from_nothing_to_all(tmp_path):
    seen = []
    imported(tmp_path, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_importers_are_found_by_name():
    assert plugins.load(plugins.IMPORTERS, "route-csv") is import_route_csv
    with pytest.raises(UsageError, match="unknown importer 'route-cvs': did you mean 'route-csv'"):
        plugins.load(plugins.IMPORTERS, "route-cvs")


def test_an_importer_of_ones_own_is_loaded_from_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from oled_sim.collectors.route_csv import import_route_csv\n"
        "def without_first_line(source, out, **options):\n"
        "    whole = source.with_suffix('.whole')\n"
        "    whole.write_text('# route_trace v1\\n' + source.read_text())\n"
        "    return import_route_csv(whole, out, **options)\n"
    )
    path = write(tmp_path, header=HEADER.partition("\n")[2])
    form = f"{tmp_path / 'mine.py'}:without_first_line"
    result = oled_sim("import", form, path, "--out", tmp_path / "trace")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(open_trace(tmp_path / "trace")) == 2


def test_command_prints_a_summary_and_what_was_left_out(tmp_path):
    path = write(tmp_path, ROWS + "0,0,0,1,0,-1,0,0,0\n")
    result = oled_sim("import", "route-csv", path, "--out", tmp_path / "trace")
    assert result.returncode == 0
    assert result.stderr == f"{path}: 1 padding rows (expert -1) are left out\n"
    assert "imported 2 requests of tiny-Q4 (2 MoE layers, 5 experts, top-2): 9 prompt and 3" in (
        result.stdout
    )
    assert "5 passes, 9 events" in result.stdout
    assert oled_sim("trace", "validate", tmp_path / "trace").returncode == 0


def test_command_prints_json(tmp_path):
    out = tmp_path / "trace"
    result = oled_sim_process("import", "route-csv", write(tmp_path), "--out", out, "--json")
    found = json.loads(result.stdout)
    size = sum(f.stat().st_size for f in out.glob("*/*.parquet"))
    assert found == {
        "out": str(out), "requests": 2, "prompt_tokens": 9, "output_tokens": 3, "passes": 5,
        "events": 9, "trace_bytes": size,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["route-csv", "{good}", "--out", "{full}"], 2, "is not empty"),
        (["route-csv", "{good}", "--out", "{good}"], 2, "is a file"),
        (["route-csv", "{good}", "--out", "{new}", "--stands-for", "mini"], 2, "unknown geometry"),
        (["route-cvs", "{good}", "--out", "{new}"], 2, "unknown importer"),
        (["route-csv", "{bad}", "--out", "{new}"], 1, "line 8: the column 'turn' is missing"),
        (["route-csv", "{bad}", "--out", "{full}", "--overwrite"], 1, "line 8: the column 'turn'"),
    ],
)
def test_command_refuses_in_one_sentence(tmp_path, arguments, code, message):
    places = {"good": write(tmp_path), "full": tmp_path / "full", "new": tmp_path / "new"}
    places["bad"] = write(tmp_path, header=HEADER.replace("turn,", "term,"), name="bad.csv")
    places["full"].mkdir()
    (places["full"] / "mine.txt").write_text("keep me")
    result = oled_sim("import", *(a.format(**places) for a in arguments))
    assert result.returncode == code
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert (places["full"] / "mine.txt").read_text() == "keep me"
    assert not places["new"].exists()


def test_help_shows_examples():
    assert "oled-sim import route-csv qwen.route.csv.xz" in oled_sim("import", "--help").stdout


# --- a real recording ---------------------------------------------------------------------------

needs_recording = pytest.mark.skipif(
    not RECORDING.exists(), reason="the recording ../shared/data/traces is not here"
)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    out = tmp_path_factory.mktemp("real") / "qwen"
    import_route_csv(RECORDING, out)
    return open_trace(out)


@needs_recording
def test_real_recording_has_the_counts_of_its_readme(real):
    request, manifest = real.read(0), real.manifest
    assert real.requests == (0,)
    assert request.experts.size == 44_766
    assert len(real.geometry.layers) == 48
    assert (real.geometry.experts, real.geometry.top_k) == (128, 6)
    assert request.passes == 1 + 128
    assert request.tokens(0) == 28
    assert request.position.tolist() == list(range(28 + 128))
    assert request.events == 6_192
    assert np.diff(request.event_offset)[:48].tolist() == [28] * 47 + [1]
    assert manifest.ragged
    assert manifest.expert_bytes is not None
    assert [manifest.expert_bytes.count(n) for n in (3_059_712, 2_654_208)] == [24, 24]
    lookups = [
        len(np.unique(request.experts[a:b]))
        for a, b in zip(request.event_offset[:-1], request.event_offset[1:], strict=True)
    ]
    assert sum(lookups[:48]) == 2_662
    assert sum(lookups) == 39_526


@needs_recording
def test_real_recording_replays_to_its_engines_own_hits(real):
    """The README's rules, on the trace: a dictionary in order of use, no simulator involved."""
    request, size = real.read(0), real.manifest.expert_bytes
    recorded = read_residency(RECORDING)
    used: OrderedDict[tuple[int, int], None] = OrderedDict()
    found, total = {}, 0
    for v in range(request.events):
        i, p = int(request.event_layer[v]), int(request.event_pass[v])
        rows = slice(request.event_offset[v], request.event_offset[v + 1])
        ids = request.experts[rows].ravel().tolist()
        for expert in set(ids):
            hit = found[0, p, real.geometry.layers[i], expert] = (i, expert) in used
            total += 0 if hit else size[i]
        for expert in ids:
            used[i, expert] = None
            used.move_to_end((i, expert))
        # What the event touched was used last, so evicting from the front spares it.
        while total > 4000 << 20:
            (layer, _), _ = used.popitem(last=False)
            total -= size[layer]
    assert found == recorded
    assert sum(recorded.values()) == 29_597
