"""A policy's hooks, called with care: every answer is checked, every failure says where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.state import IS_RESIDENT, NAN_SCORE, NOT_A_LANE, NOT_RESIDENT
from oled_sim.errors import OledSimError, PolicyError
from oled_sim.policy import Event, LayerHistory, PassEnd, Policy, Prefetch, Setting

BUDGET_TOLERANCE = 1e-6
"""Relative slack for the sum of allocated capacities, which policies work out in floats."""


class Hooks:
    """The hooks of one policy in one run.

    Attributes:
        name: how errors call the policy. where: request, pass and layer of the moment.
    """

    def __init__(self, policy: Policy, name: str, layers: tuple[int, ...], experts: int) -> None:
        self.policy = policy
        self.name = name
        self.layers = layers
        self.experts = experts
        self.request = -1
        self.pass_index = -1
        self.layer = -1
        policy.experts = experts
        self.overrides = {
            hook: getattr(type(policy), hook) is not getattr(Policy, hook)
            for hook in ("prefetch", "rescore", "revise", "end_iteration", "reside", "score")
        }
        self._equal = np.zeros(experts)
        if self.overrides["reside"] and "future" not in policy.needs:
            raise PolicyError(
                f"policy {name!r} implements reside(), which looks into the future, without"
                " declaring 'future' in `needs`"
            )

    @property
    def where(self) -> str:
        """Say request, pass and layer, as far as they are known."""
        parts = [f"request {self.request}"] if self.request >= 0 else []
        parts += [f"pass {self.pass_index}"] if self.pass_index >= 0 else []
        parts += [f"layer {self.layers[self.layer]}"] if self.layer >= 0 else []
        return ", ".join(parts) or "the start of the run"

    def fail(self, problem: str) -> PolicyError:
        """Return the error for a broken contract."""
        return PolicyError(f"policy {self.name!r} at {self.where}: {problem}")

    def call(self, hook: str, *args: Any) -> Any:
        """Call a hook; an exception in it becomes a :class:`PolicyError`."""
        try:
            return getattr(self.policy, hook)(*args)
        except OledSimError:
            raise
        except Exception as error:
            raise self.fail(f"{hook}() raised {type(error).__name__}: {error}") from error

    def place(self, setting: Setting) -> NDArray[np.bool_] | None:
        """Return the initial residents, bool [L, E], or None."""
        mask = self.call("place", setting)
        if mask is None:
            return None
        wanted = (len(self.layers), self.experts)
        mask = np.asarray(mask)
        if mask.shape != wanted or mask.dtype != np.bool_:
            raise self.fail(f"place() returned {_shape(mask)} instead of bool {list(wanted)}")
        return mask

    def dispatch(self, event: Event) -> NDArray[np.int64]:
        """Return the lane of each activated expert, int64 [A]; lanes are checked by the kernel."""
        lanes = self.call("dispatch", event)
        array = np.asarray(lanes)
        if array.shape != event.experts.shape or array.dtype.kind not in "iu":
            raise self.fail(
                f"dispatch() returned {_shape(array)} instead of integers [{len(event.experts)}]"
            )
        return np.ascontiguousarray(array, np.int64)

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return the value of each expert of a layer, float64 [E]."""
        if not self.overrides["score"]:
            return self._equal
        return self.values("score", self.call("score", layer, event))

    def revise(self, layer: int, event: Event) -> NDArray[np.float64] | None:
        """Return revised values, float64 [E], or None."""
        scores = self.call("revise", layer, event)
        return None if scores is None else self._no_nan("revise", self.values("revise", scores))

    def rescore(self, resident: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """Return the values of all layers, float64 [L, E], or None."""
        scores = self.call("rescore", resident)
        if scores is None:
            return None
        table = np.asarray(scores)
        if table.shape != resident.shape or table.dtype.kind not in "fiu":
            raise self.fail(
                f"rescore() returned {_shape(table)} instead of numbers {list(resident.shape)}"
            )
        return self._no_nan("rescore", np.asarray(table, np.float64))

    def reside(self, event: Event) -> NDArray[np.int64] | None:
        """Return the residents that a clairvoyant sets before the gate, or None."""
        ids = self.call("reside", event)
        if ids is None:
            return None
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise self.fail(f"reside() returned {_shape(array)} instead of a list of expert ids")
        unique = np.unique(array.astype(np.int64))
        if len(unique) != len(array) or (
            unique.size and not 0 <= unique[0] <= unique[-1] < self.experts
        ):
            raise self.fail(
                f"reside() returned ids that are not distinct or not in 0..{self.experts - 1}"
            )
        if len(array) > event.capacity:
            raise self.fail(f"reside() returned {len(array)} experts for {event.capacity} slots")
        return unique

    def prefetch(self, event: Event) -> NDArray[np.float64]:
        """Return prefetches as float64 [n, 3]: layer, expert, priority."""
        return self.prefetches("prefetch", self.call("prefetch", event))

    def prefetches(self, hook: str, wanted: Sequence[Prefetch] | None) -> NDArray[np.float64]:
        """Check a list of prefetches."""
        if wanted is None or len(wanted) == 0:
            return np.empty((0, 3))
        table = np.asarray(wanted)
        if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "fiu":
            raise self.fail(
                f"{hook}() returned {_shape(table)} instead of (layer, expert, priority)s"
            )
        table = table.astype(np.float64)
        layer, expert = table[:, 0], table[:, 1]
        inside = (layer >= 0) & (layer < len(self.layers)) & (expert >= 0) & (expert < self.experts)
        if not (inside & ~np.isnan(table[:, 2])).all():
            row = int(np.argmin(inside & ~np.isnan(table[:, 2])))
            raise self.fail(f"{hook}() returned the impossible prefetch {table[row].tolist()}")
        return table

    def allocate(self, history: LayerHistory) -> NDArray[np.float64] | None:
        """Return slots per layer, float64 [L], that sum to the budget; or None."""
        capacity = self.call("allocate", history)
        if capacity is None:
            return None
        array = np.asarray(capacity)
        if array.shape != (len(self.layers),) or array.dtype.kind not in "fiu":
            raise self.fail(
                f"allocate() returned {_shape(array)} instead of numbers [{len(self.layers)}]"
            )
        array = array.astype(np.float64)
        if not (array >= 0).all():
            raise self.fail(f"allocate() returned a negative or NaN capacity: {array.tolist()}")
        if abs(array.sum() - history.budget) > BUDGET_TOLERANCE * max(1, history.budget):
            raise self.fail(
                f"allocate() returned {array.sum():g} slots in all,"
                f" but the budget is {history.budget}"
            )
        return array

    def end_iteration(self, end: PassEnd) -> None:
        """Tell the policy that a pass has ended."""
        self.call("end_iteration", end)

    def values(self, hook: str, scores: Any) -> NDArray[np.float64]:
        """Check shape and type of scores; the kernel that uses them checks for NaN."""
        array = np.asarray(scores)
        if array.shape != (self.experts,) or array.dtype.kind not in "fiu":
            raise self.fail(
                f"{hook}() returned {_shape(array)} instead of numbers [{self.experts}]"
            )
        return np.ascontiguousarray(array, np.float64)

    def _no_nan(self, hook: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if np.isnan(values).any():
            raise self.fail(f"{hook}() returned NaN")
        return values

    def explain(self, problem: int, expert: int) -> PolicyError:
        """Word what the kernel found wrong about an expert."""
        words = {
            NOT_A_LANE: f"dispatch() returned something that is no lane for expert {expert}",
            NOT_RESIDENT: f"dispatch() sends expert {expert} to the GPU, but it is not resident",
            IS_RESIDENT: f"dispatch() transfers expert {expert}, but it is resident",
            NAN_SCORE: f"score() returned NaN for expert {expert}",
        }
        return self.fail(words[problem])


def _shape(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
