"""Where ``oled-sim validate`` takes the trace and the profile of a measured point from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oled_sim.cli.simulating import source_for
from oled_sim.cli.traces import open_traces
from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.profile import Profile
from oled_sim.costs.store import bundled_profiles, load_profile
from oled_sim.errors import MeasurementError
from oled_sim.policy import Policy
from oled_sim.trace import Trace, open_trace
from oled_sim.trace.reader import bundled_traces
from oled_sim.validation.checks import check_profile, check_trace
from oled_sim.validation.measured import Point
from oled_sim.validation.predicted import Basis


class Inputs:
    """Finds traces and profiles, and reads each once.

    Args:
        profile: name or file that was asked for; None takes the bundled one of a point's name.
        traces: names or folders, found by what their manifests say.
        other_hardware: allow a profile of another machine than the points'.
    """

    def __init__(
        self, profile: str | None, traces: Sequence[str], *, other_hardware: bool = False
    ) -> None:
        self._other_hardware = other_hardware
        self._profile = None if profile is None else load_profile(profile)
        given = open_traces(traces) if traces else {}
        self._given = {trace.manifest.checksum: trace for trace in given.values()}
        self._names = {trace.path.name: trace for trace in given.values()}
        self._opened: dict[str, Trace] = {}
        self._loaded: dict[str, Profile] = {}

    def basis(self, point: Point, policy: Policy) -> Basis:
        """Return what the prediction of a point rests on.

        Raises:
            MeasurementError: its trace or profile is not found, or is another one.
        """
        profile = self._profile or self._bundled(point)
        check_profile(point, profile, other_hardware=self._other_hardware)
        trace = self._trace(point)
        check_trace(point, trace.manifest)
        costs = LaneCosts(profile, extrapolate=point.about.rules.extrapolate)
        return Basis(source_for(trace, [policy]), costs)

    def _bundled(self, point: Point) -> Profile:
        name = point.about.profile.name
        if name not in bundled_profiles():
            raise MeasurementError(
                f"profile {name!r}, which {point.name} was measured with, is none that ships:"
                " give its file with --profile"
            )
        return self._loaded.setdefault(name, load_profile(name))

    def _trace(self, point: Point) -> Trace:
        """Return the trace with a point's checksum; else the one that has its name."""
        used = point.about.trace
        found = self._given.get(used.sha256) or self._names.get(point.about.trace_name)
        if found is not None:
            return found
        if not (Path(used.name).exists() or used.name in bundled_traces()):
            raise MeasurementError(
                f"the trace {used.name}, which {point.name} replayed, is not found: give its"
                " folder with --trace"
            )
        if used.name not in self._opened:
            self._opened[used.name] = open_trace(used.name)
        return self._opened[used.name]
