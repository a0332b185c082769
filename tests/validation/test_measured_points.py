"""Measured points as files, and requests cut short."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from measured_points import GEOMETRY, about_of, save, simulated_point

from oled_sim.engine.cut import CutSource, first_decode_passes
from oled_sim.engine.source import MemoryTrace
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.testing.traces import random_request
from oled_sim.trace.schema import SIGNALS, Kind
from oled_sim.validation.measured import (
    ABOUT,
    EVENTS,
    NEW,
    ORDER,
    ORDER_SCHEMA,
    PASSES,
    Cut,
    finish_point,
    point_name,
    read_point,
    read_points,
    unfinished,
    write_point,
)


@pytest.fixture(scope="module")
def point(trace):
    return simulated_point(trace, "lru", 4, factors=(1.0, 1.1))


@pytest.fixture(scope="module")
def with_order(prefetching):
    order = pa.Table.from_pylist(
        [dict.fromkeys(ORDER_SCHEMA.names, 0), dict.fromkeys(ORDER_SCHEMA.names, 1)], ORDER_SCHEMA
    )
    about = msgspec.structs.replace(prefetching.about, arrivals_recorded=True)
    return prefetching._replace(about=about, order=order)


class TestCut:
    def test_keeps_the_first_decode_passes(self):
        request = random_request(np.random.default_rng(1), GEOMETRY, passes=9)
        for n in (1, 3, 7):
            cut = first_decode_passes(request, n)
            assert (cut.kind != Kind.PREFILL).sum() == n
            assert cut.passes == n + 1 and cut.request == request.request
            rows = cut.token_offset[-1]
            np.testing.assert_array_equal(cut.position, request.position[:rows])

    @pytest.mark.parametrize("n", [None, 8, 100])
    def test_a_request_with_no_more_stays_whole(self, n):
        request = random_request(np.random.default_rng(1), GEOMETRY, passes=9)
        assert first_decode_passes(request, n) is request

    def test_output_is_what_the_kept_passes_accept(self):
        requests = [
            random_request(np.random.default_rng(i), GEOMETRY, request=i, passes=9)
            for i in range(3)
        ]
        source = MemoryTrace(GEOMETRY, requests, outputs={0: 50, 1: 50, 2: 1})
        cut = CutSource(source, {2: 4, 0: None, 1: 4})
        assert cut.requests == (2, 0, 1)
        kept = int(requests[1].accepted_count[:5].sum())
        assert [cut.output_tokens(r) for r in (0, 1, 2)] == [50, kept, 1]
        assert cut.read(0) is requests[0] and cut.read(1).passes == 5
        assert (cut.geometry, cut.signals) == (GEOMETRY, source.signals)

    def test_layers_left_out_leave_the_others_as_they_were(self):
        request = random_request(np.random.default_rng(1), GEOMETRY, passes=9, signals=SIGNALS)
        source = MemoryTrace(GEOMETRY, [request], outputs={0: 50})
        cut = CutSource(source, {0: None}, layers=1)
        assert cut.geometry.layers == GEOMETRY.layers[:1]
        read = cut.read(0)
        assert read.events == read.passes == request.passes
        for v, whole in enumerate(np.flatnonzero(request.event_layer == 0)):
            rows = slice(*read.event_offset[v : v + 2])
            of_whole = slice(*request.event_offset[whole : whole + 2])
            for name in ("experts", "gates", "row_token"):
                assert np.array_equal(getattr(read, name)[rows], getattr(request, name)[of_whole])
            assert np.array_equal(read.full_gate[v], request.full_gate[whole])


class TestFiles:
    def test_come_back_as_they_were(self, point, tmp_path):
        root = save(tmp_path / "r", point)
        (back,) = read_points(root)
        assert back.folder == root / "lru-c4-gsm-r1" == root / point_name(point.about)
        assert msgspec.structs.replace(back.about, tables={}) == point.about
        assert back.passes.equals(point.passes) and back.events.equals(point.events)

    def test_names_tell_policy_cache_trace_and_requests(self, trace):
        about = about_of(
            trace, "oled:priority,psi=square", 40, measured=(Cut(request=1), Cut(request=2))
        )
        assert point_name(about) == "oled-priority-psi-square-c40-gsm-r1-2"

    def test_nothing_is_overwritten_unasked(self, point, tmp_path):
        folder = save(tmp_path / "r", point) / point_name(point.about)
        before = (folder / "point.json").read_bytes()
        with pytest.raises(UsageError, match="exists"):
            write_point(folder, point)
        write_point(folder, point, force=True)
        assert (folder / "point.json").read_bytes() == before

    def test_a_folder_in_place_of_a_file_is_replaced(self, point, tmp_path):
        folder = tmp_path / "p"
        write_point(folder, point)
        for name in ("point.json", "events.parquet"):
            (folder / name).unlink()
            (folder / name).mkdir()
            (folder / name / "something").touch()
        write_point(folder, point, force=True)
        assert read_point(folder).events.equals(point.events)

    @pytest.mark.parametrize("make", [Path.touch, lambda new: new.symlink_to("nowhere")])
    def test_what_is_in_the_place_of_the_new_point_goes(self, point, tmp_path, make):
        folder = tmp_path / "p"
        folder.mkdir()
        make(folder / NEW)
        write_point(folder, point)
        assert read_point(folder).events.equals(point.events)
        assert sorted(f.name for f in folder.iterdir()) == [EVENTS, PASSES, ABOUT]

    def test_what_is_no_folder_is_said(self, point, tmp_path):
        file = save(tmp_path / "r", point) / point_name(point.about) / ABOUT
        (tmp_path / "link").symlink_to("nowhere")
        for path, says in (
            (file, "is a file"),
            (tmp_path / "link", "is a symbolic link that leads nowhere"),
            (tmp_path / "absent", "does not exist"),
        ):
            with pytest.raises(UsageError) as refused:
                read_points(path)
            assert str(refused.value) == f"{path} {says}: give the folder that replay wrote to"

    def test_an_unfinished_point_is_none(self, point, tmp_path):
        root = save(tmp_path / "r", point)
        (root / point_name(point.about) / "point.json").unlink()
        assert list(unfinished(root)) == [root / point_name(point.about)]
        with pytest.raises(UsageError, match="holds no measured point"):
            read_points(root)

    def test_a_writer_that_fails_leaves_what_was_there(self, point, tmp_path):
        root = save(tmp_path / "r", point)
        with pytest.raises(MeasurementError, match="lacks the column"):
            write_point(
                root / point_name(point.about),
                point._replace(events=point.events.drop_columns(["hits"])),
                force=True,
            )
        assert read_points(root)[0].events.equals(point.events)

    def test_what_a_killed_writer_left_is_put_right(self, point, with_order, tmp_path):
        """Killed before the new point was whole, and in the middle of moving it."""
        folder = save(tmp_path / "r", point) / point_name(point.about)
        write_point(tmp_path / "other", with_order)
        (folder / NEW).mkdir()
        shutil.copy(tmp_path / "other" / PASSES, folder / NEW)
        assert list(unfinished(tmp_path / "r")) == []
        finish_point(folder)
        assert not (folder / NEW).exists()
        assert read_point(folder).passes.equals(point.passes)
        shutil.copytree(tmp_path / "other", folder / NEW)
        (folder / NEW / PASSES).replace(folder / PASSES)
        assert len(list((tmp_path / "r").rglob("point.json"))) == 2
        with pytest.raises(MeasurementError, match="was being replaced when its run was killed"):
            read_point(folder)
        finish_point(folder)
        (found,) = read_points(tmp_path / "r")
        assert found.passes.equals(with_order.passes) and found.order.equals(with_order.order)

    def test_a_point_without_prefetches_takes_the_place_of_one_with(
        self, point, with_order, tmp_path
    ):
        write_point(tmp_path / "p", with_order)
        assert (tmp_path / "p" / ORDER).exists()
        write_point(tmp_path / "p", point, force=True)
        assert sorted(f.name for f in (tmp_path / "p").iterdir()) == [EVENTS, PASSES, ABOUT]

    @pytest.mark.parametrize("name", [PASSES, EVENTS])
    def test_a_flipped_bit_is_found(self, point, tmp_path, name):
        root = save(tmp_path / "r", point)
        file = root / point_name(point.about) / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(MeasurementError, match=f"{name} does not match its checksum"):
            read_points(root)
        file.unlink()
        with pytest.raises(MeasurementError, match="cannot be read: No such file"):
            read_points(root)

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            (b'"format": 1', b'"format": 2', "has format 2, and this version reads 1"),
            (b'"cache": 4', b'"cache": -4', "a cache of -4 slots is impossible"),
            (b'"cache": 4', b'"cash": 4', "unknown field `cash`"),
            (b'"repetitions": 2', b'"repetitions": 0', "no repetition"),
            (b'"request": 0', b'"request": 1', "are not all different"),
            (b'"decode_passes": 6', b'"decode_passes": 0', "nothing to run"),
            (b'"cache": 4', b'"cache": ', "breaks the format"),
        ],
    )
    def test_a_broken_description_is_named(self, point, tmp_path, old, new, words):
        root = save(tmp_path / "r", point)
        file = root / point_name(point.about) / "point.json"
        assert old in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(old, new, 1))
        with pytest.raises(MeasurementError, match=words) as caught:
            read_points(root)
        assert str(file) in str(caught.value)

    def test_tables_must_have_their_columns(self, point, tmp_path):
        with pytest.raises(MeasurementError, match="lacks the column 'pass_us'"):
            save(tmp_path / "a", point._replace(passes=point.passes.drop_columns("pass_us")))
        text = point.passes.set_column(6, "pass_us", point.passes["kind"])
        with pytest.raises(MeasurementError, match="has a column of another type"):
            save(tmp_path / "b", point._replace(passes=text))
        assert not list(tmp_path.rglob("point.json"))
