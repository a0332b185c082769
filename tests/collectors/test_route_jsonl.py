"""Importing route logs in JSON lines: passes, dummy batches, requests side by side, bad lines."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.collectors.route_jsonl import import_route_jsonl
from oled_sim.collectors.route_jsonl_rows import RouteLog
from oled_sim.errors import TraceError
from oled_sim.trace import Kind, open_trace

META = {
    "type": "meta", "model_id": "maker/toy-moe", "vllm_version": "0.11", "layers_logged": [0, 2],
    "top_k": 2,
}  # fmt: skip


def route(token, layer, ids, weights=(0.5, 0.5), request="r1", **rest):
    return {
        "type": "route", "req_id": request, "token_idx": token, "layer": layer,
        "topk_ids": list(ids), "topk_weights": list(weights), **rest,
    }  # fmt: skip


def write(folder, records, name="routes.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def imported(folder, records, name="routes.jsonl", **options):
    notes = []
    path = write(folder, records, name)
    options.setdefault("experts", 8)
    import_route_jsonl(path, folder / f"{name}.trace", on_note=notes.append, **options)
    return open_trace(folder / f"{name}.trace"), notes


SEQUENCE = [
    route(0, 0, (1, 2)), route(1, 0, (3, 4)), route(2, 0, (5, 6)),
    route(0, 2, (7, 1)), route(1, 2, (2, 3)), route(2, 2, (4, 5), (0.3, 0.1)),
    route(3, 0, (6, 7)), route(3, 2, (1, 3)),
    route(4, 0, (2, 4)), route(4, 2, (3, 5)),
]  # fmt: skip


def test_a_sequence_by_hand(tmp_path):
    """A prompt of three tokens, layer by layer, then two decoded ones."""
    trace, notes = imported(tmp_path, [META, *SEQUENCE])
    request, manifest = trace.read(0), trace.manifest
    assert notes == []
    assert request.kind.tolist() == [Kind.PREFILL, Kind.DENOISE, Kind.DENOISE]
    assert request.token_offset.tolist() == [0, 3, 4, 5]
    assert request.context.tolist() == [0, 3, 4]
    assert request.event_offset.tolist() == [0, 3, 6, 7, 8, 9, 10]
    assert request.experts.tolist() == [r["topk_ids"] for r in SEQUENCE]
    assert request.gates is not None
    assert request.gates[5].tolist() == [0.75, 0.25]
    assert manifest.model.name == "toy-moe"
    assert manifest.model.layers == (0, 2)
    assert manifest.runtime.name == "vLLM 0.11"
    assert manifest.decode is not None
    assert manifest.decode.rule == "autoregressive"
    assert (manifest.requests[0].prompt_tokens, manifest.requests[0].output_tokens) == (3, 2)


def test_prompt_tokens_cut_a_log_of_one_layer(tmp_path):
    """One layer shows no passes: the prompt's length must be said, or everything is decoded."""
    records = [META, *(route(t, 0, (t + 1, 7)) for t in range(6))]
    trace, notes = imported(tmp_path, records, prompt_tokens=4)
    assert np.diff(trace.read(0).token_offset).tolist() == [4, 1, 1]
    assert notes == []
    trace, notes = imported(tmp_path, records, "again.jsonl")
    assert trace.read(0).passes == 6
    assert "does not tell prompt and decoding of 1 request apart" in notes[0]


def dummies(tokens, layers=(0,), ids=(3, 5)):
    return [route(t, layer, ids, (0.2, 0.1)) for layer in layers for t in range(tokens)]


def test_leading_profiling_rows_are_left_out(tmp_path):
    """Positions went on counting in some logs; they start at 0 all the same."""
    records = [META, *dummies(200), *(route(200 + t, 0, (t + 1, 6)) for t in range(5))]
    trace, notes = imported(tmp_path, records)
    assert notes[0] == (
        "200 tokens of an engine's profiling batch (equal routes in sequence) are left out"
    )
    assert trace.read(0).position.tolist() == [0, 1, 2, 3, 4]
    assert trace.read(0).experts[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_profiling_rows_in_every_layer_are_left_out(tmp_path):
    records = [META, *dummies(100, layers=(0, 2)), *SEQUENCE]
    trace, notes = imported(tmp_path, records)
    assert "100 tokens" in notes[0]
    assert trace.read(0).experts.tolist() == [r["topk_ids"] for r in SEQUENCE]


def test_a_repetition_in_one_layer_only_is_no_profiling_batch(tmp_path):
    """The first layer sees the token alone; a later one its context too."""
    prompt = [route(t, 0, (1, 2)) for t in range(70)]
    prompt += [route(t, 2, (1 + t % 6, 7)) for t in range(70)]
    with pytest.raises(TraceError, match="drop the dummy rows"):  # a rule of the format
        imported(tmp_path, [META, *prompt], prompt_tokens=70)
    short = [META, *prompt[:63], *prompt[70:133]]
    trace, _ = imported(tmp_path, short, "short.jsonl", prompt_tokens=70)
    assert trace.read(0).event_offset.tolist() == [0, 63, 126]


def test_batches(tmp_path):
    """token_idx counts the tokens of the batch: two prompts, then two tokens a pass, then one."""
    passes = [5, 9, 2, 2, 1]
    records = [META, *dummies(100)]
    for n, tokens in enumerate(passes):
        records += [route(t, 0, (1 + (n + t) % 6, 7)) for t in range(tokens)]
    trace, notes = imported(tmp_path, records)
    request = trace.read(0)
    assert np.diff(request.token_offset).tolist() == passes
    assert request.kind.tolist() == [Kind.PREFILL] * 2 + [Kind.DENOISE] * 3
    assert request.context.tolist() == [0, 0, 7, 8, 18]  # tokens so far by sequences
    assert request.accepted_count.tolist() == [0, 0, 2, 2, 1]
    assert (trace.manifest.requests[0].prompt_tokens, trace.manifest.requests[0].output_tokens) == (
        14, 5,
    )  # fmt: skip
    assert trace.manifest.decode is None  # no sequence of single tokens: not to be cut in blocks
    assert "sequences of a batch" in notes[-1]
    trace, _ = imported(tmp_path, records, "said.jsonl", prompt_tokens=5)
    assert trace.read(0).kind.tolist() == [Kind.PREFILL] + [Kind.DENOISE] * 4


def test_every_start_of_the_engine_is_a_request_of_its_own(tmp_path):
    """Told by its meta line, or by the batch it profiles itself with."""
    records = [META, *dummies(80), *SEQUENCE, *dummies(80), *SEQUENCE[:8], META, *SEQUENCE]
    trace, _ = imported(tmp_path, records)
    assert [r.passes for r in trace] == [3, 2, 3]


def test_requests_side_by_side(tmp_path):
    """A server logs several requests as they come; they end in another order."""
    records = [META]
    for a, b in zip(SEQUENCE, [*SEQUENCE[:8], None, None], strict=True):
        records.append({**a, "req_id": "long"})
        records += [{**b, "req_id": "short"}] if b else []
    trace, _ = imported(tmp_path, records)
    assert [r.passes for r in trace] == [2, 3]  # in the order in which they end
    assert trace.read(1).experts.tolist() == [r["topk_ids"] for r in SEQUENCE]


def test_numbers_as_ids_and_lines_without_type_or_weights(tmp_path):
    records = [
        {"token_idx": t, "layer": layer, "topk_ids": [1 + t, 7], "req_id": 5}
        for t in range(3)
        for layer in (0, 1)
    ]
    trace, notes = imported(tmp_path, [*records, {"type": "summary", "tokens": 3}])
    assert trace.manifest.signals == ("ids",)
    assert trace.read(0).passes == 3
    assert "1 lines of other types" in notes[-2]


def test_padding_is_left_out(tmp_path):
    records = [META, *SEQUENCE[:6], route(9, 2, (-1, -1), (0, 0)), *SEQUENCE[6:]]
    trace, notes = imported(tmp_path, records)
    assert trace.read(0).experts.tolist() == [r["topk_ids"] for r in SEQUENCE]
    assert notes == ["1 padding routes (ids -1) are left out"]


def test_experts_of_the_meta_line(tmp_path):
    trace, _ = imported(tmp_path, [{**META, "num_experts": 60}, *SEQUENCE], experts=None)
    assert trace.geometry.experts == 60


def test_packed_logs_and_blocks(tmp_path):
    plain, _ = imported(tmp_path, [META, *SEQUENCE])
    packed = tmp_path / "routes.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "routes.jsonl").read_bytes()))
    manifest = import_route_jsonl(packed, tmp_path / "packed", experts=8)
    assert manifest.files == plain.manifest.files
    blocks = import_route_jsonl(packed, tmp_path / "blocks", experts=8, as_blocks=4)
    request = open_trace(tmp_path / "blocks").read(0)
    assert np.diff(request.token_offset).tolist() == [3, 1, 1]  # positions 3 and 4: two blocks
    assert blocks.decode is not None
    assert blocks.decode.block_length == 4


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.sampled_from([150, 400, 1 << 20]))
def test_rows_do_not_depend_on_where_blocks_end(tmp_path_factory, seed, block_bytes):
    rng = np.random.default_rng(seed)
    records = [META] + [
        route(int(t), layer, rng.permutation(8)[:2].tolist(), rng.random(2), f"r{rng.integers(3)}")
        for t in range(int(rng.integers(1, 12)))
        for layer in (0, 2)
    ]
    path = write(tmp_path_factory.mktemp("log"), records)
    log = RouteLog(path, block_bytes)
    rows = [part for _, part in log.rows()]
    wanted = records[1:]
    assert np.concatenate([r.experts for r in rows]).tolist() == [r["topk_ids"] for r in wanted]
    codes = np.concatenate([r.request for r in rows]).tolist()
    assert codes == [log.ids[r["req_id"]] for r in wanted]
    assert np.concatenate([r.line for r in rows]).tolist() == list(range(2, 2 + len(wanted)))


def with_line(number, text):
    """Replace a line, counted from 1, of the sequence's log."""
    lines = [json.dumps(r) for r in (META, *SEQUENCE)]
    lines[number - 1] = text if isinstance(text, str) else json.dumps(text)
    return "\n".join(lines) + "\n"


BROKEN = {
    "no JSON": (with_line(4, '{"type": "route", '), "line 4: it is no JSON: "),
    "no object": (with_line(4, "[1, 2]"), "line 4: it is no JSON object"),
    "an empty line": (with_line(4, ""), "line 4: the line is empty"),
    "a fraction": (with_line(4, route(2.5, 0, (5, 6))), "line 4: token_idx is 2.5, expected an i"),
    "text for ids": (with_line(4, route(2, 0, "56")), 'line 4: topk_ids is ["5", "6"], expected a'),
    "no layer": (with_line(4, route(2, None, (5, 6))), "line 4: layer is missing"),
    "no ids": (with_line(4, {"type": "route", "token_idx": 2, "layer": 0}), "topk_ids is missing"),
    "too few ids": (with_line(4, route(2, 0, (5,))), "line 4: topk_ids holds 1 values, k is 2"),
    "too many weights": (with_line(4, route(2, 0, (5, 6), (1, 2, 3))), "topk_weights holds 3 val"),
    "null for an id": (with_line(4, route(2, 0, (5, None))), "line 4: topk_ids holds null"),
    "an id too high": (with_line(4, route(2, 0, (5, 8))), "line 4: the ids [5, 8] are not all"),
    "an expert twice": (with_line(4, route(2, 0, (5, 5))), "line 4: an expert occurs twice"),
    "half a padding": (with_line(4, route(2, 0, (5, -1))), "line 4: the ids [5, -1] are negative"),
    "zeros": (with_line(4, route(2, 0, (0, 0))), "line 4: the ids are all 0, those of other"),
    "a negative weight": (with_line(4, route(2, 0, (5, 6), (1, -1))), "line 4: a weight of the"),
    "a negative token": (with_line(4, route(-2, 0, (5, 6))), "line 4: token_idx is negative"),
    "another k": (with_line(8, {"type": "meta", "top_k": 3}), "line 8: top_k is 3, and was 2"),
    "nothing": ("", "holds no route"),
    "only a meta line": (json.dumps(META) + "\n", "holds no route"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_lines_are_refused_in_a_sentence(tmp_path, name):
    text, problem = BROKEN[name]
    path = tmp_path / "routes.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError) as refusal:
        import_route_jsonl(path, tmp_path / "trace", experts=8)
    sentence = str(refusal.value)
    assert sentence.startswith(str(path))
    assert problem in sentence
    assert "\n" not in sentence
    assert not (tmp_path / "trace").exists()


def test_other_encodings_are_refused(tmp_path):
    path = write(tmp_path, [META, *SEQUENCE])
    path.write_bytes(path.read_bytes().replace(b"maker", "Maßwerk".encode()))
    import_route_jsonl(path, tmp_path / "trace", experts=8)
    path.write_bytes(path.read_bytes().replace(b'"r1"', b'"r\xff"', 1))
    with pytest.raises(TraceError, match="line 2: it is no UTF-8 text"):
        import_route_jsonl(path, tmp_path / "other", experts=8)


def test_ids_of_two_types_are_refused(tmp_path):
    path = write(tmp_path, [META, *SEQUENCE[:4], route(1, 2, (2, 3), request=7)])
    with pytest.raises(TraceError, match="line 6: req_id is 7, expected text"):
        import_route_jsonl(path, tmp_path / "trace", experts=8)
