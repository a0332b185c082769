"""Importing arrays of routed experts: forms of files, what is padding, and what is refused."""

import json
import re

import numpy as np
import pytest

from oled_sim.collectors.routed_experts import import_routed_experts
from oled_sim.errors import TraceError, UsageError
from oled_sim.trace import Kind, TokenState, open_trace

GENERATED = "routed_experts"


def ids(tokens, layers=3, k=2, experts=8, seed=0, dtype=np.int16):
    """Distinct random ids [tokens, layers, k], never expert 0."""
    rng = np.random.default_rng(seed)
    routes = np.argsort(rng.random((tokens, layers, experts - 1)), axis=-1)[..., :k] + 1
    return routes.astype(dtype)


def save(path, arrays):
    """Write arrays in the form that the name of the file promises."""
    if path.suffix == ".npy":
        np.save(path, arrays)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)
    else:  # by hand: eight bytes, a JSON header, the tensors
        names = {"int16": "I16", "int32": "I32", "float16": "F16", "uint8": "U8"}
        header, data = {"__metadata__": {"by": "hand"}}, b""
        for name, values in arrays.items():
            raw = values.tobytes()
            header[name] = {
                "dtype": names[values.dtype.name],
                "shape": list(values.shape),
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def imported(folder, arrays, name="routed.npz", **options):
    notes = []
    path = save(folder / name, arrays)
    import_routed_experts(path, folder / "trace", on_note=notes.append, **options)
    return open_trace(folder / "trace"), notes


def test_by_hand(tmp_path):
    """Two prompt tokens and two decoded ones in layers 3 and 4."""
    routes = np.array(
        [[[1, 2], [3, 4]], [[5, 6], [7, 1]], [[2, 3], [4, 5]], [[6, 7], [1, 2]]], np.int16
    )
    trace, notes = imported(
        tmp_path, routes, "routed.npy", prompt_tokens=2, experts=16, first_layer=3, model="toy"
    )
    request, manifest = trace.read(0), trace.manifest
    assert notes == []
    assert request.kind.tolist() == [Kind.PREFILL, Kind.DENOISE, Kind.DENOISE]
    assert request.context.tolist() == [0, 2, 3]
    assert request.block.tolist() == [2, 2, 3]
    assert request.position.tolist() == [0, 1, 2, 3]
    assert request.state.tolist() == [TokenState.PROMPT] * 2 + [TokenState.MASKED] * 2
    assert request.accepted.tolist() == [False, False, True, True]
    assert request.event_layer.tolist() == [0, 1] * 3
    assert request.event_offset.tolist() == [0, 2, 4, 5, 6, 7, 8]
    assert request.experts.tolist() == [
        [1, 2], [5, 6], [3, 4], [7, 1], [2, 3], [4, 5], [6, 7], [1, 2],
    ]  # fmt: skip
    assert (manifest.model.name, manifest.model.layers) == ("toy", (3, 4))
    assert (manifest.model.experts, manifest.model.top_k) == (16, 2)
    assert manifest.signals == ("ids",)
    assert manifest.decode is not None
    assert manifest.decode.rule == "autoregressive"
    assert not manifest.ragged
    entry = manifest.requests[0]
    assert (entry.prompt_tokens, entry.output_tokens) == (2, 2)


@pytest.mark.parametrize("name", ["routed.npz", "routed.safetensors"])
def test_requests_and_prompts_by_name(tmp_path, name):
    """vLLM returns prompt and generated tokens apart."""
    arrays = {
        "b/prompt_routed_experts": ids(4, seed=1), "b/routed_experts": ids(3, seed=2),
        "a/routed_experts": ids(5, seed=3),
    }  # fmt: skip
    trace, notes = imported(tmp_path, arrays, name, experts=8)
    first, second = trace
    assert first.kind.tolist() == [Kind.PREFILL] + [Kind.DENOISE] * 3
    assert np.array_equal(first.experts[:12:4], arrays["b/prompt_routed_experts"][0])
    assert np.array_equal(first.experts[12:], arrays["b/routed_experts"].reshape(-1, 2))
    assert second.kind.tolist() == [Kind.DENOISE] * 5
    assert len(notes) == 1
    assert "where the prompt of 1 request ends" in notes[0]


def test_numbered_requests_keep_their_numbers(tmp_path):
    arrays = {f"{n:05d}/{GENERATED}": ids(2, seed=n) for n in (12, 3)}
    trace, _ = imported(tmp_path, arrays, experts=8)
    assert trace.requests == (3, 12)
    assert np.array_equal(trace.read(12).experts, ids(2, seed=12).reshape(-1, 2))


def test_weights_become_gates(tmp_path):
    routes = ids(6)
    weights = np.tile(np.array([0.75, 0.25], np.float32), (6, 3, 1))
    weights[4] = [3.0, 1.0]  # not normalised: the same shares
    trace, _ = imported(tmp_path, {GENERATED: routes, "routed_weights": weights}, experts=8)
    gates = trace.read(0).gates
    assert gates is not None
    assert (gates == np.array([0.75, 0.25])).all()


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.uint16])
def test_padding_is_left_out(tmp_path, dtype):
    """-1, or what an unsigned dtype makes of it; tokens of zeros; layers of zeros."""
    routes = ids(20, dtype=dtype)
    clean, _ = imported(tmp_path, np.delete(routes[:14], 1, axis=1), "clean.npy", experts=8)
    wanted = clean.read(0)
    routes[14:18] = np.array(-1).astype(dtype)
    routes[18:] = 0
    routes[:, 1] = 0
    (tmp_path / "padded").mkdir()
    trace, notes = imported(tmp_path / "padded", routes, "padded.npy", experts=8)
    assert trace.geometry.layers == (0, 2)
    assert np.array_equal(trace.read(0).experts, wanted.experts)
    assert any(note.startswith("8 padding routes (ids -1)") for note in notes)
    assert any(note.startswith("6 padding tokens (ids 0 in every layer)") for note in notes)
    assert any(note.endswith("are left out: 1") for note in notes)


def test_a_layer_that_lacks_tokens_makes_a_ragged_trace(tmp_path):
    routes = ids(10)
    routes[:6, 2] = -1
    trace, _ = imported(tmp_path, {GENERATED: routes}, experts=8, prompt_tokens=7)
    assert trace.manifest.ragged
    assert np.diff(trace.read(0).event_offset)[:3].tolist() == [7, 7, 1]


def test_a_profiling_batch_at_the_start_is_left_out(tmp_path):
    routes = np.concatenate([np.repeat(ids(1, seed=9), 130, axis=0), ids(10)])
    trace, notes = imported(tmp_path, {GENERATED: routes}, experts=8)
    assert trace.read(0).passes == 10
    assert any(note.startswith("130 tokens of an engine's profiling batch") for note in notes)


def test_equal_tokens_that_are_too_few_for_a_profiling_batch_stay(tmp_path):
    routes = np.concatenate([np.repeat(ids(1, seed=9), 127, axis=0), ids(10)])
    trace, _ = imported(tmp_path, {GENERATED: routes}, experts=8)
    assert trace.read(0).passes == 137


def test_the_number_of_experts_is_guessed_aloud(tmp_path):
    routes = ids(4)
    trace, notes = imported(tmp_path, {GENERATED: routes}, prompt_tokens=0)
    assert trace.geometry.experts == routes.max() + 1
    assert "the highest id plus 1" in notes[0]


def test_blocks(tmp_path):
    routes = ids(40)
    trace, _ = imported(tmp_path, {GENERATED: routes}, experts=8, prompt_tokens=10, as_blocks=16)
    request = trace.read(0)
    assert np.diff(request.token_offset).tolist() == [10, 6, 16, 8]
    assert trace.manifest.decode is not None
    assert trace.manifest.decode.block_length == 16
    rows = slice(*request.event_offset[6:8])  # layer 0 of positions 16 to 31
    assert np.array_equal(request.experts[rows], routes[16:32, 0])


def changed(index, value):
    routes = ids(6)
    routes[index] = value
    return {GENERATED: routes}


BROKEN = {
    "an id too high": (changed((4, 1, 0), 8), "array 'routed_experts', token 4, layer 1: the ids"),
    "half a padding": (changed((4, 1, 0), -1), "token 4, layer 1: the ids .* are negative in part"),
    "an expert twice": (changed((4, 1), 5), "token 4, layer 1: an expert occurs twice in the top"),
    "a shard of zeros": (changed((4, 1), 0), "token 4, layer 1: the ids are all 0, those of other"),
    "two dimensions": ({GENERATED: ids(6)[:, 0]}, r"int16 of shape \[6, 2\], expected integers"),
    "no integers": ({GENERATED: ids(6) * 1.0}, "is float64 of shape"),
    "no array of that name": ({"experts": ids(6)}, "holds no array 'routed_experts' or 'prompt_"),
    "k that changes": (
        {"0/routed_experts": ids(6), "1/routed_experts": ids(6, k=3)},
        "array '1/routed_experts', token 0, layer 0: 3 experts per token, 2 in earlier",
    ),
    "layers that differ": (
        {"routed_experts": ids(6), "prompt_routed_experts": ids(6, layers=2)},
        "layers or k differ",
    ),
    "weights of another shape": (
        {GENERATED: ids(6), "routed_weights": np.ones((6, 3, 3))},
        r"'routed_weights' is float64 of shape \[6, 3, 3\]",
    ),
    "a negative weight": (
        {GENERATED: ids(6), "routed_weights": np.full((6, 3, 2), -0.5)},
        "token 0, layer 0: a weight of the experts .* is negative or infinite",
    ),
    "nothing but padding": ({GENERATED: np.full((3, 2, 2), -1)}, "holds no route but padding"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_arrays_are_refused_in_a_sentence(tmp_path, name):
    arrays, problem = BROKEN[name]
    path = save(tmp_path / "routed.npz", arrays)
    with pytest.raises(TraceError) as refusal:
        import_routed_experts(path, tmp_path / "trace", experts=8)
    sentence = str(refusal.value)
    assert sentence.startswith(str(path))
    assert re.search(problem, sentence)
    assert "\n" not in sentence
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["routed.npy", "routed.npz", "routed.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_damaged_files_are_refused(tmp_path, name, damage):
    routes = ids(50)
    path = save(tmp_path / name, routes if name.endswith("npy") else {GENERATED: routes})
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-40], "garbage": b"PK??" + bytes(99), "empty": b""}[damage])
    with pytest.raises(TraceError, match=f"{name} is damaged or no|cannot be read"):
        import_routed_experts(path, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


def test_a_header_that_is_no_python_is_refused(tmp_path):
    path = save(tmp_path / "routed.npy", ids(6))
    path.write_bytes(path.read_bytes().replace(b"}", b"["))
    with pytest.raises(TraceError, match=r"routed\.npy is damaged or no \.npy file"):
        import_routed_experts(path, tmp_path / "trace")


def test_other_suffixes_are_refused(tmp_path):
    (tmp_path / "routed.pt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"is none of \.npy, \.npz, \.safetensors"):
        import_routed_experts(tmp_path / "routed.pt", tmp_path / "trace")


def test_blocks_need_one_token_per_pass(tmp_path):
    """The same position in two passes is no autoregressive recording."""
    arrays = {GENERATED: ids(4), "step": np.array([0, 0, 1, 1]), "position": np.array([0, 1, 0, 1])}
    path = save(tmp_path / "routed.npz", arrays)
    with pytest.raises(UsageError, match="only autoregressive recordings"):
        import_routed_experts(path, tmp_path / "trace", as_blocks=4)
    trace, _ = imported(tmp_path, arrays, experts=8)
    request = trace.read(0)
    assert request.accepted.tolist() == [False, False, True, True]  # by the last that holds them
    assert trace.manifest.decode is None
