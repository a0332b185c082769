"""What has been measured, on disk: a part per point, the tidy table, its manifest."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from oled_sim import __version__
from oled_sim.costs.store import load_profile, to_toml
from oled_sim.engine.output import NewFile
from oled_sim.engine.results import write_table
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.experiment.base import Experiment, Point, Rows, Size, name_of
from oled_sim.experiment.inputs import Inputs, SyntheticTrace
from oled_sim.experiment.sources import digest_of
from oled_sim.places import require_place
from oled_sim.trace.files import sha256_hex

FLAGS: dict[Size, str] = {"quick": " --quick", "full": ""}
MANIFEST_SUFFIX = ".manifest.json"
PARTS, TRACES = "parts", "traces"
PACKAGES = ("numpy", "numba", "pyarrow", "pandas", "matplotlib")


@dataclass
class Store:
    """A folder of results. Everything in it appears whole or not at all.

    ``FOLDER/figNN.parquet`` and ``.manifest.json`` are an experiment's; ``parts`` holds what was
    measured point by point, shared by experiments that have a point in common; ``traces`` the
    synthetic traces.

    Raises:
        UsageError: the folder cannot be made, or something else is in its place.
    """

    folder: Path
    inputs: Inputs = field(init=False)
    _traces: dict[Any, str] = field(default_factory=dict, init=False)
    _profiles: dict[str, dict[str, str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.inputs = Inputs(self.folder / TRACES)
        for folder in (self.folder, self.folder / PARTS, self.folder / TRACES):
            require_place(folder, "a folder of results", folder=True)
        try:
            (self.folder / PARTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self.folder} cannot be made ({error.strerror}): give another folder"
            ) from None

    def key(self, point: Point) -> str:
        """Return the hash of everything that a point's rows depend on.

        Raises:
            UsageError, TraceError, ProfileError: a trace or profile is missing or damaged.
        """
        profile = point.profile_for(self.inputs)
        depends_on = {
            **point.to_dict(),
            "trace_sha256": self._trace_hash(point),
            "profile_sha256": None if profile is None else self._profile(profile)["sha256"],
            "code": point.code(),
            "class": digest_of([point.source]),
        }
        return sha256_hex(json.dumps(depends_on, sort_keys=True).encode())

    def part(self, point: Point) -> Path:
        """Return the file of a point's rows, there or not. Raises as :meth:`key`."""
        return self.folder / PARTS / f"{self.key(point)}.parquet"

    def missing(self, points: Sequence[Point]) -> list[Point]:
        """Return the points that have not been measured as things are now."""
        return [p for p in points if not self.part(p).is_file()]

    def check_parts(self, points: Sequence[Point]) -> None:
        """Refuse points whose rows could not be kept, before they are measured.

        Raises:
            UsageError: a folder is in the place of a part.
        """
        for point in points:
            require_place(self.part(point), "a point's rows")

    def keep(self, point: Point, rows: Rows) -> None:
        """Write the rows of a point, labelled with it. Labels that rows give themselves win.

        A column that some rows lack is null there.
        """
        labelled = [{**_plain(point.labels()), **row} for row in rows]
        names = dict.fromkeys(name for row in labelled for name in row)
        table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in labelled])
        write_table(self.part(point), table, point.to_dict())

    def finish(self, experiment: Experiment, points: Sequence[Point], size: Size) -> Path:
        """Put the parts together: write the table and its manifest.

        Parts that the last manifest of this experiment and size names, and no manifest does any
        more, are deleted: they were measured by other code, or of other points.

        Args:
            experiment: whose they are. points: all measured, in the order of the table.
            size: of the grid.

        Returns:
            The table.

        Raises:
            MeasurementError: a part cannot be read.
        """
        parts = [_rows_of(self.part(p)) for p in points]
        table = pa.concat_tables(parts, promote_options="permissive")
        path = self.table(experiment.name)
        manifest = self._manifest(experiment, points, size)
        before = _read(path.with_suffix(MANIFEST_SUFFIX))
        write_table(path, table, manifest)
        text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        with NewFile(path.with_suffix(MANIFEST_SUFFIX)) as file:
            file.temporary.write_text(text, encoding="utf-8")
        if before.get("size") == size:
            self._delete(before["parts"])
        return path

    def _delete(self, parts: Sequence[str]) -> None:
        """Delete those of some parts that no experiment's manifest names."""
        manifests = [_read(file) for file in self.folder.glob(f"*{MANIFEST_SUFFIX}")]
        named = {part for manifest in manifests for part in manifest.get("parts", ())}
        for part in set(parts) - named:
            (self.folder / PARTS / f"{part}.parquet").unlink(missing_ok=True)

    def check(self, experiment: Experiment) -> None:
        """Refuse to write over what no experiment of that name has made.

        Raises:
            UsageError: there is a table without a manifest, or a folder in the place of either.
        """
        path = self.table(experiment.name)
        manifest = path.with_suffix(MANIFEST_SUFFIX)
        require_place(path, "an experiment's table")
        require_place(manifest, "an experiment's manifest")
        if path.exists() and not manifest.exists():
            raise UsageError(
                f"{path} exists, without {manifest.name}, so it is no result of an experiment:"
                " give another folder"
            )

    def table(self, name: str) -> Path:
        """Return the file of an experiment's table, there or not."""
        return self.folder / f"{name}.parquet"

    def _manifest(
        self, experiment: Experiment, points: Sequence[Point], size: Size
    ) -> dict[str, Any]:
        profiles = [point.profile_for(self.inputs) for point in points]
        return {
            "command": f"oled-sim experiment {experiment.name}{FLAGS[size]}",
            "experiment": experiment.name,
            "size": size,
            "title": experiment.title,
            "section": experiment.section,
            "points": [point.to_dict() for point in points],
            "code_sha256": {type(point).__name__: point.code() for point in points},
            "parts": [self.key(point) for point in points],
            "traces": {name_of(point.trace): self._about_trace(point) for point in points},
            "profiles": {name: self._profile(name) for name in profiles if name is not None},
            "versions": {
                "oled-sim": __version__,
                "python": platform.python_version(),
                **{package: version(package) for package in PACKAGES},
            },
        }

    def _about_trace(self, point: Point) -> dict[str, Any]:
        found: dict[str, Any] = {"sha256": self._trace_hash(point)}
        if isinstance(point.trace, SyntheticTrace):
            found["seed"] = point.trace.seed
        return found

    def _trace_hash(self, point: Point) -> str:
        if point.trace not in self._traces:
            self._traces[point.trace] = self.inputs.open(point.trace).manifest.checksum
        return self._traces[point.trace]

    def _profile(self, name: str) -> dict[str, str]:
        if name not in self._profiles:
            profile = load_profile(name)
            self._profiles[name] = {
                "sha256": sha256_hex(to_toml(profile).encode()),
                "status": profile.status,
            }
        return self._profiles[name]


def parts(folder: Path) -> set[Path]:
    """Return the parts that a folder of results holds, whatever they are of."""
    return set((folder / PARTS).glob("*.parquet"))


def _rows_of(part: Path) -> pa.Table:
    """Return what was measured of a point."""
    try:
        return pq.read_table(part).replace_schema_metadata()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise MeasurementError(
            f"{part} is damaged ({reason}): delete it and run again, which measures it anew"
        ) from None


def _read(manifest: Path) -> dict[str, Any]:
    """Return a manifest; one that is missing or damaged names nothing."""
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(labels: Mapping[str, Any]) -> dict[str, Any]:
    """Return labels as cells of a table: several values as one text."""
    return {k: "/".join(map(str, v)) if isinstance(v, tuple) else v for k, v in labels.items()}
