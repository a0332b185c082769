"""Statistics on traces small enough to work out by hand."""

import math

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import geometries, random_request, requests
from oled_sim.trace import Kind, LayerRoutes, RequestBuilder, TokenState
from oled_sim.trace.stats import activation, trace_statistics

NAN = float("nan")
M, D, P = TokenState.MASKED, TokenState.DECODED, TokenState.PROMPT
GEOMETRY = RoutingGeometry((1, 4), 6, 2)


def worked_request():
    """Two blocks of two tokens, two layers (1 and 4), six experts, top-2.

    Layer 4 always routes {4, 5}. Layer 1, per pass and position:

    | pass | kind    | block | positions: state, experts              | confidence | accepted |
    |------|---------|-------|----------------------------------------|------------|----------|
    | 0    | prefill | 0     | 0: P {0,1}, 1: M {0,2}                 | -, .5      |          |
    | 1    | denoise | 0     | 0: P {0,1}, 1: M {0,3}                 | -, .75     | 1        |
    | 2    | commit  | 0     | 0: P {0,1}, 1: D {4,5}                 | -, .25     |          |
    | 3    | denoise | 1     | 2: M {0,1}, 3: M {1,2}                 | .5, .25    | 2        |
    | 4    | denoise | 1     | 2: D {2,3}, 3: M {1,2}                 | 1, .75     | 3        |
    | 5    | commit  | 1     | 2: D {2,3}, 3: D {0,2}                 | 1, .5      |          |
    """
    rows = [
        (Kind.PREFILL, 0, [0, 1], [P, M], [[0, 1], [0, 2]], [NAN, 0.5], [0, 0]),
        (Kind.DENOISE, 0, [0, 1], [P, M], [[0, 1], [0, 3]], [NAN, 0.75], [0, 1]),
        (Kind.COMMIT, 0, [0, 1], [P, D], [[0, 1], [4, 5]], [NAN, 0.25], [0, 0]),
        (Kind.DENOISE, 1, [2, 3], [M, M], [[0, 1], [1, 2]], [0.5, 0.25], [1, 0]),
        (Kind.DENOISE, 1, [2, 3], [D, M], [[2, 3], [1, 2]], [1.0, 0.75], [0, 1]),
        (Kind.COMMIT, 1, [2, 3], [D, D], [[2, 3], [0, 2]], [1.0, 0.5], [0, 0]),
    ]
    builder = RequestBuilder(GEOMETRY, 0)
    for kind, block, position, state, experts, confidence, accepted in rows:
        builder.add_pass(
            kind, block, 2 * block, [7, 7], position, state, confidence, accepted, [0, 0],
            [experts, [[4, 5], [4, 5]]],
        )  # fmt: skip
    return builder.build()


@pytest.fixture(scope="module")
def statistics():
    return trace_statistics([worked_request()], GEOMETRY)


def test_passes(statistics):
    assert statistics.passes == {"prefill": 1, "denoise": 3, "commit": 2}
    assert statistics.tokens_per_pass == {"prefill": 2, "denoise": 2, "commit": 2}
    assert statistics.accepted_per_denoise == 1  # 3 accepted in 3 passes


def test_activated_experts(statistics):
    # Layer 1 in passes 1, 3, 4: {0,1,3}, {0,1,2}, {1,2,3}. Layer 4: always {4, 5}.
    assert statistics.activated[1].mean == 3
    assert (statistics.activated[1].low, statistics.activated[1].high) == (3, 3)
    assert statistics.activated[4].mean == 2
    assert statistics.activated_mean == 2.5


def test_overlap(statistics):
    # Within blocks, layer 1: pass 1 -> 2 {0,1,3} & {0,1,4,5}: 2/3. 3 -> 4 {0,1,2} & {1,2,3}: 2/3.
    # 4 -> 5 {1,2,3} & {0,2,3}: 2/3. Layer 4: 1 each. Mean of 3 * 2/3 + 3 * 1 over 6 = 5/6.
    # Pass 0 -> 1 is left out: a prefill.
    assert statistics.adjacent_overlap == pytest.approx(5 / 6)
    # Across: pass 2 -> 3, layer 1 {0,1,4,5} & {0,1,2}: 2/4; layer 4: 1.
    assert statistics.boundary_overlap == pytest.approx(0.75)


def test_confidence(statistics):
    # Masked tokens of denoise passes: .75, .5, .25, .75; the accepted ones: .75, .5, .75.
    assert statistics.confidence_masked == pytest.approx(2.25 / 4)
    assert statistics.confidence_accepted == pytest.approx(2 / 3)


def test_route_stability(statistics):
    # Shares are means over both layers; layer 4 keeps everything.
    # Still masked: position 1, pass 0 -> 1 {0,2} & {0,3}: (1/2 + 1)/2 = .75, confidence .5;
    #               position 3, pass 3 -> 4 {1,2} & {1,2}: 1, confidence .25.
    masked = statistics.stability["masked"]
    assert (masked.transitions, masked.kept) == (2, pytest.approx(0.875))
    assert masked.correlation == pytest.approx(-1)  # two points, falling
    # Accepted: position 1, pass 1 -> 2 {0,3} & {4,5}: .5, confidence .75;
    #           position 2, pass 3 -> 4 {0,1} & {2,3}: .5, confidence .5;
    #           position 3, pass 4 -> 5 {1,2} & {0,2}: .75, confidence .75.
    accepted = statistics.stability["accepted"]
    assert (accepted.transitions, accepted.kept) == (3, pytest.approx(1.75 / 3))
    # x - mean: 1/12, -1/6, 1/12; y - mean: -1/12, -1/12, 1/6. Sxy = 1/48, Sxx = Syy = 1/24.
    assert accepted.correlation == pytest.approx(0.5)
    # Decoded: position 2, pass 4 -> 5 {2,3} & {2,3}: 1. One point has no correlation.
    decoded = statistics.stability["decoded"]
    assert (decoded.transitions, decoded.kept) == (1, 1)
    assert math.isnan(decoded.correlation)
    assert statistics.stability["edited"].transitions == 0
    assert math.isnan(statistics.stability["edited"].kept)
    # Prompt tokens (position 0) are in none of them.
    everything = statistics.stability["all"]
    assert (everything.transitions, everything.kept) == (6, pytest.approx(4.5 / 6))


def test_edited_tokens_are_apart():
    builder = RequestBuilder(RoutingGeometry((1,), 4, 1), 0)
    for edited, expert in ((1, 0), (0, 3)):
        builder.add_pass(1, 0, 0, [1], [0], [D], [0.5], [0], [edited], [[[expert]]])
    stability = trace_statistics([builder.build()], builder.geometry).stability
    assert stability["edited"].transitions == 1
    assert stability["edited"].kept == 0
    assert stability["decoded"].transitions == 0


def test_ragged_passes_count_where_both_recorded():
    geometry = RoutingGeometry((1, 2), 4, 1)
    builder = RequestBuilder(geometry, 0)
    columns = ([1, 1], [0, 1], [M, M], [0.5, 0.5], [0, 0], [0, 0])
    # Layer 1 has both passes, but token 1 only in the first; layer 2 has the first pass only.
    first = [LayerRoutes(0, [0, 1], [[0], [1]]), LayerRoutes(1, [0, 1], [[2], [3]])]
    builder.add_pass(1, 0, 0, *columns, first)
    builder.add_pass(1, 0, 0, *columns, [LayerRoutes(0, [0], [[0]])])
    statistics = trace_statistics([builder.build()], geometry)
    assert statistics.adjacent_overlap == 0.5  # {0, 1} & {0}
    assert statistics.stability["masked"].transitions == 1
    assert statistics.stability["masked"].kept == 1
    assert statistics.activated[1].mean == 1.5
    assert statistics.activated[2].mean == 2


def test_statistics_over_nothing_are_nan_not_errors():
    builder = RequestBuilder(GEOMETRY, 0)
    routes = [[[0, 1]], [[0, 1]]]
    builder.add_pass(Kind.PREFILL, 0, 0, [1], [0], [P], [NAN], [0], [0], routes)
    statistics = trace_statistics([builder.build()], GEOMETRY)
    for value in (
        statistics.adjacent_overlap,
        statistics.boundary_overlap,
        statistics.accepted_per_denoise,
        statistics.confidence_masked,
        statistics.activated[1].mean,
        statistics.stability["all"].correlation,
    ):
        assert math.isnan(value)


def test_constant_confidence_has_no_correlation():
    rng = np.random.default_rng(0)
    request = random_request(rng, GEOMETRY, passes=30, signals=("ids", "token_state"))
    assert math.isnan(trace_statistics([request], GEOMETRY).stability["all"].correlation)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_statistics_agree_with_plain_sets(data):
    """Differential: the same definitions, token by token and set by set."""
    geometry = data.draw(geometries())
    traces = [
        data.draw(requests(geometry, ragged=data.draw(st.booleans()), request=i)) for i in range(2)
    ]
    statistics = trace_statistics(traces, geometry)
    adjacent, boundary, stable, confidence = plain_statistics(traces)
    assert_mean(statistics.adjacent_overlap, adjacent)
    assert_mean(statistics.boundary_overlap, boundary)
    assert statistics.stability["all"].transitions == len(stable)
    assert_mean(statistics.stability["all"].kept, stable)
    if len(stable) > 2 and np.std(stable) > 1e-3 and np.std(confidence) > 1e-3:
        expected = np.corrcoef(confidence, stable)[0, 1]
        assert statistics.stability["all"].correlation == pytest.approx(expected, abs=1e-6)


def assert_mean(value, samples):
    if samples:
        assert value == pytest.approx(np.mean(samples))
    else:
        assert math.isnan(value)


def plain_statistics(traces):
    adjacent, boundary, stable, confidence = [], [], [], []
    for trace in traces:
        sets, routes = plain_routes(trace)
        for (i, layer), now in sets.items():
            then = sets.get((i + 1, layer))
            if then and Kind.PREFILL not in (trace.kind[i], trace.kind[i + 1]):
                share = len(now & then) / len(now)
                (adjacent if trace.block[i] == trace.block[i + 1] else boundary).append(share)
        for i in range(trace.passes - 1):
            for token in range(trace.token_offset[i], trace.token_offset[i + 1]):
                position = int(trace.position[token])
                shares = [
                    len(ids & routes[i + 1, layer, position]) / len(ids)
                    for (j, layer, p), ids in routes.items()
                    if j == i and p == position and (i + 1, layer, position) in routes
                ]
                if shares and trace.state[token] != P:
                    stable.append(np.mean(shares))
                    confidence.append(trace.confidence[token])
    return adjacent, boundary, stable, confidence


def plain_routes(trace):
    """Return {(pass, layer): experts} and {(pass, layer, position): experts}."""
    sets, routes = {}, {}
    for v in range(trace.events):
        place = int(trace.event_pass[v]), int(trace.event_layer[v])
        for row in range(trace.event_offset[v], trace.event_offset[v + 1]):
            ids = set(trace.experts[row].tolist())
            sets.setdefault(place, set()).update(ids)
            routes[*place, int(trace.position[trace.row_token[row]])] = ids
    return sets, routes


def test_activation_is_the_union_of_the_routes():
    trace = worked_request()
    active = activation(trace, 6)
    assert active.shape == (12, 6)
    assert np.flatnonzero(active[4]).tolist() == [0, 1, 4, 5]  # layer 1 of pass 2
    assert np.flatnonzero(active[5]).tolist() == [4, 5]
