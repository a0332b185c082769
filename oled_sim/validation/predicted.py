"""The simulator's version of a measured point: same policy, warm-up, passes and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.budget import Budget
from oled_sim.engine.cut import CutSource
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.source import Source
from oled_sim.engine.state import PASS_COUNTS
from oled_sim.errors import MeasurementError, OledSimError, UsageError
from oled_sim.plugins import content_sha256
from oled_sim.policy import Policy
from oled_sim.policy_spec import parse_policies
from oled_sim.validation.measured import About, Cut, point_name
from oled_sim.validation.rows import event_rows, pass_rows


class Basis(NamedTuple):
    """What a prediction rests on. Experts have the size of the cost geometry, as on hardware."""

    source: Source
    costs: LaneCosts


class Prediction(NamedTuple):
    """What the simulator says of a point's measured requests, as tables like the measured ones.

    ``tokens``: output tokens by request. ``prefetched``: whether anything was ever prefetched,
    warm-up included.
    """

    passes: pa.Table
    events: pa.Table
    tokens: dict[int, int]
    prefetched: bool


def policy_of(about: About) -> Policy:
    """Return the policy that a point ran.

    Raises:
        MeasurementError: it cannot be made as it was.
        UsageError: the file that defines it has changed.
    """
    used = about.policy
    try:
        (policy,) = parse_policies([used.spec]).values()
    except (OledSimError, ValueError) as error:
        raise MeasurementError(f"policy {used.spec!r} cannot be made again: {error}") from error
    if used.file_sha256 is not None and content_sha256(type(policy)) != used.file_sha256:
        raise UsageError(
            f"the file of policy {used.spec!r} has changed since {point_name(about)} was measured:"
            f" validate with the one of checksum {used.file_sha256[:12]} in its place, or replay"
            " with today's into another folder"
        )
    mine, theirs = _plain(dict(policy.describe())), _plain(used.parameters)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise MeasurementError(
                f"policy {used.spec!r} ran with {name}={theirs.get(name)} and would now run with"
                f" {name}={mine.get(name)}: validate with the version that measured"
            )
    return policy


def cuts_of(about: About) -> dict[int, int | None]:
    """Return all requests of a point in the order in which they run, and where each is cut."""
    whole = tuple(Cut(request=request) for request in about.history)
    return {c.request: c.decode_passes for c in (*whole, *about.warmup, *about.measured)}


def rules_of(about: About) -> Rules:
    """Return the rules that run a point's requests, for a source that holds nothing else."""
    return Rules(
        scope=about.rules.scope,
        staging=about.rules.staging,
        cold=about.rules.cold,
        confidence=about.rules.confidence,
        history=len(about.history),
        warmup=len(about.warmup),
    )


def require_requests(about: About, source: Source) -> None:
    """Check that a trace has the requests of a point.

    Raises:
        MeasurementError: it lacks one.
    """
    for request in cuts_of(about).keys() - set(source.requests):
        raise MeasurementError(f"the trace {about.trace.name} holds no request {request}")


def predict(about: About, basis: Basis, policy: Policy) -> Prediction:
    """Simulate what a point measured.

    Raises:
        MeasurementError: the trace lacks one of its requests.
        As :func:`oled_sim.engine.runner.simulate`.
    """
    require_requests(about, basis.source)
    source = CutSource(basis.source, cuts_of(about), about.layers)
    seen: list[GroupRecord] = []
    simulate_all(
        source,
        [Contender(about.policy.label, policy, Budget(cache=about.cache))],
        basis.costs,
        rules_of(about),
        observe=_keep_in(seen),
    )
    counted = [record for record in seen if record.group.split == "counted"]
    layers = source.geometry.layers
    return Prediction(
        passes=pa.concat_tables([pass_rows(record) for record in counted]),
        events=pa.concat_tables([event_rows(record, layers) for record in counted]),
        tokens={request: source.output_tokens(request) for request in about.requests},
        prefetched=any(_prefetches(record) for record in seen),
    )


def _keep_in(seen: list[GroupRecord]) -> Callable[[Contender, GroupRecord], None]:
    return lambda _, record: seen.append(record)


def _prefetches(record: GroupRecord) -> bool:
    return bool(record.course.pass_counts[:, PASS_COUNTS.index("prefetched")].any())


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON would give them back."""
    return msgspec.json.decode(msgspec.json.encode(parameters))
