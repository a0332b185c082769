"""Perfetto's protobuf encoding: processes, threads, slices with arguments, and counters.

Everything is written on one packet sequence. Names are interned, so a slice costs tens of bytes.
Timestamps are integer nanoseconds from 0 on. Tracks are numbered in the order in which they are
made, so the same calls give the same bytes.

What works one thing after another is a thread: of the children of a process, only threads are
shown in an order that the trace can choose.

Source: https://perfetto.dev/docs/reference/synthetic-track-event, and the comments of
protos/perfetto/trace/track_event/track_descriptor.proto at v59.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from oled_sim.errors import UsageError

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

SEQUENCE = 1
"""Number of the one packet sequence."""

ROOT = 0
"""Perfetto's track above all processes."""

PIDS = 100
"""Processes are numbered in steps of this, and their threads from there on: in a trace, a thread's
number must be no other thread's and no process's."""

Arguments = Mapping[str, int | float | str]


def require_perfetto() -> None:
    """Import what Perfetto provides.

    Raises:
        UsageError: the package is absent, or its protobuf is too old.
    """
    try:
        import perfetto.trace_builder.proto_builder  # noqa: F401
    except Exception as error:  # ImportError, or protobuf's VersionError
        raise UsageError(
            f"a timeline needs the packages perfetto and protobuf ({error}): install them with"
            " `pip install --upgrade perfetto protobuf`"
        ) from error


class Interned:
    """Strings that are written once and referred to by number from then on."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> tuple[int, bool]:
        """Return the number of ``text``, from 1 on, and whether it is new."""
        known = self._numbers.get(text)
        if known is not None:
            return known, False
        self._numbers[text] = len(self._numbers) + 1
        return len(self._numbers), True


class Process(NamedTuple):
    """A process of a trace: its track, and its number."""

    track: int
    pid: int


class Encoder:
    """Turns tracks, slices and counters into packets.

    Slices of one track must nest, and be given in the order of time; packets of different tracks
    may come in any order.
    """

    def __init__(self) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self._protos = perfetto_trace_pb2
        self._new_builder = TraceProtoBuilder
        self._builder: TraceProtoBuilder = TraceProtoBuilder()
        self._tracks = ROOT
        self._processes = 0
        self._names, self._categories, self._arguments = Interned(), Interned(), Interned()
        self._open_sequence()

    def take(self) -> bytes:
        """Return the packets so far and forget them; chunks in order make up the file."""
        data = self._builder.serialize()
        self._builder = self._new_builder()
        return data

    def process(self, name: str) -> Process:
        """Add a process, shown below those before it."""
        self._processes += 1
        found = self._descriptor(self._processes)
        found.process.pid = self._processes * PIDS
        found.process.process_name = name
        return Process(found.uuid, found.process.pid)

    def thread(self, process: Process, name: str, rank: int) -> int:
        """Add a thread, at place ``rank`` from 1 on among those of a process; return its track."""
        found = self._descriptor(rank)
        found.thread.pid = process.pid
        found.thread.tid = process.pid + rank
        found.thread.thread_name = name
        return found.uuid

    def group(self, process: Process, name: str) -> int:
        """Add a track that holds others; return it."""
        return self._named(process.track, name, 0).uuid

    def counter(self, parent: int, name: str, unit: str, rank: int = 0) -> int:
        """Add a counter of ``unit`` to a process, or at place ``rank`` to a group; return it."""
        found = self._named(parent, name, rank)
        found.counter.unit_name = unit
        return found.uuid

    def begin(
        self, track: int, time_ns: int, name: str, category: str, arguments: Arguments
    ) -> None:
        """Open a slice; ``category`` is its kind, by which queries can group."""
        packet = self._packet(time_ns)
        packet.sequence_flags = self._protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event = packet.track_event
        event.type = self._protos.TrackEvent.TYPE_SLICE_BEGIN
        event.track_uuid = track
        event.name_iid = self._name(packet, name)
        event.category_iids.append(self._category(packet, category))
        for key, value in arguments.items():
            self._annotate(packet, key, value)

    def end(self, track: int, time_ns: int) -> None:
        """Close the slice of ``track`` that was opened last."""
        event = self._packet(time_ns).track_event
        event.type = self._protos.TrackEvent.TYPE_SLICE_END
        event.track_uuid = track

    def count(self, track: int, time_ns: int, value: int) -> None:
        """Set a counter from a time on."""
        event = self._packet(time_ns).track_event
        event.type = self._protos.TrackEvent.TYPE_COUNTER
        event.track_uuid = track
        event.counter_value = value

    def _open_sequence(self) -> None:
        """Start with no interned names, and let processes and threads say their order."""
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.sequence_flags = self._protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        root, kinds = packet.track_descriptor, self._protos.TrackDescriptor
        root.uuid = ROOT
        root.process_ordering = kinds.PROCESS_ORDERING_EXPLICIT
        root.thread_ordering = kinds.THREAD_ORDERING_EXPLICIT

    def _descriptor(self, rank: int) -> protos.TrackDescriptor:
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        found = packet.track_descriptor
        self._tracks += 1
        found.uuid = self._tracks
        found.sibling_order_rank = rank
        return found

    def _named(self, parent: int, name: str, rank: int) -> protos.TrackDescriptor:
        found = self._descriptor(rank)
        found.parent_uuid = parent
        found.name = name
        found.child_ordering = self._protos.TrackDescriptor.EXPLICIT
        found.sibling_merge_behavior = self._protos.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
        return found

    def _packet(self, time_ns: int) -> protos.TracePacket:
        packet = self._builder.add_packet()
        packet.timestamp = time_ns
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def _name(self, packet: protos.TracePacket, text: str) -> int:
        number, new = self._names.number(text)
        if new:
            packet.interned_data.event_names.add(iid=number, name=text)
        return number

    def _category(self, packet: protos.TracePacket, text: str) -> int:
        number, new = self._categories.number(text)
        if new:
            packet.interned_data.event_categories.add(iid=number, name=text)
        return number

    def _annotate(self, packet: protos.TracePacket, key: str, value: float | str) -> None:
        number, new = self._arguments.number(key)
        if new:
            packet.interned_data.debug_annotation_names.add(iid=number, name=key)
        found = packet.track_event.debug_annotations.add(name_iid=number)
        if isinstance(value, str):
            found.string_value = value
        elif isinstance(value, int):
            found.int_value = value
        else:
            found.double_value = value
