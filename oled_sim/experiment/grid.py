"""The point that most figures share: one simulated run, one row per counted request."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from oled_sim.contenders import contenders
from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.store import bundled_profile_for
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, Result, simulate_all
from oled_sim.engine.simulation import GroupRecord
from oled_sim.experiment.base import Point, Rows
from oled_sim.experiment.inputs import Inputs
from oled_sim.experiment.sources import RUNS, digest, policies_digest
from oled_sim.geometry import DEFAULT_GEOMETRY, find_geometry
from oled_sim.plugins import content_sha256
from oled_sim.policy import Policy
from oled_sim.policy_file import named_in
from oled_sim.policy_spec import parse_policies
from oled_sim.run_inputs import costs_for, expert_bytes_of, source_for
from oled_sim.trace import Trace


class Detail:
    """Adds columns that the engine's own figures lack; subclasses override what they need."""

    def watched(self, policy: Policy) -> Policy:
        """Return the policy to run: the same decisions, watched if need be."""
        return policy

    def add(self, contender: Contender, record: GroupRecord) -> None:
        """Take note of a group of requests that ran, counted or not."""

    def columns(self, request: int) -> Mapping[str, Any]:
        """Return the columns of a counted request."""
        return {}


@dataclass(frozen=True)
class RunPoint(Point):
    """One policy with one budget on one trace.

    Attributes:
        policy: specification, as after ``--policy``.
        cache: slots per MoE layer; a policy of one budget (``full``, ``no-cache``) takes its own.
        profile: bundled name or file; None is the bundled one of the cost geometry.
        geometry: cost geometry; None is what the trace stands for.
        link_gb_s: bandwidth of the host-to-GPU link, 10⁹ bytes per second; None the profile's.
        batch, batch_mode, scope, staging, warmup, history, cold, confidence, requests: as in
            :class:`~oled_sim.engine.rules.Rules`.
        extrapolate: whether costs outside the profiled range are allowed.
    """

    policy: str = "oled"
    cache: int = 40
    profile: str | None = None
    geometry: str | None = None
    link_gb_s: float | None = None
    batch: int = 1
    batch_mode: str = "lockstep"
    scope: str = "layer"
    staging: int = 16
    warmup: int | None = None
    history: int | None = None
    cold: bool = False
    confidence: str = "previous"
    requests: int | None = None
    extrapolate: bool = False

    @property
    def rules(self) -> Rules:
        """How the requests are run."""
        return Rules(**{field.name: getattr(self, field.name) for field in fields(Rules)})

    def profile_for(self, inputs: Inputs) -> str:
        """Return the profile's name or file."""
        if self.profile is not None:
            return self.profile
        model = self.geometry or inputs.stands_for(self.trace) or DEFAULT_GEOMETRY
        return bundled_profile_for(find_geometry(model))

    def code(self) -> str:
        """Return a digest of engine, costs, trace format and policies, one's own included."""
        return " ".join([digest(RUNS), policies_digest(), *self._own_files()])

    def _own_files(self) -> list[str]:
        """Return what the files hold that the policy is named by; nothing for a bundled one."""
        policies = parse_policies([self.policy]).values()
        found = [sha for policy in policies if (sha := content_sha256(type(policy))) is not None]
        if named_in(self.policy):
            found += [repr(dict(policy.describe())) for policy in policies]
        return found

    def detail(self, trace: Trace) -> Detail:
        """Return what adds further columns; subclasses that need some override this."""
        return Detail()

    def measure(self, inputs: Inputs) -> Rows:
        """Simulate the run; return a row per counted request.

        Columns: those of :class:`~oled_sim.engine.request_figures.RequestFigures` (µs, bytes),
        and ``causal``, ``slots`` (of all layers), ``peak_gpu_bytes``, ``peak_resident_bytes``,
        ``host_bytes``, ``run_hit_rate``, ``run_pass_us``, ``batch_tpot_us`` (of the whole run,
        the same in its rows), ``layers``, ``experts``, ``top_k`` (routing geometry),
        ``expert_bytes``, ``block_length``, ``model`` (cost geometry), ``origin``, ``machine``,
        ``profile_status``, and those of :meth:`detail`.
        """
        (rows,) = self.measure_group([self], inputs)
        return rows

    def group(self) -> Hashable:
        """Return what decides how the trace is read and made ready: policy, cache and link do not.

        A subclass with a ``measure`` of its own needs its own ``group`` and ``measure_group`` too.
        """
        return RunPoint, self.trace, self.profile, self.geometry, self.extrapolate, self.rules

    @classmethod
    def measure_group(cls, points: Sequence[RunPoint], inputs: Inputs) -> list[Rows]:
        """Simulate the runs side by side, the trace being read once; return the rows of each."""
        first = points[0]
        trace = inputs.open(first.trace)
        profile = first.profile_for(inputs)
        costs = costs_for(trace, first.geometry, profile, first.extrapolate)
        runs = [point.contender(trace) for point in points]
        details = [point.detail(trace) for point in points]
        watched = [
            replace(run, policy=detail.watched(run.policy))
            for run, detail in zip(runs, details, strict=True)
        ]
        of = {id(run): detail for run, detail in zip(watched, details, strict=True)}
        results = simulate_all(
            source_for(trace, [run.policy for run in runs]),
            watched,
            costs,
            first.rules,
            expert_bytes=expert_bytes_of(trace, costs),
            observe=lambda run, record: of[id(run)].add(run, record),
        )
        about = about_run(trace, costs)
        return [
            [
                {**about, **of_run(result), **asdict(r), **detail.columns(r.request)}
                for r in result.requests
            ]
            for result, detail in zip(results, details, strict=True)
        ]

    def contender(self, trace: Trace) -> Contender:
        """Return the policy and the budget that run, under the link."""
        policies = parse_policies([self.policy])
        (found,) = contenders(policies, [Budget(cache=self.cache)], trace.geometry.experts)
        return replace(found, link_gb_s=self.link_gb_s)


def about_run(trace: Trace, costs: LaneCosts) -> dict[str, Any]:
    """Return the columns that say what a trace and costs are, whatever runs."""
    decode = trace.manifest.decode
    return {
        "model": costs.geometry.name,
        "expert_bytes": costs.geometry.expert_bytes,
        "origin": trace.manifest.origin,
        "block_length": None if decode is None else decode.block_length,
        "layers": len(trace.geometry.layers),
        "experts": trace.geometry.experts,
        "top_k": trace.geometry.top_k,
        "profile": costs.profile.name,
        "profile_status": costs.profile.status,
        "machine": costs.profile.hardware.gpu,
    }


def of_run(result: Result) -> dict[str, Any]:
    """Return the columns that are the same for all requests of a run."""
    summary = result.summary
    return {
        "link_gb_s": result.link_gb_s,
        "causal": result.causal,
        "slots": result.slots,
        "peak_gpu_bytes": summary.peak_gpu_bytes,
        "peak_resident_bytes": summary.peak_resident_bytes,
        "host_bytes": summary.host_bytes,
        "run_hit_rate": summary.hit_rate,
        "run_pass_us": summary.pass_us,
        "batch_tpot_us": summary.batch_tpot_us,
    }
