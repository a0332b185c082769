"""Where ``oled-sim validate`` takes the trace and the profile of a measured point from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oled_sim.cli.simulating import source_for
from oled_sim.cli.traces import open_traces
from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.profile import Profile
from oled_sim.costs.store import bundled_profiles, load_profile
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.policy import Policy
from oled_sim.trace import Trace, open_trace
from oled_sim.trace.reader import bundled_traces
from oled_sim.validation.checks import check_profile, check_trace
from oled_sim.validation.measured import Point, profile_sha256
from oled_sim.validation.predicted import Basis


class Inputs:
    """Finds traces and profiles, and reads each once.

    Args:
        profiles: names or files; a point takes the one it was measured with, found by content. Of
            a point with none of them the bundled one of that name is taken.
        traces: names or folders, found by what their manifests say.
        other_hardware: allow a profile of another machine than the points'.
    """

    def __init__(
        self, profiles: Sequence[str], traces: Sequence[str], *, other_hardware: bool = False
    ) -> None:
        self._other_hardware = other_hardware
        self._profiles = {
            profile_sha256(profile): profile for profile in map(load_profile, profiles)
        }
        given = open_traces(traces) if traces else {}
        self._given = {trace.manifest.checksum: trace for trace in given.values()}
        self._names = {trace.path.name: trace for trace in given.values()}
        self._opened: dict[str, Trace] = {}
        self._loaded: dict[str, Profile] = {}

    def basis(self, point: Point, policy: Policy) -> Basis:
        """Return what the prediction of a point rests on.

        Raises:
            MeasurementError: its trace is not found, or is another one.
            UsageError: its profile is not among those given.
        """
        profile = self._profile(point)
        check_profile(point, profile, other_hardware=self._other_hardware)
        trace = self._trace(point)
        check_trace(point, trace.manifest)
        costs = LaneCosts(profile, extrapolate=point.about.rules.extrapolate)
        return Basis(source_for(trace, [policy]), costs)

    def _profile(self, point: Point) -> Profile:
        """Return the profile with a point's checksum; else the only one given, or the bundled."""
        used, given = point.about.profile, list(self._profiles.values())
        if used.sha256 in self._profiles:
            return self._profiles[used.sha256]
        if used.name in bundled_profiles():
            bundled = self._loaded.setdefault(used.name, load_profile(used.name))
            if not given or profile_sha256(bundled) == used.sha256:
                return bundled
        if len(given) == 1:
            return given[0]
        if given:
            names = ", ".join(repr(profile.name) for profile in given)
            raise UsageError(
                f"none of the profiles {names} is the one that {point.name} was measured with"
                f" ({used.name!r}, {used.sha256[:16]}): give that one too with --profile"
            )
        raise UsageError(
            f"profile {used.name!r}, which {point.name} was measured with, is none that ships:"
            " give its file with --profile"
        )

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
