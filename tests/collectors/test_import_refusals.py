"""What importers must not take for a recording: cut exports, values that would be cast silently."""

import numpy as np
import pytest

from oled_sim.collectors.export_csv import export_csv
from oled_sim.collectors.export_npz import export_npz
from oled_sim.collectors.route_csv_header import read_header
from oled_sim.collectors.route_jsonl import import_route_jsonl
from oled_sim.collectors.route_table import import_table
from oled_sim.collectors.routed_experts import import_routed_experts
from oled_sim.collectors.text_blocks import LineReader
from oled_sim.errors import TraceError, UsageError
from oled_sim.exporting import export_trace
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace import TraceWriter, open_trace
from oled_sim.trace.manifest import Manifest, Model

GEOMETRY = RoutingGeometry((1, 2, 5), 10, 3)


def trace_of(path, requests=2, passes=4, geometry=GEOMETRY, **settings):
    rng = np.random.default_rng(3)
    made = [random_request(rng, geometry, request=n, passes=passes) for n in range(requests)]
    return write_trace(path, made, geometry, **settings)


def exported(folder, exporter, name, **settings):
    export_trace(exporter, trace_of(folder / "a", **settings), folder / name)
    return folder / name


# --- exports that were cut or edited ------------------------------------------------------------


def test_a_table_cut_after_any_line_is_refused(tmp_path):
    """No prefix of an export comes back as a smaller trace."""
    source = exported(tmp_path, export_csv, "x.csv", passes=2)
    lines = source.read_text().splitlines(keepends=True)
    for kept in range(3, len(lines)):
        source.write_text("".join(lines[:kept]))
        with pytest.raises(TraceError, match=r"x.csv: request \d .*cut short or was edited"):
            import_table(source, tmp_path / "b")
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("keep", "problem"),
    [
        (lambda cells: cells[0] != "1", "request 1 is missing, the manifest in it lists 2"),
        (
            lambda cells: cells[:2] != ["1", "3"],
            "request 1 has 3 passes, the manifest in it lists 4",
        ),
        (
            lambda cells: cells[:3] != ["0", "2", "5"],
            "request 0 has 11 events, the manifest in it lists 12",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(tmp_path, keep, problem):
    source = exported(tmp_path, export_csv, "x.csv")
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(lines[:2] + [x for x in lines[2:] if keep(x.split(","))]))
    with pytest.raises(TraceError) as refusal:
        import_table(source, tmp_path / "b")
    assert str(refusal.value) == (
        f"{source}: {problem}: the file is cut short or was edited, export it again"
    )


def test_a_request_or_a_layer_of_its_own_is_refused(tmp_path):
    source = exported(tmp_path, export_csv, "x.csv")
    text = source.read_text()
    last = text.splitlines()[-1].split(",")
    source.write_text(text + ",".join(["7", *last[1:]]) + "\n")
    with pytest.raises(TraceError, match="the manifest in it lists no request 7"):
        import_table(source, tmp_path / "b")
    source.write_text(text + ",".join([*last[:2], "6", *last[3:]]) + "\n")
    with pytest.raises(TraceError, match="lists no such layer"):
        import_table(source, tmp_path / "b")


def test_arrays_without_a_request_are_refused(tmp_path):
    source = exported(tmp_path, export_npz, "x.npz")
    with np.load(source) as file:
        kept = {name: file[name] for name in file if not name.startswith("00001/")}
    np.savez(source, **kept)
    with pytest.raises(TraceError, match="request 1 is missing, the manifest in it lists 2"):
        import_routed_experts(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_equal_tokens_of_an_export_are_no_dummy_batch(tmp_path):
    """A trace may hold 200 passes over one route; all of them come back."""
    text = "token,layer,expert_0,expert_1\n" + "".join(f"{t},0,1,2\n" for t in range(200))
    # The first token differs, so that the table itself is not taken for a profiling batch.
    (tmp_path / "t.csv").write_text(text.replace("0,0,1,2", "0,0,3,2", 1))
    import_table(tmp_path / "t.csv", tmp_path / "a", experts=8)
    trace = open_trace(tmp_path / "a")
    export_trace(export_csv, trace, tmp_path / "x.csv")
    again = import_table(tmp_path / "x.csv", tmp_path / "b")
    assert again.requests[0].passes == 200


# --- numbers that the format cannot hold --------------------------------------------------------


def test_layers_above_the_format_are_refused_where_they_stand(tmp_path):
    for layer in (32768, 40000, 10**9):
        (tmp_path / "t.csv").write_text(f"token,layer,expert_0,expert_1\n0,1,1,2\n1,{layer},1,2\n")
        with pytest.raises(TraceError, match=r"t.csv, line 3: the layer index is above 32767"):
            import_table(tmp_path / "t.csv", tmp_path / "b", experts=8)
    np.save(tmp_path / "r.npy", np.array([[[1, 2], [3, 4]]], np.int16))
    with pytest.raises(TraceError, match="token 0, layer 32768: the layer index is above"):
        import_routed_experts(tmp_path / "r.npy", tmp_path / "b", experts=8, first_layer=32767)
    with pytest.raises(UsageError, match="first_layer is 40000: give 0 to 32767"):
        import_routed_experts(tmp_path / "r.npy", tmp_path / "b", experts=8, first_layer=40000)
    assert not (tmp_path / "b").exists()


def test_the_highest_layer_comes_back(tmp_path):
    np.save(tmp_path / "r.npy", np.array([[[1, 2]]], np.int16))
    import_routed_experts(tmp_path / "r.npy", tmp_path / "b", experts=8, first_layer=32767)
    trace = open_trace(tmp_path / "b")
    assert trace.geometry.layers == (32767,)
    assert trace.read(0).experts.tolist() == [[1, 2]]


def test_a_writer_refuses_such_layers_too(tmp_path):
    model = Model(name="toy", layers=(1, 40000), experts=8, top_k=2)
    with pytest.raises(TraceError, match="layer 40000 is above 32767"):
        TraceWriter(tmp_path / "t", Manifest(model=model, origin="real", signals=("ids",)))
    assert not (tmp_path / "t").exists()


def test_a_route_csv_header_with_such_a_layer_is_refused(tmp_path):
    (tmp_path / "r.csv").write_text(
        "# route_trace v1\n# model=m arch=a n_layer=50000 n_expert=8 n_expert_used=2\n"
        "# layer=40000 expert_bytes=10\nturn,phase,step,layer,slot,expert,weight\n"
    )
    with LineReader(tmp_path / "r.csv") as reader, pytest.raises(TraceError, match="above 32767"):
        read_header(reader, {})


def test_more_experts_than_a_trace_can_number_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text("token,layer,expert_0,expert_1\n0,1,1,2\n")
    with pytest.raises(TraceError, match=r"t.csv: 99,999,999 experts .* can number 65,536"):
        import_table(tmp_path / "t.csv", tmp_path / "b", experts=99999999)


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("position", [0.0, 1.5, 3.0], "token 1 is 1.5, expected a whole number"),
        ("position", [0, 1, 2**31], f"token 2 is {2**31}, expected a whole number"),
        ("step", [0.0, np.nan, 1.0], "token 1 is nan, expected a whole number"),
        ("accepted", [0, 2, 0], "token 1 is 2, expected a whole number within 0..1"),
        ("accepted", [0, 0.5, 0], "token 1 is 0.5, expected a whole number within 0..1"),
        ("kind", [0, 1, 300], "token 2 is 300, expected a whole number within 0..255"),
        ("token_id", ["a", "b", "c"], "is of dtype <U1, expected numbers"),
        ("prompt_tokens", -1, "is -1, expected one of 0..3"),
        ("prompt_tokens", 4, "is 4, expected one of 0..3"),
        ("prompt_tokens", 1.5, "is 1.5, expected a whole number"),
        ("prompt_tokens", [1, 2], r"is of shape \[2\], expected one of 0..3"),
    ],
)
def test_values_that_a_cast_would_change_are_refused(tmp_path, name, values, problem):
    routes = np.array([[[1, 2]], [[3, 4]], [[5, 6]]], np.int16)
    np.savez(tmp_path / "r.npz", routed_experts=routes, **{name: np.array(values)})
    with pytest.raises(TraceError, match=f"r.npz: array '{name}'.* {problem}"):
        import_routed_experts(tmp_path / "r.npz", tmp_path / "b", experts=8)
    assert not (tmp_path / "b").exists()


def test_whole_numbers_in_floats_are_taken(tmp_path):
    routes = np.array([[[1, 2]], [[3, 4]], [[5, 6]]], np.int16)
    facts = {"position": [0.0, 4.0, 5.0], "accepted": [0.0, 1.0, 1.0], "prompt_tokens": 3}
    np.savez(
        tmp_path / "r.npz", routed_experts=routes, **{n: np.array(v) for n, v in facts.items()}
    )
    import_routed_experts(tmp_path / "r.npz", tmp_path / "b", experts=8)
    request = open_trace(tmp_path / "b").read(0)
    assert request.position.tolist() == [0, 4, 5]
    assert request.accepted.tolist() == [False, True, True]


def test_a_line_nested_too_deeply_is_refused(tmp_path):
    good = '{"token_idx": 0, "layer": 0, "topk_ids": [1, 2]}\n'
    for text, line in (("[" * 100_000 + "\n", 1), (good + "[" * 100_000 + "\n", 2)):
        (tmp_path / "r.jsonl").write_text(text)
        with pytest.raises(TraceError, match=f"r.jsonl, line {line}: it is nested too deeply"):
            import_route_jsonl(tmp_path / "r.jsonl", tmp_path / "b", experts=8)


# --- weights that are unknown -------------------------------------------------------------------


def test_unknown_weights_are_counted(tmp_path):
    notes = []
    (tmp_path / "t.csv").write_text(
        "token,layer,expert_0,expert_1,gate_0,gate_1\n0,0,1,2,nan,0.5\n1,0,1,2,0.5,0.5\n"
    )
    import_table(
        tmp_path / "t.csv", tmp_path / "a", experts=8, prompt_tokens=0, on_note=notes.append
    )
    assert notes == ["the trace has no gates, because weights of 1 route are unknown (nan)"]

    notes.clear()
    weights = np.full((3, 1, 2), 0.5, np.float32)
    weights[1:] = np.nan
    routes = np.array([[[1, 2]], [[3, 4]], [[5, 6]]], np.int16)
    np.savez(tmp_path / "r.npz", routed_experts=routes, routed_weights=weights)
    import_routed_experts(
        tmp_path / "r.npz", tmp_path / "b", experts=8, prompt_tokens=0, on_note=notes.append
    )
    assert notes == ["the trace has no gates, because weights of 2 routes are unknown (nan)"]

    notes.clear()
    (tmp_path / "r.jsonl").write_text(
        '{"token_idx": 0, "layer": 0, "topk_ids": [1, 2], "topk_weights": [0.5, NaN]}\n'
        '{"token_idx": 1, "layer": 0, "topk_ids": [1, 2], "topk_weights": [0.5, 0.5]}\n'
    )
    import_route_jsonl(
        tmp_path / "r.jsonl", tmp_path / "c", experts=8, prompt_tokens=0, on_note=notes.append
    )
    assert notes == ["the trace has no gates, because weights of 1 route are unknown (nan)"]
