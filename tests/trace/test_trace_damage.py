"""Damage of every kind is noticed and named in one sentence."""

import shutil

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trace_editing import edit_manifest, edit_table, replace_file

from oled_sim.errors import TraceError
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace import open_trace
from oled_sim.trace.manifest import SCHEMA_MINOR
from oled_sim.trace.schema import TABLES


def read_all(path, **options):
    return list(open_trace(path, **options))


def data_files(path):
    return sorted(p for p in path.rglob("*") if p.is_file())


def sentence(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_a_flipped_bit_anywhere_is_noticed(small_trace):
    rng = np.random.default_rng(0)
    for file in data_files(small_trace.path):
        whole = file.read_bytes()
        for bit in rng.integers(0, 8 * len(whole), 40):
            flip(file, int(bit))
            with pytest.raises(TraceError) as error:
                read_all(small_trace.path)
            assert str(file) in sentence(error)
            file.write_bytes(whole)
    assert len(read_all(small_trace.path)) == 2


def test_flipped_bits_in_data_pages_are_noticed_without_the_hashes(small_trace):
    """Page checksums guard the data pages also where `verify=False` skips the SHA-256."""
    rng = np.random.default_rng(1)
    file = small_trace.path / "routing" / "00000.parquet"
    whole = file.read_bytes()
    column = pq.ParquetFile(file).metadata.row_group(0).column(3)
    assert column.path_in_schema == "experts.list.element"
    start, size = column.data_page_offset, column.total_compressed_size
    for offset in rng.integers(start, start + size, 60):
        flip(file, int(8 * offset + rng.integers(8)))
        with pytest.raises(TraceError):
            read_all(small_trace.path, verify=False)
        file.write_bytes(whole)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("verify", [True, False])
def test_every_truncation_is_noticed(small_trace, table, verify):
    file = small_trace.path / table / "00001.parquet"
    whole = file.read_bytes()
    for size in (0, 1, 4, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(TraceError, match="truncated") as error:
            read_all(small_trace.path, verify=verify)
        assert str(file) in sentence(error)


@pytest.mark.parametrize("table", TABLES)
def test_a_truncated_file_that_the_manifest_believes_in_is_no_parquet(small_trace, table):
    data = (small_trace.path / table / "00000.parquet").read_bytes()
    replace_file(small_trace.path, table, data[: len(data) // 2])
    with pytest.raises(TraceError, match="not a readable Parquet file") as error:
        read_all(small_trace.path)
    assert f"{table}/00000.parquet, request 0" in sentence(error)


@pytest.mark.parametrize("table", TABLES)
def test_a_missing_file_is_named(small_trace, table):
    file = small_trace.path / table / "00001.parquet"
    file.unlink()
    with pytest.raises(TraceError, match="is missing") as error:
        read_all(small_trace.path)
    assert str(file) in sentence(error)


def test_an_unreadable_file_is_named(small_trace):
    file = small_trace.path / "tokens" / "00000.parquet"
    file.unlink()
    file.mkdir()
    with pytest.raises(TraceError, match=r"tokens/00000.parquet cannot be read"):
        read_all(small_trace.path)


def test_foreign_parquet_is_refused(small_trace, tmp_path):
    foreign = tmp_path / "foreign.parquet"
    pd.DataFrame({"iteration": [0, 1], "experts": [[1], [2]]}).to_parquet(foreign)
    data = foreign.read_bytes()
    shutil.copy(foreign, small_trace.path / "routing" / "00000.parquet")
    with pytest.raises(TraceError, match=r"routing/00000.parquet has .* bytes instead of"):
        read_all(small_trace.path)
    replace_file(small_trace.path, "routing", data)
    with pytest.raises(TraceError, match="Parquet but not an oled-sim 'routing' table"):
        read_all(small_trace.path)


def test_a_table_in_the_place_of_another_is_refused(small_trace):
    data = (small_trace.path / "tokens" / "00000.parquet").read_bytes()
    replace_file(small_trace.path, "routing", data)
    with pytest.raises(TraceError, match="not an oled-sim 'routing' table"):
        read_all(small_trace.path)


def rewrite(path, table, change):
    """Write a table with `change` applied to the Arrow table, its metadata kept."""
    found = pq.read_table(path / table / "00000.parquet")
    metadata = pq.read_metadata(path / table / "00000.parquet").metadata
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, change(found).schema, store_schema=False) as writer:
        writer.write_table(change(found))
        writer.add_key_value_metadata(metadata)
    replace_file(path, table, sink.getvalue().to_pybytes())


def test_a_missing_column_is_named(small_trace):
    rewrite(small_trace.path, "tokens", lambda t: t.drop_columns(["state"]))
    with pytest.raises(TraceError, match=r"tokens/00000.parquet.*column 'state' is missing"):
        read_all(small_trace.path)


def test_a_column_of_another_type_is_named(small_trace):
    def widen(table):
        index = table.column_names.index("position")
        return table.set_column(index, "position", table["position"].cast(pa.int64()))

    rewrite(small_trace.path, "tokens", widen)
    with pytest.raises(TraceError, match="column 'position' is int64, expected int32"):
        read_all(small_trace.path)


def test_a_column_with_nulls_is_named(small_trace):
    def empty(table):
        index = table.column_names.index("position")
        nulls = pa.array([None] * table.num_rows, pa.int32())
        return table.set_column(index, pa.field("position", pa.int32()), nulls)

    rewrite(small_trace.path, "tokens", empty)
    with pytest.raises(TraceError, match="column 'position' holds nulls"):
        read_all(small_trace.path)


def test_a_file_of_another_request_is_noticed(small_trace):
    for table in TABLES:
        data = (small_trace.path / table / "00001.parquet").read_bytes()
        replace_file(small_trace.path, table, data)
    with pytest.raises(TraceError, match="request 0: the file is that of request 1"):
        open_trace(small_trace.path).read(0)


def test_tables_of_several_requests_are_noticed(small_trace):
    edit_table(small_trace.path, "tokens", lambda c: c["request"].__setitem__(0, 5))
    with pytest.raises(TraceError, match="rows of several requests"):
        read_all(small_trace.path)


def test_counts_must_agree_with_the_manifest(small_trace):
    requests = small_trace.manifest.requests
    wrong = msgspec.structs.replace(requests[0], passes=99)
    edit_manifest(small_trace.path, requests=(wrong, *requests[1:]))
    with pytest.raises(TraceError, match="8 passes, the manifest says 99"):
        read_all(small_trace.path)


def test_a_promised_signal_must_be_there(geometry, tmp_path):
    written = random_request(np.random.default_rng(0), geometry, passes=3)
    path = write_trace(tmp_path / "u", [written], geometry).path
    edit_manifest(path, signals=("ids", "gates", "confidence", "token_state", "full_gate"))
    with pytest.raises(TraceError, match="column 'full_gate' is missing"):
        read_all(path)


def test_a_newer_minor_version_may_bring_columns_along(small_trace):
    before = small_trace.read(0)
    for table in TABLES:
        rewrite(
            small_trace.path,
            table,
            lambda t: t.append_column("colour", pa.array(["blue"] * t.num_rows)),
        )
    edit_manifest(small_trace.path, schema_minor=SCHEMA_MINOR + 1)
    after = open_trace(small_trace.path).read(0)
    np.testing.assert_array_equal(after.experts, before.experts)
