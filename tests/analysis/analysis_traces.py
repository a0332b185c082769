"""A request small enough to work every figure out by hand, and plain sets of any request."""

from oled_sim.geometry import RoutingGeometry
from oled_sim.trace import Kind, RequestBuilder, TokenState

NAN = float("nan")
M, D, P = TokenState.MASKED, TokenState.DECODED, TokenState.PROMPT
GEOMETRY = RoutingGeometry((1, 4), 6, 2)

PASSES = [
    # kind, block, positions, states, experts at layer 1, confidence, accepted
    (Kind.PREFILL, 0, [0, 1], [P, M], [[0, 1], [0, 2]], [NAN, 0.5], [0, 0]),
    (Kind.DENOISE, 0, [0, 1], [P, M], [[0, 1], [0, 3]], [NAN, 0.75], [0, 1]),
    (Kind.COMMIT, 0, [0, 1], [P, D], [[0, 1], [4, 5]], [NAN, 0.25], [0, 0]),
    (Kind.DENOISE, 1, [2, 3], [M, M], [[0, 1], [1, 2]], [0.5, 0.25], [1, 0]),
    (Kind.DENOISE, 1, [2, 3], [D, M], [[2, 3], [1, 2]], [1.0, 0.75], [0, 1]),
    (Kind.COMMIT, 1, [2, 3], [D, D], [[2, 3], [0, 2]], [1.0, 0.5], [0, 0]),
]
"""Sets A of layer 1: {0,1,2}, {0,1,3}, {0,1,4,5}, {0,1,2}, {1,2,3}, {0,2,3}."""


def worked_request(**signals):
    """Two blocks of two tokens, layers 1 and 4, six experts, top-2; layer 4 always routes {4, 5}.

    ``signals``: name of an optional argument of ``add_pass`` to its values, one per pass.
    """
    builder = RequestBuilder(GEOMETRY, 0)
    for i, (kind, block, position, state, experts, confidence, accepted) in enumerate(PASSES):
        optional = {name: values[i] for name, values in signals.items()}
        builder.add_pass(
            kind, block, 2 * block, [7, 7], position, state, confidence, accepted, [0, 0],
            [experts, [[4, 5], [4, 5]]], **optional,
        )  # fmt: skip
    return builder.build()


def event_sets(trace):
    """Return [(pass, layer index, [experts of each row])] in order."""
    return [
        (
            int(trace.event_pass[v]),
            int(trace.event_layer[v]),
            trace.experts[trace.event_offset[v] : trace.event_offset[v + 1]].tolist(),
        )
        for v in range(trace.events)
    ]


def union(rows):
    return {expert for row in rows for expert in row}


def one(table, **where):
    """Return the only row of ``table`` that fits, as a dict."""
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, f"{len(table)} rows fit {where}"
    return table.iloc[0].to_dict()
