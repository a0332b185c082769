"""Measured points as files: one folder per point, written by ``replay``, read by ``validate``.

``point.json`` says what was run and where, ``passes.parquet`` has one row per repetition and pass,
``events.parquet`` one per repetition and event; ``order.parquet``, where anything was prefetched,
says in which order it came. ``point.json`` is written last and holds the
checksums of the tables, so a folder without it is one that was never finished. A point that takes
the place of another is written beside it first, into a folder ``.new`` within its own.
docs/validation.md describes every column.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from oled_sim.costs.profile import GeometryFields, Hardware, Profile, Software
from oled_sim.costs.store import to_toml
from oled_sim.engine.output import NewFile
from oled_sim.engine.results import write_table
from oled_sim.engine.state import EVENT_COUNTS, EVENT_TIMES, PASS_COUNTS, PASS_TIMES
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.places import kind_of
from oled_sim.trace.files import sha256_hex

FORMAT = 1
"""Version of the format; another one is refused."""

ABOUT, PASSES, EVENTS = "point.json", "passes.parquet", "events.parquet"
ORDER = "order.parquet"
NEW = ".new"
"""Folder within a point's that holds one which is still being written."""

LANE_COLUMNS = PASS_TIMES[2:]
"""Busy and critical time of each lane in a pass."""

_KEYS = [("repetition", pa.int32()), ("request", pa.int32()), ("pass_index", pa.int32())]

PASS_SCHEMA = pa.schema(
    [
        *_KEYS,
        ("kind", pa.string()),
        ("tokens", pa.int32()),
        ("context", pa.int32()),
        ("pass_us", pa.float64()),
        ("decide_us", pa.float64()),
        ("paused_us", pa.float64()),
        *((name, pa.float64()) for name in LANE_COLUMNS),
        *((name, pa.int64()) for name in PASS_COUNTS),
    ]
)
"""Columns of ``passes.parquet``. Times in µs, NaN where not measured (``pass_us`` always is).

``repetition`` from 0; ``pass_index`` is the number of the pass in its request, prefill included;
``kind`` is prefill, denoise or commit. ``pass_us``: from the start of the pass to the end of
sampling, without ``paused_us``. ``decide_us``: what the policy's decisions took on the host;
``paused_us``: for how much of it all lanes waited, but for copies under way (NaN in files of before
it was noted). The rest are ``PASS_TIMES`` and ``PASS_COUNTS`` of the engine.
"""

EVENT_SCHEMA = pa.schema(
    [
        *_KEYS,
        ("layer", pa.int32()),
        *((name, pa.int64()) for name in EVENT_COUNTS),
        *((name, pa.float64()) for name in EVENT_TIMES),
    ]
)
"""Columns of ``events.parquet``: ``layer`` is the model's own index, the rest is the engine's."""


ORDER_SCHEMA = pa.schema(
    [
        ("repetition", pa.int32()),
        ("request", pa.int32()),
        ("step", pa.int8()),
        ("layer", pa.int32()),
        ("expert", pa.int32()),
    ]
)
"""Columns of ``order.parquet``: rows in order, ``step`` a :class:`oled_sim.engine.arrivals.Step`.

``layer`` is the model's own index. Layer and expert are -1 where the step is no prefetch's.
"""


class _Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Unknown keys in a file are errors."""


class PolicyUsed(_Strict, frozen=True, kw_only=True):
    """The policy that ran.

    Attributes:
        spec: as after ``--policy``. label: what results call it. parameters: all of them.
        file_sha256: of the Python file that defines it, where the specification names one; None
            in files of before this was noted.
    """

    spec: str
    label: str
    parameters: dict[str, Any]
    file_sha256: str | None = None


class TraceUsed(_Strict, frozen=True, kw_only=True):
    """``name``: as it was opened. ``sha256``: the checksum that its manifest carries."""

    name: str
    sha256: str


class ProfileUsed(_Strict, frozen=True, kw_only=True):
    """The profile that policies decided by; ``sha256`` is that of :func:`profile_sha256`."""

    name: str
    sha256: str


class Cut(_Strict, frozen=True, kw_only=True):
    """A request up to its ``decode_passes``-th decode pass, prefill included; None: all of it."""

    request: int
    decode_passes: int | None = None

    def __post_init__(self) -> None:
        if self.decode_passes is not None and self.decode_passes < 1:
            raise ValueError(f"{self.decode_passes} decode passes are nothing to run")


class Rules(_Strict, frozen=True, kw_only=True):
    """How the point was run; the fields of :class:`oled_sim.engine.rules.Rules` that matter."""

    scope: str = "layer"
    staging: int = 16
    cold: bool = False
    confidence: str = "previous"
    extrapolate: bool = False
    """Whether policies may ask the profile beyond its range."""


class Machine(_Strict, frozen=True, kw_only=True):
    """``identity`` tells machines of one kind apart: the same on every run on one, no secret."""

    identity: str
    hardware: Hardware


class Lossless(_Strict, frozen=True, kw_only=True):
    """How far outputs of layers were from those of full residency.

    ``events_checked``: events compared. ``worst_relative_error``: the largest of them.
    ``tolerance``: what is allowed, by dtype.
    """

    events_checked: int
    worst_relative_error: float
    tolerance: float


class Speed(_Strict, frozen=True, kw_only=True):
    """How fast the host was before a repetition; the profile has the same figures of its time.

    ``cpu_us``: makespan of ``cpu_experts`` experts with ``cpu_tokens_per_expert`` tokens each on
    the CPU lane. ``synchronize_us``: launching and waiting for an empty kernel. Medians.
    ``waited_s``: how long it was looked at, until it was as fast as in the profile or longer.
    """

    cpu_experts: int
    cpu_tokens_per_expert: int
    cpu_us: float
    synchronize_us: float
    waited_s: float = 0.0


class About(_Strict, frozen=True, kw_only=True):
    """What ``point.json`` says.

    Attributes:
        policy, rules, geometry, profile: what ran; ``geometry`` is the cost geometry.
        cache: slots per MoE layer.
        trace: where the requests come from. history: requests that a policy which learns has
            learnt from, by simulation. warmup: run before, on hardware or by
            simulation, not measured. measured: what the tables
            hold.
        layers: how many MoE layers ran, from the first on; None if all of the trace's did.
        repetitions: each from the same state: that after history and warm-up.
        lossless: None if it was not checked.
        speeds: of the host before each repetition; none in files of before this was measured.
        arrivals_recorded: whether anything was prefetched, and the order noted in which it came.
        machine, software: where it ran. command, date: how and when.
        tables: sha256 of all tables by file name, filled in by :func:`write_point`.
    """

    policy: PolicyUsed
    cache: int
    rules: Rules = Rules()
    geometry: GeometryFields
    trace: TraceUsed
    history: tuple[int, ...] = ()
    warmup: tuple[Cut, ...] = ()
    measured: tuple[Cut, ...]
    layers: int | None = None
    repetitions: int
    profile: ProfileUsed
    machine: Machine
    software: Software
    lossless: Lossless | None = None
    arrivals_recorded: bool = False
    speeds: tuple[Speed, ...] = ()
    command: str = ""
    date: datetime.date
    tables: dict[str, str] = {}
    format: int = FORMAT

    def __post_init__(self) -> None:
        used = [*self.history, *(cut.request for cut in (*self.warmup, *self.measured))]
        if len(set(used)) < len(used):
            raise ValueError(f"requests {used} are not all different")
        if not self.measured or self.repetitions < 1:
            raise ValueError("there is no measured request, or no repetition")
        if self.cache < 0:
            raise ValueError(f"a cache of {self.cache} slots is impossible")

    @property
    def requests(self) -> tuple[int, ...]:
        """Numbers of the measured requests."""
        return tuple(cut.request for cut in self.measured)

    @property
    def trace_name(self) -> str:
        """The trace's name without folders."""
        return Path(self.trace.name).name


class Point(NamedTuple):
    """A measured point. ``passes``, ``events``: columns ``PASS_SCHEMA`` and ``EVENT_SCHEMA``.

    ``order``: columns ``ORDER_SCHEMA``, None where nothing was prefetched.
    """

    about: About
    passes: pa.Table
    events: pa.Table
    order: pa.Table | None = None
    folder: Path | None = None

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return str(self.folder) if self.folder is not None else point_name(self.about)


def profile_sha256(profile: Profile) -> str:
    """Return what identifies the content of a profile, whatever its file's comments."""
    return sha256_hex(to_toml(profile).encode())


def point_name(about: About) -> str:
    """Return the name of a point's folder: policy, cache, trace and measured requests."""
    policy = re.sub(r"[^A-Za-z0-9.]+", "-", about.policy.label).strip("-.")
    requests = "-".join(map(str, about.requests))
    return f"{policy}-c{about.cache}-{about.trace_name}-r{requests}"


def write_point(folder: Path, point: Point, *, force: bool = False) -> None:
    """Write a point into a folder, which is made if its parent exists; ``point.json`` comes last.

    Args:
        folder: usually ``root / point_name(point.about)``.
        point: tables may have further columns, which are left out.
        force: replace a point that is there; until the new one is whole, that stays.

    Raises:
        UsageError: there is a point, or nothing can be written there.
        MeasurementError: a table lacks a column, or one is of another type.
    """
    final, staged = folder / ABOUT, folder / NEW
    if final.exists() and not force:
        raise UsageError(f"{final} exists: give another folder, or --force to overwrite it")
    tables = {
        PASSES: _fitted(point.passes, PASS_SCHEMA, PASSES),
        EVENTS: _fitted(point.events, EVENT_SCHEMA, EVENTS),
    }
    if point.order is not None:
        tables[ORDER] = _fitted(point.order, ORDER_SCHEMA, ORDER)
    try:
        folder.mkdir(exist_ok=True)
        _remove(staged)
        staged.mkdir()
    except OSError as error:
        raise NewFile(final).refused(error) from error
    for name, table in tables.items():
        write_table(staged / name, table, {"point": point_name(point.about)})
    sums = {name: sha256_hex((staged / name).read_bytes()) for name in tables}
    about = msgspec.structs.replace(point.about, tables=sums)
    with NewFile(staged / ABOUT) as file:
        file.temporary.write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    finish_point(folder)


def finish_point(folder: Path) -> None:
    """Put a point that has been written in its place; drop one whose writing was stopped.

    A writer that is killed between the two leaves the whole point to whoever comes next.
    """
    staged = folder / NEW
    if (staged / ABOUT).exists():
        if not _about(staged / ABOUT).arrivals_recorded:
            (folder / ORDER).unlink(missing_ok=True)
        for name in (PASSES, EVENTS, ORDER, ABOUT):
            if (staged / name).exists():
                if (folder / name).is_dir():  # which no file can replace
                    shutil.rmtree(folder / name)
                (staged / name).replace(folder / name)
    _remove(staged)


def _remove(staged: Path) -> None:
    """Remove what is in the place of a point that is being written, whatever it is."""
    if staged.is_dir() and not staged.is_symlink():
        shutil.rmtree(staged, ignore_errors=True)
    else:
        with suppress(OSError):  # what stays is said by whoever writes there
            staged.unlink(missing_ok=True)


def read_points(root: Path) -> list[Point]:
    """Return all points in a folder and below, by the path of their folders.

    Raises:
        UsageError: there is none, or it is no folder.
        MeasurementError: one is damaged or of another format.
    """
    wanted = "give the folder that replay wrote to"
    if not root.is_dir():
        found = f"is {kind_of(root)}" if os.path.lexists(root) else "does not exist"
        raise UsageError(f"{root} {found}: {wanted}")
    files = (file for file in sorted(root.rglob(ABOUT)) if file.parent.name != NEW)
    found = [read_point(file.parent) for file in files]
    if not found:
        raise UsageError(f"{root} holds no measured point: {wanted}")
    return found


def unfinished(root: Path) -> Iterator[Path]:
    """Yield folders that hold tables but no ``point.json``: what a stopped run left."""
    tables = sorted(root.rglob(PASSES))
    folders = (t.parent.parent if t.parent.name == NEW else t.parent for t in tables)
    for folder in dict.fromkeys(folders):
        if not (folder / ABOUT).exists():
            yield folder


def read_point(folder: Path) -> Point:
    """Read one point, checksums verified.

    Raises:
        MeasurementError: a file is missing or damaged, or of another format.
    """
    try:
        return _read_point(folder)
    except MeasurementError:
        if not (folder / NEW / ABOUT).exists():
            raise
        raise MeasurementError(
            f"{folder} was being replaced when its run was killed: start the same `oled-sim replay`"
            " again, which puts it right"
        ) from None


def _read_point(folder: Path) -> Point:
    about = _about(folder / ABOUT)
    passes = _table(folder / PASSES, about.tables, PASS_SCHEMA)
    events = _table(folder / EVENTS, about.tables, EVENT_SCHEMA)
    order = None
    if about.arrivals_recorded:
        order = _table(folder / ORDER, about.tables, ORDER_SCHEMA)
    return Point(about, passes, events, order, folder)


def as_written(about: About) -> About:
    """Return what reading a point would give, in which lists are lists."""
    return msgspec.json.decode(msgspec.json.encode(about), type=About)


class _Version(msgspec.Struct):
    format: int


def _about(path: Path) -> About:
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise MeasurementError(f"{path} has format {version}, and this version reads {FORMAT}")
        return msgspec.json.decode(data, type=About)
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise MeasurementError(f"{path} breaks the format: {error}") from None


def _table(path: Path, sums: dict[str, str], schema: pa.Schema) -> pa.Table:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from None
    if sha256_hex(data) != sums.get(path.name):
        raise MeasurementError(
            f"{path} does not match its checksum in {ABOUT}: it was damaged or replaced"
        )
    try:
        # One thread: see oled_sim.trace.tables.decode_table.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise MeasurementError(f"{path} is no readable Parquet file: {reason}") from None
    return _fitted(_with_pauses(table, schema), schema, str(path))


def _with_pauses(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Add the column that passes lack in files of before it was measured: not known."""
    name = "paused_us"
    if name not in schema.names or name in table.column_names:
        return table
    return table.append_column(name, pa.array([float("nan")] * len(table)))


def _fitted(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """Return the columns of a schema, in its order and of its types."""
    for field in schema:
        if field.name not in table.column_names:
            raise MeasurementError(f"{name} lacks the column {field.name!r}")
        if table[field.name].null_count:
            raise MeasurementError(f"{name} holds nulls in column {field.name!r}")
    try:
        return table.select(schema.names).cast(schema)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise MeasurementError(f"{name} has a column of another type: {reason}") from None
