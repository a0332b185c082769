"""Every rule of the format, each with a trace that breaks it and the place that is named.

Traces are edited on disk with all checksums kept right, so that only the rule can object.
"""

import dataclasses

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_editing import edit_manifest, edit_table

from oled_sim.errors import TraceError
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import (
    geometries,
    random_manifest,
    random_request,
    requests,
    write_trace,
)
from oled_sim.trace import Kind, LayerRoutes, RequestBuilder, TokenState, open_trace
from oled_sim.trace.validate import check_request

NAN = float("nan")


@pytest.fixture
def fixed(tmp_path, geometry):
    """A request with known rows: two denoise passes and a commit of a block of two tokens.

    Layers 1, 2, 5; 12 experts, top-3. Token rows: pass 0 holds rows 0 and 1 (both masked), pass 1
    rows 2 (decoded) and 3 (masked), pass 2 rows 4 and 5 (both decoded). Event v is layer
    (1, 2, 5)[v % 3] of pass v // 3.
    """
    builder = RequestBuilder(geometry, 0)
    ids, gates = [[[9, 4, 7], [1, 2, 3]]] * 3, [[[0.5, 0.25, 0.25], [0.5, 0.3, 0.2]]] * 3
    signals = {
        "full_gate": np.full((3, 12), 0.5),
        "cosines": np.full((3, 8), NAN),
        "embedding": [0.5, -2.0],
        "time_us": 100.0,
    }
    for kind, state, accepted in ((1, [0, 0], [1, 0]), (1, [1, 0], [0, 1]), (2, [1, 1], [0, 0])):
        builder.add_pass(
            kind, 2, 4, [8, 9], [4, 5], state, [0.5, 0.75], accepted, [0, 0], ids, gates, **signals
        )
    every = ("ids", "gates", "confidence", "token_state", "full_gate", "embedding", "cosines")
    return write_trace(tmp_path / "fixed", [builder.build()], geometry, signals=every).path


def put(column, row, value):
    return lambda columns: columns[column].__setitem__(row, value)


def put_in(column, row, index, value):
    return lambda columns: columns[column][row].__setitem__(index, value)


def drop(row):
    def change(columns):
        for values in columns.values():
            del values[row]

    return change


def swap(a, b):
    def change(columns):
        for values in columns.values():
            values[a], values[b] = values[b], values[a]

    return change


def resize(event, rows):
    """Repeat or cut the routing rows of an event (top-3)."""

    def change(columns):
        for name in ("experts", "gates"):
            columns[name][event] = (columns[name][event] * 4)[: 3 * rows]

    return change


# table, edit, what the message must say; the file is always that table's, of request 0.
BROKEN = {
    "iteration numbers with a gap": (
        "iterations", put("iteration", 1, 5), "iterations are not numbered 0, 1, 2"),
    "iterations out of order": (
        "tokens", swap(1, 2), "iteration 0: the iteration comes after a later one"),
    "an iteration that does not exist": (
        "routing", put("iteration", 8, 3), "iteration 3: the iteration is not in the table"),
    "an unknown kind of pass": (
        "iterations", put("kind", 1, 3), "iteration 1: the kind of the pass is unknown"),
    "a prefill after decoding": (
        "iterations", put("kind", 2, 0), "iteration 2: a prefill pass comes after"),
    "a negative block": ("iterations", put("block", 1, -1), "iteration 1: the block is negative"),
    "a negative context": (
        "iterations", put("context", 2, -4), "iteration 2: the context length is negative"),
    "a negative time": ("iterations", put("time_us", 1, -1.0), "iteration 1: time_us is negative"),
    "an infinite time": (
        "iterations", put("time_us", 1, float("inf")), "iteration 1: time_us is negative or inf"),
    "a token too few": ("tokens", drop(3), "iteration 1: 1 tokens, the pass has 2"),
    "an unknown token state": (
        "tokens", put("state", 3, 7), "iteration 1: position 5: the token state is unknown"),
    "a negative position": (
        "tokens", put("position", 0, -4), "iteration 0: position -4: the position is negative"),
    "a position twice": (
        "tokens", put("position", 3, 4), "iteration 1: position 4: .* not strictly ascending"),
    "a negative token id": (
        "tokens", put("token_id", 2, -2), "iteration 1: position 4: the token id is negative"),
    "accepted but decoded": (
        "tokens", put("accepted", 2, True), "iteration 1: position 4: accepted but not masked"),
    "edited but masked": (
        "tokens", put("edited", 1, True), "iteration 0: position 5: edited but not decoded"),
    "a wrong accepted count": (
        "iterations", put("accepted", 1, 2), "iteration 1: the accepted count is not that"),
    "a confidence above one": (
        "tokens", put("confidence", 5, np.float16(1.5)), "iteration 2: position 5: the conf"),
    "a negative confidence": (
        "tokens", put("confidence", 5, np.float16(-0.5)), "iteration 2: position 5: the conf"),
    "a masked token without confidence": (
        "tokens", put("confidence", 1, np.float16(NAN)),
        "iteration 0: position 5: a masked token has no confidence"),
    "a layer that the model lacks": (
        "routing", put("layer", 4, 3), r"iteration 1, layer 3: .* recorded layers are \[1, 2, 5\]"),
    "layers out of order": (
        "routing", swap(3, 4), "iteration 1, layer 1: events are not in order"),
    "a layer twice": ("routing", put("layer", 4, 1), "iteration 1, layer 1: events are not in"),
    "a layer left out": ("routing", drop(4), "iteration 1, layer 2: the layer has no event"),
    "fewer tokens in one layer than in another": (
        "routing",
        resize(7, 1),
        "iteration 2, layer 2: the event does not hold every token of its pass"),
    "more tokens than the pass": (
        "routing",
        resize(8, 4),
        "iteration 2, layer 5: the event does not hold every token"),
    "an event without rows": (
        "routing", resize(1, 0), "iteration 0, layer 2: the event has no row"),
    "ids that are no multiple of k": (
        "routing", put("experts", 5, [1, 2, 3, 4]),
        "iteration 1, layer 5: 4 values of 'experts' are no multiple of 3"),
    "gates that are no multiple of k": (
        "routing", put("gates", 5, [np.float16(1)] * 5),
        "iteration 1, layer 5: 5 values of 'gates' are no multiple of 3"),
    "fewer gates than ids": (
        "routing", put("gates", 5, [np.float16(x) for x in (0.5, 0.3, 0.2)]),
        "gates has shape"),
    "an id out of range": (
        "routing", put_in("experts", 2, 4, 12),
        r"iteration 0, layer 5: position 5: ids \[1, 12, 3\] are not all within 0..11"),
    "a padding id that wrapped around": (
        "routing", put("experts", 2, [255] * 6), r"iteration 0, layer 5: .* \[255, 255, 255\]"),
    "an expert twice in a top-k": (
        "routing", put_in("experts", 4, 2, 4),
        r"iteration 1, layer 2: position 4: an expert occurs twice in the top-k \[9, 4, 4\]"),
    "a padding row of zeros": (
        "routing", put("experts", 6, [9, 4, 7, 0, 0, 0]),
        r"iteration 2, layer 1: position 5: ids \[0, 0, 0\] are all 0: drop padding"),
    "a gate that is no number": (
        "routing", put_in("gates", 1, 0, np.float16(NAN)), "iteration 0, layer 2: .* not finite"),
    "a negative gate": (
        "routing", put_in("gates", 1, 5, np.float16(-0.2)),
        "iteration 0, layer 2: position 5: a gate .* is negative"),
    "gates that do not sum to one": (
        "routing", put_in("gates", 3, 0, np.float16(0.75)),
        "iteration 1, layer 1: position 4: the gates .* do not sum to 1"),
    "slots out of score order": (
        "routing", lambda c: put("gates", 3, [c["gates"][3][i] for i in (1, 0, 2, 3, 4, 5)])(c),
        r"iteration 1, layer 1: position 4: experts \[9, 4, 7\] are not in order of gate score"),
    "a tie out of id order": (
        "routing", put("experts", 3, [9, 7, 4, 1, 2, 3]),
        r"iteration 1, layer 1: position 4: experts \[9, 7, 4\] are not in order"),
    "a full gate above one": (
        "routing", put_in("full_gate", 7, 3, np.float16(1.25)),
        "iteration 2, layer 2: the full gate is not within 0..1"),
    "a full gate that is no number": (
        "routing", put_in("full_gate", 7, 3, np.float16(NAN)), "iteration 2, layer 2: the full"),
    "a full gate of another width": (
        "routing", put("full_gate", 7, [np.float16(0.5)] * 11),
        "iteration 2, layer 2: 11 values of 'full_gate' are no multiple of 12"),
    "a cosine above one": (
        "iterations", put_in("cosines", 1, 8, np.float16(1.5)), "iteration 1, layer 2: a cosine"),
    "cosines for too few layers": (
        "iterations", put("cosines", 1, [np.float16(1)] * 16), "cosines has shape"),
    "an embedding that is not finite": (
        "iterations", put_in("embedding", 2, 1, np.float16("inf")),
        "iteration 2: the embedding is not finite"),
    "an embedding of another width": (
        "iterations", put("embedding", 2, [np.float16(1)] * 3), "iteration 2: 3 values of 'emb"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_with_its_place(fixed, name):
    table, change, message = BROKEN[name]
    assert len(list(open_trace(fixed))) == 1
    edit_table(fixed, table, change)
    with pytest.raises(TraceError, match=message) as error:
        open_trace(fixed).read(0)
    text = str(error.value)
    assert "/00000.parquet, request 0" in text
    assert "\n" not in text


def test_ragged_rows_must_belong_to_the_pass(tmp_path, geometry):
    builder = RequestBuilder(geometry, 0)
    event = LayerRoutes(1, [0, 1], [[1, 2, 3], [4, 5, 6]], [[0.5, 0.3, 0.2]] * 2)
    for _ in range(2):
        builder.add_pass(1, 0, 0, [0, 0], [0, 1], [0, 0], [0.5, 0.5], [0, 0], [0, 0], [event])
    path = write_trace(tmp_path / "t", [builder.build()], geometry, ragged=True).path
    for wrong, message in (
        ([0, 2], "iteration 1, layer 2: a row belongs to no token of the pass"),
        ([-1, 1], "iteration 1, layer 2: a row belongs to no token of the pass"),
        ([1, 1], "iteration 1, layer 2: position 1: rows are not in position order"),
        ([1, 0], "iteration 1, layer 2: position 0: rows are not in position order"),
        ([0], "'token' and 'experts' differ in length"),
    ):
        edit_table(path, "routing", put("token", 1, wrong))
        with pytest.raises(TraceError, match=message):
            open_trace(path).read(0)
    edit_table(path, "routing", put("token", 1, [1, 0]))
    edit_manifest(path, row_order="source")
    assert open_trace(path).read(0).row_token.tolist() == [0, 1, 3, 2]
    edit_table(path, "routing", put("token", 1, [1, 1]))
    with pytest.raises(TraceError, match="layer 2: position 1: the token has two rows"):
        open_trace(path).read(0)


def test_layers_may_be_missing_in_ragged_traces_only(tmp_path, geometry):
    rng = np.random.default_rng(0)
    written = random_request(rng, geometry, passes=6, ragged=True)
    assert written.events < 6 * 3
    write_trace(tmp_path / "ragged", [written], geometry, ragged=True)
    with pytest.raises(TraceError, match=r"the layer has no event|every token"):
        write_trace(tmp_path / "whole", [written], geometry)


# Recorders in the wild: what they leave in a trace when they go wrong.


def long_request(ids, gates=None, *, geometry, signals=("ids", "confidence", "token_state")):
    """A prefill whose layers all route alike: ``ids`` [T, k]."""
    tokens, layers = len(ids), len(geometry.layers)
    builder = RequestBuilder(geometry, 0)
    builder.add_pass(
        Kind.PREFILL, 0, 0, np.zeros(tokens), np.arange(tokens),
        np.full(tokens, TokenState.PROMPT), np.full(tokens, NAN), np.zeros(tokens),
        np.zeros(tokens), np.stack([ids] * layers),
        None if gates is None else np.stack([gates] * layers),
    )  # fmt: skip
    return builder.build(), random_manifest(geometry, signals=signals)


def varied(tokens, experts=12, k=3):
    return np.argsort(np.random.default_rng(0).random((tokens, experts)))[:, :k]


def test_dummy_rows_of_a_profiling_batch_are_found(geometry):
    ids = varied(200)
    ids[40:170] = [2, 5, 7]
    with pytest.raises(TraceError, match=r"layer 1: position 40: 128 equal rows \[2, 5, 7\]"):
        check_request(*long_request(ids, geometry=geometry), "t")
    ids[100] = [1, 2, 3]  # two shorter runs may be text
    check_request(*long_request(ids, geometry=geometry), "t")


def test_equal_rows_with_unequal_gates_are_no_dummy_rows(geometry):
    ids = np.tile([2, 5, 7], (200, 1))
    gates = np.tile([0.5, 0.3, 0.2], (200, 1))
    gated = ("ids", "gates", "confidence", "token_state")
    with pytest.raises(TraceError, match=r"layer 1: position 0: 64 equal rows \[2, 5, 7\]"):
        check_request(*long_request(ids, gates, geometry=geometry, signals=gated), "t")
    gates[::50] = [0.51, 0.29, 0.2]
    check_request(*long_request(ids, gates, geometry=geometry, signals=gated), "t")


def test_a_run_of_equal_rows_does_not_cross_events(geometry):
    builder = RequestBuilder(geometry, 0)
    ids = np.tile([2, 5, 7], (3, 100, 1))
    columns = (np.zeros(100), np.arange(100), np.full(100, 2), np.full(100, NAN))
    builder.add_pass(0, 0, 0, *columns, np.zeros(100), np.zeros(100), ids)
    manifest = random_manifest(geometry, signals=("ids", "confidence", "token_state"))
    check_request(builder.build(), manifest, "t")


def test_an_unfilled_shard_is_found(geometry):
    ids = varied(80)
    ids = np.where(ids == 0, 11, ids)
    ids[:, 1] = np.where(ids[:, 0] == 11, 10, 11)  # distinct, whatever came before
    ids[:, 2] = 0
    with pytest.raises(TraceError, match="layer 1: expert 0 fills one slot of every row"):
        check_request(*long_request(ids, geometry=geometry), "t")
    ids[50, 2] = 6 if 6 not in ids[50] else 5  # one other expert shows that the slot is recorded
    check_request(*long_request(ids, geometry=geometry), "t")


def test_an_unfilled_shard_of_a_top_1_model_is_found():
    geometry = RoutingGeometry((3,), 8, 1)
    with pytest.raises(TraceError, match="layer 3"):
        check_request(*long_request(np.zeros((200, 1), int), geometry=geometry), "t")
    check_request(*long_request(varied(200, 8, 1), geometry=geometry), "t")


def test_expert_0_with_a_gate_of_its_own_is_no_unfilled_shard(geometry):
    ids = varied(80)
    ids = np.where(ids == 0, 11, ids)
    ids[:, 1] = np.where(ids[:, 0] == 11, 10, 11)
    ids[:, 2] = 0
    gates = np.sort(np.random.default_rng(0).dirichlet([5, 5, 5], 80))[:, ::-1]
    gated = ("ids", "gates", "confidence", "token_state")
    check_request(*long_request(ids, gates, geometry=geometry, signals=gated), "t")
    gates = np.column_stack(
        [np.linspace(0.5, 0.9, 80), 1 - np.linspace(0.5, 0.9, 80), np.zeros(80)]
    )
    with pytest.raises(TraceError, match="expert 0 fills one slot"):
        check_request(*long_request(ids, gates, geometry=geometry, signals=gated), "t")


def test_gates_of_another_convention_need_not_sum_to_one(tmp_path, geometry):
    rng = np.random.default_rng(0)
    base = random_request(rng, geometry, passes=3)
    raw = dataclasses.replace(base, gates=(base.gates * np.float16(-3)).astype(np.float16))
    manifest = random_manifest(geometry, gate_convention="router logits")
    trace = write_trace(tmp_path / "t", [raw], geometry, manifest=manifest)
    gates = trace.read(0).gates
    assert (np.diff(gates, axis=1) <= 0).all()
    edit_table(trace.path, "routing", put_in("gates", 4, 2, np.float16("inf")))
    with pytest.raises(TraceError, match=r"iteration 1, layer 2: .* not finite"):
        open_trace(trace.path).read(0)


# Damage in memory, before it reaches a file.


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("block", "block has"),
        ("confidence", "confidence has"),
        ("row_token", "row_token has"),
        ("token_offset", "token_offset has"),
        ("event_offset", "event_offset has"),
        ("gates", "gates has shape"),
    ],
)
def test_arrays_of_unequal_length_are_refused(geometry, field, message):
    trace = random_request(np.random.default_rng(0), geometry, passes=4)
    short = dataclasses.replace(trace, **{field: getattr(trace, field)[:-1]})
    with pytest.raises(TraceError, match=message):
        check_request(short, random_manifest(geometry), "t")


def test_a_missing_signal_is_refused_on_write(tmp_path, geometry):
    trace = dataclasses.replace(random_request(np.random.default_rng(0), geometry), gates=None)
    with pytest.raises(TraceError, match="the manifest promises the signal 'gates'"):
        write_trace(tmp_path / "t", [trace], geometry)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_no_valid_request_is_refused(data):
    geometry = data.draw(geometries())
    ragged = data.draw(st.booleans())
    trace = data.draw(requests(geometry, ragged=ragged))
    check_request(trace, random_manifest(geometry, ragged=ragged), "t")


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_id_made_invalid_is_found(data):
    """A duplicate or an id out of range, anywhere in any request."""
    geometry = data.draw(geometries().filter(lambda g: g.top_k > 1))
    trace = data.draw(requests(geometry))
    row = data.draw(st.integers(0, len(trace.experts) - 1))
    slot = data.draw(st.integers(0, geometry.top_k - 1))
    experts = trace.experts.copy()
    others = np.delete(experts[row], slot).tolist()
    experts[row, slot] = data.draw(st.sampled_from([*others, geometry.experts, 255]))
    event = np.searchsorted(trace.event_offset, row, "right") - 1
    iteration = trace.event_pass[event]
    layer = geometry.layers[trace.event_layer[event]]
    with pytest.raises(TraceError, match=f"request 0, iteration {iteration}, layer {layer}: "):
        check_request(dataclasses.replace(trace, experts=experts), random_manifest(geometry), "t")


def test_a_trace_that_is_not_ragged_holds_rows_in_the_order_of_their_tokens(geometry):
    """It does not store the token of a row: another order would be lost without a word."""
    request = random_request(np.random.default_rng(0), geometry, passes=2)
    swapped = request.row_token.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    wrong = dataclasses.replace(request, row_token=swapped)
    manifest = random_manifest(geometry, row_order="source")
    check_request(request, manifest, "x")
    with pytest.raises(TraceError, match="rows are not in position order"):
        check_request(wrong, manifest, "x")
    check_request(wrong, random_manifest(geometry, row_order="source", ragged=True), "x")
