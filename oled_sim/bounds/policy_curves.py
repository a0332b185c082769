"""The hits of a policy with every number of slots, in one pass over a run.

A policy is a *stack* policy (Mattson et al. 1970) if what it keeps with C slots it also keeps
with C + 1. Under the engine's rules, where all experts of an event come at once and the best C of
the residents and the activated stay, this holds for every policy whose scores do not depend on who
is resident or how many slots there are, and that transfers every miss, scores nothing −∞, and
leaves initial residents, prefetches and capacities alone (docs/sweep.md has the proof). One list
per pool, in which the first C are the residents of a cache with C slots, then does for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.bounds.curves import update_list
from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.budget import Budget
from oled_sim.engine.feeding import feed
from oled_sim.engine.hooks import Hooks, own_copy
from oled_sim.engine.jit import kernel
from oled_sim.engine.rules import Rules, split_requests
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.source import Source
from oled_sim.errors import UsageError
from oled_sim.policy import Event, Lane, PassEnd, Policy, RequestInfo, RequestSummary, Setting
from oled_sim.trace.schema import Kind

# ruff: noqa: ANN001, ANN202

OTHER_HOOKS = ("begin_iteration", "prefetch", "reside")
"""What a stack policy leaves alone."""


@dataclass(frozen=True)
class HitCurve:
    """Hits of a policy with every cache size C, over the counted requests.

    ``hits``, ``prefill_hits``: int64 [E + 1], Σ |R ∩ A| over decode and over prefill passes.
    ``activations``, ``prefill_activations``: Σ |A| likewise, the same for every C.
    """

    spec: str
    hits: NDArray[np.int64]
    activations: int
    prefill_hits: NDArray[np.int64]
    prefill_activations: int

    @property
    def hit_rate(self) -> NDArray[np.float64]:
        """float64 [E + 1], of decode passes; NaN if nothing is activated."""
        return _rate(self.hits, self.activations)

    @property
    def hit_rate_with_prefill(self) -> NDArray[np.float64]:
        """float64 [E + 1], of all passes."""
        return _rate(self.hits + self.prefill_hits, self.activations + self.prefill_activations)


def _rate(hits: NDArray[np.int64], activations: int) -> NDArray[np.float64]:
    return hits / activations if activations else np.full(len(hits), np.nan)


def policy_curve(
    source: Source,
    policy: Policy,
    costs: LaneCosts,
    rules: Rules | None = None,
    *,
    spec: str | None = None,
    expert_bytes: NDArray[np.int64] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HitCurve:
    """Return the hits of a stack policy with 0 to E slots per layer, exactly as in as many runs.

    Args:
        source: the trace.
        policy: the policy; ``dispatch`` and ``score`` are called once per event, with nothing
            resident.
        costs: lane costs, which hits do not depend on.
        rules: how requests are run.
        spec: what to call the policy.
        expert_bytes: int64 [L], if they differ from the cost geometry's.
        progress: called with (requests done, all of them).

    Raises:
        UsageError: it is no stack policy, or one pool holds experts of different size.
        TraceError, PolicyError, ProfileError: as :func:`~oled_sim.engine.runner.simulate`.
    """
    rules, spec = rules or Rules(), spec or type(policy).__name__
    geometry = source.geometry
    _require_stack(policy, spec, rules, expert_bytes)
    source.require(policy.needs, f"policy {spec!r}")
    recorder = _Recorder(policy, spec, geometry.layers, geometry.experts, rules.scope)
    simulation = Simulation(
        recorder, geometry, costs, Budget(cache=0), rules, expert_bytes=expert_bytes, name=spec
    )
    splits, in_history, done = split_requests(source.requests, rules), False, 0
    total = sum(len(requests) for _, requests in splits.parts(learns=policy.learns))
    for group, batch in feed(source, splits, rules, costs, learns=policy.learns):
        if in_history and group.split != "history":
            simulation.end_history()
        in_history = group.split == "history"
        simulation.run_group(group, batch)
        done += len(group.ends)
        if progress is not None:
            progress(done, total)
    found = simulation.policy
    assert isinstance(found, _Recorder)
    return found.curve(spec)


def _require_stack(
    policy: Policy, spec: str, rules: Rules, expert_bytes: NDArray[np.int64] | None
) -> None:
    if not policy.stack:
        raise UsageError(
            f"policy {spec!r} is no stack policy: what it keeps with one cache size says nothing"
            " about another, so run it with each: oled-sim sweep"
        )
    if rules.scope == "global" and expert_bytes is not None and len(set(expert_bytes.tolist())) > 1:
        raise UsageError(
            "one pool for experts of different size has no curve: run each cache size with"
            " oled-sim sweep, or use --scope layer"
        )


class _Recorder(Policy):
    """Stands for a policy in a run without slots, and keeps the lists of its residents."""

    def __init__(
        self, policy: Policy, spec: str, layers: tuple[int, ...], experts: int, scope: str
    ) -> None:
        self.needs = policy.needs  # type: ignore[misc]
        self.learns = policy.learns  # type: ignore[misc]
        self._asked = Hooks(own_copy(policy, spec), spec, layers, experts)
        self._global = scope == "global"
        self._counted = False
        self._slots_of_cache = len(layers) if self._global else 1
        self._shape = (1, len(layers) * experts) if self._global else (len(layers), experts)
        # Rows: prefill, decode. Column c counts what takes c slots at least, column 0 the rest.
        self._hits = np.zeros((2, self._shape[1] + 1), np.int64)

    def place(self, setting: Setting) -> None:
        """Start with empty lists."""
        if self._asked.place(setting) is not None:
            raise self._asked.fail("a stack policy starts with nothing resident: place() filled it")
        self._forget()

    def clear(self) -> None:
        """Start anew."""
        self._asked.call("clear")
        self._forget()

    def _forget(self) -> None:
        self._list = np.zeros(self._shape, np.int64)
        self._depth = np.zeros(self._shape[0], np.int64)
        self._key = np.zeros(self._shape)
        self._used = np.full(self._shape, -1, np.int64)
        self._place = np.zeros(self._shape, np.int64)
        self._active = np.zeros(self._shape[1], np.bool_)
        self._waiting = np.zeros(self._shape[1], np.int64)
        self._uses = 0

    def begin_request(self, info: RequestInfo) -> tuple[()]:
        """Hand on; prefetches there are none."""
        self._counted = info.counted
        wanted = self._asked.call("begin_request", info)
        if len(self._asked.prefetches("begin_request", wanted)):
            raise self._asked.fail("a stack policy does not prefetch, begin_request() does")
        return ()

    def end_request(self, summary: RequestSummary) -> None:
        """Hand on."""
        self._asked.call("end_request", summary)

    def end_iteration(self, end: PassEnd) -> None:
        """Hand on."""
        self._asked.end_iteration(end)

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """Ask, as the policy may rely on it; with nothing resident everything is transferred."""
        self._asked.request, self._asked.pass_index = event.request, event.pass_index
        self._asked.layer = event.layer
        lanes = self._asked.dispatch(event)
        if (lanes != Lane.TRANSFER).any():
            raise self._asked.fail("a stack policy transfers every miss")
        return lanes

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Count the event for all cache sizes, and bring the list up to date."""
        assert event is not None
        self._note(layer, self._asked.score(layer, event))
        pool, ids = 0 if self._global else layer, event.experts
        if self._global:
            ids = layer * self.experts + ids
        row = self._hits[int(event.kind != Kind.PREFILL)] if self._counted else self._nowhere
        count_and_update(
            self._list[pool], self._depth[pool : pool + 1], self._place[pool], self._key[pool],
            self._used[pool], self._uses, ids, self._active, self._waiting, row,
        )  # fmt: skip
        self._uses += len(ids)
        return np.zeros(self.experts)

    @property
    def _nowhere(self) -> NDArray[np.int64]:
        return np.zeros(self._hits.shape[1], np.int64)

    def revise(self, layer: int, event: Event) -> None:
        """Take over revised scores."""
        if self._asked.overrides["revise"]:
            values = self._asked.revise(layer, event)
            if values is not None:
                self._note(layer, values)

    def _note(self, layer: int, scores: NDArray[np.float64]) -> None:
        if not np.isfinite(scores).all():
            raise self._asked.fail("a stack policy scores every expert with a finite number")
        if self._global:
            self._key[0, layer * self.experts : (layer + 1) * self.experts] = -scores
        else:
            self._key[layer] = -scores

    def curve(self, spec: str) -> HitCurve:
        """Return what was counted."""
        slots = np.arange(self.experts) * self._slots_of_cache
        held = self._hits[:, 1:].cumsum(axis=1)
        total = self._hits.sum(axis=1)
        # Without a slot nothing is held, with one for each expert everything from the start.
        hits = np.concatenate(
            [np.zeros((2, 1), np.int64), held[:, slots[1:] - 1], total[:, None]], 1
        )
        return HitCurve(spec, hits[1], int(total[1]), hits[0], int(total[0]))


@kernel
def count_and_update(order, depth, place, key, used, uses, ids, active, waiting, hits):
    """Count an event of a pool for caches of all sizes, and bring the pool's list up to date.

    Args:
        order: int64 [N], candidates by the fewest slots that hold them, ``depth`` [1] of them.
        place: int64 [N], place of each in ``order`` from 1 on, 0 none.
        key: float64 [N], the least stays first. used: int64 [N], then the most recent.
        uses: activations so far. ids: int64 [A], activated candidates in recency order.
        active: bool [N], all false. waiting: int64 [N], scratch.
        hits: int64 [N + 1], how many take that many slots at least.
    """
    for i in range(len(ids)):
        hits[place[ids[i]]] += 1
        active[ids[i]] = True
        waiting[i] = ids[i]
        used[ids[i]] = uses + i
    depth[0] = update_list(order, depth[0], key, used, active, waiting, len(ids))
    for c in range(depth[0]):
        place[order[c]] = c + 1
    for i in range(len(ids)):
        active[ids[i]] = False


__all__ = ["HitCurve", "policy_curve"]
