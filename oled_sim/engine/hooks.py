"""A policy's hooks, called with care: every answer is checked, every failure says where."""

from __future__ import annotations

import copy
import difflib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.state import IS_RESIDENT, NAN_SCORE, NO_PREFETCH, NOT_A_LANE, NOT_RESIDENT
from oled_sim.errors import OledSimError, PolicyError, one_line
from oled_sim.policy import Compiled, Event, LayerHistory, PassEnd, PassInfo, Policy, Setting

BUDGET_TOLERANCE = 1e-6
"""Relative slack for the sum of allocated capacities, which policies work out in floats."""

LONGEST_MESSAGE = 300
"""Characters of a policy's own exception that its sentence repeats."""


def own_copy(policy: Policy, name: str) -> Policy:
    """Return a copy of a policy for one run; ``name`` is how errors call it.

    Raises:
        PolicyError: it cannot be copied.
    """
    try:
        return copy.deepcopy(policy)
    except Exception as error:
        raise PolicyError(
            f"policy {name!r} cannot be copied, which every run does: {one_line(error)}"
        ) from error


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
            for hook in (
                "begin_iteration", "prefetch", "rescore", "revise", "end_iteration", "reside",
                "score", "foresee",
            )
        }  # fmt: skip
        self._equal = np.zeros(experts)
        ahead = [hook for hook in ("reside", "foresee") if self.overrides[hook]]
        if ahead and "future" not in policy.needs:
            raise PolicyError(
                f"policy {name!r} implements {ahead[0]}(), which looks into the future, without"
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
        except (Exception, SystemExit) as error:
            raise self.raised(f"{hook}()", error) from error

    def raised(self, what: str, error: BaseException) -> PolicyError:
        """Return the error for an exception in the policy's own code."""
        said = one_line(error)
        if len(said) > LONGEST_MESSAGE:  # numba explains at length
            said = said[:LONGEST_MESSAGE] + "…"
        return self.fail(f"{what} raised {said}{_line_in(self.policy, error)}")

    def compiled(self) -> Compiled | None:
        """Return the kernel that the policy offers, or None."""
        offer = self.call("compiled")
        if offer is not None and not isinstance(offer, Compiled):
            raise self.fail(f"compiled() returned {offer!r} instead of a Compiled")
        return offer

    @property
    def allocation_period(self) -> int:
        """Passes between calls of ``allocate``; 0 never."""
        try:
            period = self.policy.allocation_period
        except Exception as error:
            raise self.raised("allocation_period", error) from error
        if not isinstance(period, int | np.integer) or period < 0:
            raise self.fail(f"allocation_period is {period!r} instead of a whole number from 0 on")
        return int(period)

    def _array(self, hook: str, answer: Any, wanted: str) -> NDArray[Any]:
        """Return an answer as an array; ``wanted`` says of what."""
        if answer is None:
            raise self.fail(f"{hook}() returned None instead of {wanted}")
        try:
            return np.asarray(answer)
        except (ValueError, TypeError):  # such as lists of different lengths
            kind = type(answer).__name__
            raise self.fail(f"{hook}() returned a {kind} that is no array of {wanted}") from None

    def _shaped(
        self, hook: str, answer: Any, wanted: str, kinds: str, shape: tuple[int, ...]
    ) -> NDArray[Any]:
        """Return an answer as an array of that shape and one of those kinds of ``dtype``."""
        array = self._array(hook, answer, wanted)
        if array.shape != shape or array.dtype.kind not in kinds:
            raise self.fail(f"{hook}() returned {_shape(array)} instead of {wanted} {list(shape)}")
        return array

    def _numbers(self, hook: str, answer: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Return an answer as float64 of that shape."""
        array = self._shaped(hook, answer, "numbers", "fiu", shape)
        return np.ascontiguousarray(array, np.float64)

    def place(self, setting: Setting) -> NDArray[np.bool_] | None:
        """Return the initial residents, bool [L, E], or None."""
        mask = self.call("place", setting)
        if mask is None:
            return None
        return self._shaped("place", mask, "bool", "b", (len(self.layers), self.experts))

    def dispatch(self, event: Event) -> NDArray[np.int64]:
        """Return the lane of each activated expert, int64 [A]; lanes are checked by the kernel."""
        shape = event.experts.shape  # asked before the policy has the event in its hands
        lanes = self._shaped("dispatch", self.call("dispatch", event), "integers", "iu", shape)
        return np.ascontiguousarray(lanes, np.int64)

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
        shape = resident.shape
        scores = self.call("rescore", resident)
        if scores is None:
            return None
        return self._no_nan("rescore", self._numbers("rescore", scores, shape))

    def reside(self, event: Event) -> NDArray[np.int64] | None:
        """Return the residents that a clairvoyant sets before the gate, or None."""
        slots = event.capacity
        ids = self.call("reside", event)
        if ids is None:
            return None
        array = self._array("reside", ids, "expert ids")
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise self.fail(f"reside() returned {_shape(array)} instead of a list of expert ids")
        unique = np.unique(array.astype(np.int64))
        if len(unique) != len(array) or (
            unique.size and not 0 <= unique[0] <= unique[-1] < self.experts
        ):
            raise self.fail(
                f"reside() returned ids that are not distinct or not in 0..{self.experts - 1}"
            )
        if len(array) > slots:
            raise self.fail(f"reside() returned {len(array)} experts for {slots} slots")
        return unique

    def foresee(
        self, events: Iterable[Event], expert_bytes: NDArray[np.int64], budget_bytes: int
    ) -> NDArray[np.int64] | None:
        """Return the slots of each layer that a clairvoyant sets for a pass, int64 [L], or None."""
        slots = self.call("foresee", events)
        if slots is None:
            return None
        array = self._shaped("foresee", slots, "integers", "iu", (len(self.layers),))
        array = array.astype(np.int64)
        if (array < 0).any() or (array > self.experts).any():
            raise self.fail(f"foresee() returned slots outside 0..{self.experts}")
        if int((array * expert_bytes).sum()) > budget_bytes:
            raise self.fail(f"foresee() returned {array.sum()} slots, more than the budget holds")
        return array

    def prefetch(self, event: Event) -> NDArray[np.float64]:
        """Return prefetches as float64 [n, 3]: layer, expert, priority."""
        return self.prefetches("prefetch", self.call("prefetch", event))

    def prefetches(self, hook: str, answer: Any) -> NDArray[np.float64]:
        """Check a list of prefetches."""
        wanted = "(layer, expert, priority)s"
        table = np.empty((0, 3)) if answer is None else self._array(hook, answer, wanted)
        if table.ndim > 0 and len(table) == 0:
            return np.empty((0, 3))
        if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "fiu":
            raise self.fail(f"{hook}() returned {_shape(table)} instead of {wanted}")
        table = table.astype(np.float64)
        good = self._is_place(table[:, 0], table[:, 1]) & ~np.isnan(table[:, 2])
        if not good.all():
            row = table[np.argmin(good)].tolist()
            raise self.fail(f"{hook}() returned the impossible prefetch {row}")
        return table

    def _is_place(
        self, layer: NDArray[np.float64], expert: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Whether there is such an expert of such a layer."""
        whole = (layer == np.floor(layer)) & (expert == np.floor(expert))
        inside = (layer >= 0) & (layer < len(self.layers)) & (expert >= 0) & (expert < self.experts)
        return whole & inside

    def begin_iteration(self, info: PassInfo) -> NDArray[np.float64]:
        """Return the prefetches for the start of a pass as float64 [n, 3]."""
        return self.prefetches("begin_iteration", self.call("begin_iteration", info))

    def notes(self) -> tuple[str, ...]:
        """Return what readers of the results should know."""
        said = self.call("notes")
        notes = list(said) if isinstance(said, list | tuple) else [] if said is None else [None]
        if not all(isinstance(note, str) for note in notes):
            raise self.fail(f"notes() returned {said!r} instead of a list of sentences")
        return (*(str(note) for note in notes), *self._misspelt())

    def _misspelt(self) -> list[str]:
        """Return a sentence for every method that is nearly a hook: nothing ever calls it."""
        known = [n for n in vars(Policy) if not n.startswith("_")]
        found = []
        for name, value in vars(type(self.policy)).items():
            if callable(value) and not name.startswith("_") and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
                found += [f"{name}() is no hook: did you mean {hook}()?" for hook in near]
        return found

    def allocate(self, history: LayerHistory) -> NDArray[np.float64] | None:
        """Return slots per layer, float64 [L], that sum to the budget; or None."""
        capacity = self.call("allocate", history)
        if capacity is None:
            return None
        array = self._numbers("allocate", capacity, (len(self.layers),))
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
        return self._numbers(hook, scores, (self.experts,))

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
            NO_PREFETCH: f"the kernel for prefetch() asked for the impossible in row {expert}",
        }
        return self.fail(words[problem])


def _shape(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _line_in(policy: Policy, error: BaseException) -> str:
    """Say where in the policy's own file an exception arose, or in which file at all."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without our own call
    module = sys.modules.get(type(policy).__module__)
    own = [f for f in frames if f.filename == getattr(module, "__file__", None)]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f" ({Path(frame.filename).name}, line {frame.lineno})"
