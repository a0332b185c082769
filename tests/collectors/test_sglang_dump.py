"""Dumps of SGLang's recorder become the requests that were served."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from oled_sim.cli.main import cli
from oled_sim.collectors.sglang import EOS_ID, MASK_ID, import_sglang_dump
from oled_sim.errors import TraceError
from oled_sim.trace import Kind, TokenState, open_trace

BLOCK, EXPERTS, LAYERS, TOP_K = 4, 16, 3, 2


def decode(prompt, blocks, seed, eos_at=None):
    """Passes (first position, tokens) of one request as SGLang runs them, block by block."""
    rng = np.random.default_rng(seed)
    text = np.concatenate((prompt, rng.integers(1000, 2000, blocks * BLOCK - len(prompt))))
    if eos_at is not None:
        text[eos_at] = EOS_ID
    for block in range(blocks):
        first = block * BLOCK
        held = text[first : first + BLOCK].copy()
        masked = np.arange(first, first + BLOCK) >= len(prompt)
        if not masked.any():
            yield first, held  # prefill of a block of the prompt
            continue
        left = list(np.flatnonzero(masked))
        while True:
            ids = held.copy()
            ids[left] = MASK_ID
            yield first, ids
            if not left:
                break  # the commit pass
            left = left[1 + int(rng.integers(2)) :]
        if eos_at is not None and first <= eos_at < first + BLOCK:
            return


def serve(requests):
    """Run requests together, one pass of each a record; return records and each one's routes."""
    rng = np.random.default_rng(9)
    running = [list(passes) for passes in requests]
    routes = [[] for _ in requests]
    records = []
    while any(running):
        here = [n for n, passes in enumerate(running) if passes]
        chunks = [running[n].pop(0) for n in here]
        tokens = len(here) * BLOCK
        picked = rng.permuted(np.tile(np.arange(EXPERTS), (LAYERS, tokens, 1)), axis=2)
        topk = np.full((LAYERS, tokens, 8), -1, np.int32)  # the recorder always keeps 8 columns
        topk[1:, :, :TOP_K] = picked[1:, :, :TOP_K]  # layer 0 is dense
        for i, n in enumerate(here):
            routes[n].append(topk[1:, i * BLOCK : (i + 1) * BLOCK, :TOP_K])
        records.append(
            {
                "forward_pass_id": 10 + len(records),
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": np.concatenate([ids for _, ids in chunks]).tolist(),
                "positions": np.concatenate([f + np.arange(BLOCK) for f, _ in chunks]).tolist(),
                "extend_seq_lens": [BLOCK] * len(here),
                "forward_mode": 1,
                "topk_ids_of_layer": torch.from_numpy(topk),
                "misc_objects": [],
                "global_physical_count": torch.zeros(LAYERS, EXPERTS, dtype=torch.int32),
            }
        )
    return records, routes


def save(path, records, table=None):
    if table is None:
        table = torch.arange(EXPERTS).repeat(LAYERS, 1)
    torch.save({"records": records, "last_physical_to_logical_map": table}, path)
    return path


PROMPTS = [list(range(10, 19)), list(range(30, 36)), [50]]


@pytest.fixture
def served():
    requests = [
        list(decode(PROMPTS[0], 5, 1)), list(decode(PROMPTS[1], 4, 2, eos_at=9)),
        list(decode(PROMPTS[2], 3, 3)),
    ]  # fmt: skip
    return requests, *serve(requests)


def test_requests_of_a_batch_are_told_apart(tmp_path, served):
    requests, records, routes = served
    source, notes = save(tmp_path / "dump.pt", records), []
    import_sglang_dump(source, tmp_path / "t", on_note=notes.append)
    trace = open_trace(tmp_path / "t")
    assert trace.requests == (0, 1, 2)
    assert trace.manifest.signals == ("ids", "token_state")
    assert trace.manifest.model.layers == (1, 2)
    assert (trace.manifest.model.experts, trace.manifest.model.top_k) == (EXPERTS, TOP_K)
    # The second blocks of two prompts come in one pass, and nothing shows which is whose.
    assert notes[0] == (
        "the trace has no gates and no confidence: the recorder does not write them"
    )
    assert notes[1].startswith("1 times the tokens of requests in step") and len(notes) == 2
    for number, (passes, prompt) in enumerate(zip(requests, PROMPTS, strict=True)):
        request, entry = trace.read(number), trace.manifest.entry(number)
        assert request.passes == len(passes)
        for i, (first, ids) in enumerate(passes):
            rows = slice(*request.token_offset[i : i + 2])
            assert request.position[rows].tolist() == list(range(first, first + BLOCK))
            assert request.token_id[rows].tolist() == ids.tolist()
            after = next((t for f, t in passes[i + 1 :] if f == first), ids)
            assert np.array_equal(request.accepted[rows], (ids == MASK_ID) & (after != MASK_ID))
            prompted = (request.state[rows] == TokenState.PROMPT).sum()
            assert prompted == max(0, min(BLOCK, len(prompt) - first))
        got = request.experts.reshape(request.passes, 2, BLOCK, TOP_K)
        assert np.array_equal(got, np.sort(np.array(routes[number]), axis=-1))
        prefill = len(prompt) // BLOCK
        assert (request.kind == Kind.PREFILL).sum() == max(prefill, 1)
        assert (request.kind == Kind.COMMIT).sum() == (request.block[-1] + 1) - prefill
        assert entry.prompt_tokens == len(prompt)
    assert [trace.manifest.entry(n).finish_reason for n in range(3)] == ["length", "eos", "length"]
    assert trace.manifest.entry(1).output_tokens == 9 + 1 - len(PROMPTS[1])


def test_edits_of_a_finished_block_stay_with_it(tmp_path):
    first = np.array([5, MASK_ID, MASK_ID, MASK_ID])
    after = [[5, 7, 8, MASK_ID], [5, 7, 8, 9], [5, 7, 6, 9], [5, 7, 6, 9]]
    # The third pass edits a token, the last changes nothing: it is the commit.
    passes = [(0, first), *((0, np.array(ids)) for ids in after[:3])]
    records, _ = serve([passes])
    import_sglang_dump(save(tmp_path / "d.pt", records), tmp_path / "t")
    request = open_trace(tmp_path / "t").read(0)
    assert request.kind.tolist() == [Kind.PREFILL, Kind.DENOISE, Kind.DENOISE, Kind.COMMIT]
    assert np.flatnonzero(request.edited).tolist() == [2 * BLOCK + 2]


def test_requests_in_step_go_by_their_place_and_are_counted(tmp_path):
    passes = [list(decode([60 + n] * 2, 2, n)) for n in range(2)]
    length = min(map(len, passes))
    records, _ = serve([p[:length] for p in passes])
    notes = []
    import_sglang_dump(save(tmp_path / "d.pt", records), tmp_path / "t", on_note=notes.append)
    trace = open_trace(tmp_path / "t")
    for number in trace.requests:
        request = trace.read(number)
        assert request.token_id[0] == 60 + number
    assert len(trace.requests) == 2


def test_what_was_cut_off_is_left_out_and_said(tmp_path, served):
    _, records, _ = served
    notes = []
    source = save(tmp_path / "d.pt", records[:4])
    import_sglang_dump(source, tmp_path / "t", on_note=notes.append)
    trace = open_trace(tmp_path / "t")
    for number in trace.requests:
        request = trace.read(number)
        last = slice(*request.token_offset[-2:])
        assert (request.state[last] != TokenState.MASKED).all()
    late = [r | {"positions": [p + 8 for p in r["positions"]]} for r in records]
    import_sglang_dump(save(tmp_path / "l.pt", late), tmp_path / "u", on_note=notes.append)
    assert any("3 requests start behind a cached prefix" in note for note in notes)


def test_physical_experts_are_named_by_the_logical_ones(tmp_path, served):
    _, records, _ = served
    table = torch.arange(EXPERTS).flip(0).repeat(LAYERS, 1)
    import_sglang_dump(save(tmp_path / "a.pt", records), tmp_path / "t")
    import_sglang_dump(save(tmp_path / "b.pt", records, table), tmp_path / "u")
    plain, named = (open_trace(tmp_path / name).read(0).experts for name in "tu")
    assert np.array_equal(np.sort(EXPERTS - 1 - plain.astype(int), axis=1), named)


def lose(record):
    record["topk_ids_of_layer"][2, 5] = -1


def shared(record):
    record["topk_ids_of_layer"][1, 0, 0] = EXPERTS


MALFORMED = {
    "record 1 .forward pass 11.: layer 2 has no experts for token 5": lose,
    "record 1 .forward pass 11.: expert 16 of 16: fused shared experts": shared,
    "record 1 .forward pass 11.: 12 tokens, 11 positions": lambda r: r["positions"].pop(),
    "record 1 .forward pass 11.: positions of a request are not": lambda r: r[
        "positions"
    ].reverse(),
    "record 1: no input_ids: start the server with": lambda r: r.pop("input_ids"),
    "record 1: no positions": lambda r: r.pop("positions"),
    "record 1: forward pass 3 follows 10": lambda r: r.update(forward_pass_id=3),
    "topk_ids_of_layer is no tensor": lambda r: r.update(topk_ids_of_layer=[1]),
    "record 1 .forward pass 11.: topk_ids_of_layer is no tensor of whole": lambda r: r.update(
        topk_ids_of_layer=r["topk_ids_of_layer"].float()
    ),
    "record 1 .forward pass 11.: topk_ids_of_layer has 2 layers and 8 columns, 3 and 8": (
        lambda r: r.update(topk_ids_of_layer=r["topk_ids_of_layer"][:2].clone())
    ),
    "record 1 .forward pass 11.: input_ids is no list of whole numbers": lambda r: r.update(
        input_ids=None
    ),
    "record 1 .forward pass 11.: input_ids holds -4": lambda r: r["input_ids"].__setitem__(3, -4),
    "record 1 .forward pass 11.: extend_seq_lens is no list of whole": lambda r: r.update(
        extend_seq_lens=[[4], [4, 4]]
    ),
    "record 1 .forward pass 11.: positions is no list of whole": lambda r: r.update(
        positions="abc"
    ),
    "record 1 .forward pass 11.: positions holds 1000000000000, which": lambda r: r.update(
        positions=[10**12 + n for n in range(12)]
    ),
    "record 1: it is of rank 1, earlier ones of rank 0: import the file of one": lambda r: r.update(
        rank=1
    ),
    "record 1: rank is no whole number": lambda r: r.update(rank=torch.zeros(2)),
    "record 1: forward_pass_id is no whole number": lambda r: r.update(forward_pass_id=None),
    "experts of 7 of 12 tokens: the recorder's buffer": lambda r: r.update(
        topk_ids_of_layer=r["topk_ids_of_layer"][:, :7].clone()
    ),
}


@pytest.mark.parametrize("sentence", MALFORMED)
def test_a_malformed_dump_costs_one_sentence_and_leaves_nothing(tmp_path, served, sentence):
    _, records, _ = served
    MALFORMED[sentence](records[1])
    source = save(tmp_path / "dump.pt", records)
    with pytest.raises(TraceError, match=rf"dump\.pt.*{sentence}"):
        import_sglang_dump(source, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_other_files_are_refused(tmp_path, served):
    _, records, _ = served
    (tmp_path / "text.pt").write_text("routes")
    whole = save(tmp_path / "whole.pt", records).read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    save(tmp_path / "table.pt", records, torch.arange(EXPERTS).flip(0).repeat(2, 1))
    torch.save([1], tmp_path / "list.pt")
    save(tmp_path / "none.pt", [])
    for record in records:
        record["topk_ids_of_layer"].fill_(-1)
    save(tmp_path / "graph.pt", records)
    no_masks = serve([[(0, np.arange(BLOCK))]])[0]
    save(tmp_path / "causal.pt", no_masks)
    sentences = {
        "text.pt": "is no dump of the recorder, or is damaged: it is no file of torch.save",
        "half.pt": "is no dump of the recorder, or is damaged: it is truncated",
        "table.pt": "last_physical_to_logical_map has 2 layers, the records have 3",
        "list.pt": "holds no list of records",
        "none.pt": "holds no record",
        "graph.pt": "CUDA graphs replay without the recorder",
        "causal.pt": "no pass holds the mask token 156895",
    }
    for name, sentence in sentences.items():
        with pytest.raises(TraceError, match=sentence):
            import_sglang_dump(tmp_path / name, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_the_command_imports_a_dump(tmp_path, served):
    source, out = save(tmp_path / "dump.pt", served[1]), tmp_path / "t"
    arguments = ["import", "sglang-dump", source, "--out", out, "--json"]
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 3
    assert "no gates and no confidence" in result.stderr
