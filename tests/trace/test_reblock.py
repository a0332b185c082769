"""Passes of an autoregressive trace put together to blocks: a hand-worked case, and its laws."""

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.errors import TraceError, UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_manifest, random_request, write_trace
from oled_sim.trace.builder import LayerRoutes, RequestBuilder
from oled_sim.trace.manifest import Decode
from oled_sim.trace.reader import open_trace
from oled_sim.trace.reblock import reblock, reblock_trace, reblocked_manifest
from oled_sim.trace.schema import Kind, TokenState

GEOMETRY = RoutingGeometry((1, 3), 8, 2)
AUTOREGRESSIVE = Decode(rule="autoregressive", block_length=1)


def decoded(positions, routes, *, prompt=None, layers=None, geometry=GEOMETRY):
    """Build a request that decodes one position per pass; ``routes`` [passes, layers, k]."""
    builder = RequestBuilder(geometry, 0, source_order=True)
    every = tuple(range(len(geometry.layers)))
    if prompt is not None:
        tokens = prompt.shape[1]
        builder.add_pass(
            Kind.PREFILL, tokens, 0, [-1] * tokens, range(tokens), [TokenState.PROMPT] * tokens,
            [np.nan] * tokens, [False] * tokens, [False] * tokens, prompt, time_us=9.0,
        )  # fmt: skip
    for i, position in enumerate(positions):
        events = [LayerRoutes(v, [0], [routes[i][v]]) for v in (layers[i] if layers else every)]
        builder.add_pass(
            Kind.DENOISE, position, position, [-1], [position], [TokenState.MASKED], [np.nan],
            [True], [False], events, time_us=5.0,
        )  # fmt: skip
    return builder.build()


def test_by_hand():
    """Prompt of 3, then positions 3 to 9 in blocks of 4: {3}, {4..7}, {8, 9}."""
    prompt = np.array([[[0, 1]] * 3, [[2, 3]] * 3])
    routes = [[[i, i + 1], [7 - i, 6 - i]] for i in range(7)]
    request = reblock(decoded(range(3, 10), routes, prompt=prompt), 4)
    assert request.kind.tolist() == [Kind.PREFILL, Kind.DENOISE, Kind.DENOISE, Kind.DENOISE]
    assert request.token_offset.tolist() == [0, 3, 4, 8, 10]
    assert request.position.tolist() == list(range(10))
    assert request.block.tolist() == [0, 0, 1, 2]  # the prefill leads to the block of position 3
    assert request.context.tolist() == [0, 3, 4, 8]
    assert request.accepted_count.tolist() == [0, 1, 4, 2]
    assert request.time_us[0] == 9.0
    assert np.isnan(request.time_us[1:]).all()
    assert request.event_pass.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert request.event_layer.tolist() == [0, 1] * 4
    assert request.event_offset.tolist() == [0, 3, 6, 7, 8, 12, 16, 18, 20]
    # The second block: positions 4 to 7 in layer 1, then the same in layer 3.
    assert request.row_token[8:16].tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    assert request.experts[8:16].tolist() == [
        [1, 2], [2, 3], [3, 4], [4, 5], [6, 5], [5, 4], [4, 3], [3, 2],
    ]  # fmt: skip


def test_layers_that_a_token_misses_stay_missing():
    routes = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    request = reblock(decoded([0, 1], routes, layers=[(0, 1), (1,)]), 8)
    assert request.event_layer.tolist() == [0, 1]
    assert request.event_offset.tolist() == [0, 1, 3]
    assert request.row_token.tolist() == [0, 0, 1]


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 5), st.integers(2, 9))
def test_laws(seed, tokens, start, length):
    """Nothing but the passes changes; a block holds the union of its tokens' experts."""
    rng = np.random.default_rng(seed)
    routes = np.argsort(rng.random((tokens, 2, 8)), axis=-1)[..., :2]
    positions = start + np.cumsum(rng.integers(1, 3, tokens))
    before = decoded(positions, routes)
    after = reblock(before, length)
    for name in ("position", "state", "accepted", "token_id"):
        assert np.array_equal(getattr(before, name), getattr(after, name))
    assert after.accepted_count.sum() == tokens
    blocks = positions // length
    assert after.block.tolist() == sorted(set(blocks.tolist()))
    for v in range(after.events):
        rows = slice(after.event_offset[v], after.event_offset[v + 1])
        mine = blocks == after.block[after.event_pass[v]]
        assert np.array_equal(after.experts[rows], routes[mine, after.event_layer[v]])
    # Blocks within blocks: the longer ones are the same whichever way they are reached.
    again, once = reblock(after, 3 * length), reblock(before, 3 * length)
    assert np.array_equal(again.event_offset, once.event_offset)
    assert np.array_equal(again.experts, once.experts)


def test_a_trace_is_cut_on_disk(tmp_path):
    routes = np.argsort(np.random.default_rng(0).random((20, 2, 8)), axis=-1)[..., :2]
    manifest = random_manifest(GEOMETRY, signals=("ids",), row_order="source")
    manifest = type(manifest)(**{f: getattr(manifest, f) for f in manifest.__struct_fields__} | {
        "decode": AUTOREGRESSIVE
    })  # fmt: skip
    trace = write_trace(tmp_path / "ar", [decoded(range(20), routes)], GEOMETRY, manifest=manifest)
    made = reblock_trace(trace, tmp_path / "blocks", 16)
    assert made.decode == Decode(rule="autoregressive", block_length=16)
    assert "blocks of 16 tokens" in made.notes
    request = open_trace(tmp_path / "blocks").read(0)
    assert np.diff(request.token_offset).tolist() == [16, 4]
    assert made.requests[0].output_tokens == trace.manifest.requests[0].output_tokens
    with pytest.raises(UsageError, match="is the trace itself"):
        reblock_trace(trace, tmp_path / "ar", 16, overwrite=True)


def test_what_is_not_autoregressive_is_refused():
    request = random_request(np.random.default_rng(0), GEOMETRY, passes=12)
    with pytest.raises(TraceError, match="is decoded after a later one or twice"):
        reblock(request, 4)
    with pytest.raises(UsageError, match=r"the decoding rule of this one is '2\.0'"):
        reblocked_manifest(random_manifest(GEOMETRY), 4)
