"""The rules of a run (spec §4): what is simulated, in which groups, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oled_sim.engine.batch import CONFIDENCE_MODES
from oled_sim.errors import UsageError

SCOPES = ("layer", "global")
BATCH_MODES = ("lockstep", "barrier", "refill")


@dataclass(frozen=True)
class Rules:
    """How requests are run. The defaults are those of the command line.

    Attributes:
        scope: one pool per ``layer``, or one ``global`` pool.
        batch: requests that run together.
        batch_mode: ``lockstep``, ``barrier`` or ``refill``, see ``members.py``.
        staging: slots where transfers land, on top of the budget, at least 1.
        warmup: requests that come first and are never counted; None means one, or none if only
            one request is left after history.
        history: requests of the split that policies may learn from; None is the first third.
        cold: start every request (every batch) from the state before the first.
        confidence: which confidence a policy sees, see ``CONFIDENCE_MODES``.
        requests: use only this many requests of the trace; None all.
    """

    scope: str = "layer"
    batch: int = 1
    batch_mode: str = "lockstep"
    staging: int = 16
    warmup: int | None = None
    history: int | None = None
    cold: bool = False
    confidence: str = "previous"
    requests: int | None = None

    def __post_init__(self) -> None:
        _require(self.scope in SCOPES, f"scope {self.scope!r} is none of {', '.join(SCOPES)}")
        known = ", ".join(CONFIDENCE_MODES)
        _require(
            self.confidence in CONFIDENCE_MODES,
            f"confidence {self.confidence!r} is none of {known}",
        )
        _require(
            self.batch_mode in BATCH_MODES,
            f"batch mode {self.batch_mode!r} is none of {', '.join(BATCH_MODES)}",
        )
        _require(
            not (self.cold and self.batch_mode == "refill"),
            "a cold start of every request is impossible while others run:"
            " use another --batch-mode than refill, or no --cold",
        )
        _require(self.batch >= 1, f"a batch of {self.batch} is impossible: give 1 or more")
        _require(self.staging >= 1, f"{self.staging} staging slots cannot work: give 1 or more")
        _require(
            self.warmup is None or self.warmup >= 0,
            f"{self.warmup} warm-up requests are impossible: give 0 or more",
        )
        _require(
            self.history is None or self.history >= 0,
            f"{self.history} history requests are impossible: give 0 or more",
        )
        _require(
            self.requests is None or self.requests >= 1,
            f"{self.requests} requests are nothing to run: give 1 or more",
        )

    @property
    def causal(self) -> bool:
        """Whether a policy sees nothing that is known only later."""
        return self.confidence != "current"


class Group(NamedTuple):
    """Requests that run together. ``split``: history, warmup or counted.

    A stretch of a batch that is refilled goes on with requests ``begun`` in the stretch before,
    and leaves some ``unfinished`` to the next one.
    """

    split: str
    requests: tuple[int, ...]
    begun: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()

    @property
    def begins(self) -> tuple[int, ...]:
        """Requests that start with this group."""
        return tuple(r for r in self.requests if r not in self.begun)

    @property
    def ends(self) -> tuple[int, ...]:
        """Requests that end with it."""
        return tuple(r for r in self.requests if r not in self.unfinished)


@dataclass(frozen=True)
class Splits:
    """The requests of a run by what they are for; the same for every policy."""

    history: tuple[int, ...]
    warmup: tuple[int, ...]
    counted: tuple[int, ...]

    def parts(self, *, learns: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield split and requests, in order; history only for a policy that learns.

        Requests of different splits never share a batch, and the last batch of a split may be
        smaller.
        """
        for split in ("history", "warmup", "counted"):
            if split != "history" or learns:
                yield split, getattr(self, split)


def split_requests(requests: Sequence[int], rules: Rules) -> Splits:
    """Split the requests of a trace, in trace order: history, then warm-up, then counted.

    Raises:
        UsageError: nothing is left to count.
    """
    used = tuple(requests[: rules.requests])
    history = len(used) // 3 if rules.history is None else rules.history
    warmup = int(len(used) - history > 1) if rules.warmup is None else rules.warmup
    first = history + warmup
    if first >= len(used):
        raise UsageError(
            f"of {len(used)} requests, {history} are history and {warmup} warm-up, which"
            " leaves none to count: lower --history or --warmup, or use a trace with more requests"
        )
    return Splits(used[:history], used[history:first], used[first:])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
