"""What a session of offloaded generation runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.fixed_costs import require_fixed_costs
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender
from oled_sim.errors import ProfileError, UsageError
from oled_sim.model.block_decoder import canvas_length
from oled_sim.model.decoding import DecodeSettings

OPTIONAL_SIGNALS = ("full_gate", "embedding")
"""Signals that are recorded, and shown, only to a policy that uses them."""


@dataclass(frozen=True)
class Plan:
    """What a session runs.

    Attributes:
        contender: the policy and its cache.
        costs: what it decides by.
        rules: of the run; batch 1, no history.
        settings: how to decode.
        prompts: token ids of every request, in order.
        workers: CPU threads that compute experts.
    """

    contender: Contender
    costs: LaneCosts
    rules: Rules
    settings: DecodeSettings
    prompts: Sequence[Sequence[int]]
    workers: int

    def __post_init__(self) -> None:
        if "future" in self.contender.policy.needs:
            raise UsageError(
                f"policy {self.contender.spec!r} looks into the future, which a model that"
                " generates has not got: simulate it with `oled-sim run` on a recorded trace"
            )
        if self.rules.batch != 1:
            raise UsageError("generation with offloaded experts takes one request at a time")

    @property
    def signals(self) -> tuple[str, ...]:
        """Signals of the run's trace."""
        policy = self.contender.policy
        sees = policy.needs | policy.wants
        return ("ids", "gates", "confidence", "token_state", *sees.intersection(OPTIONAL_SIGNALS))

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest pass."""
        length = self.settings.block_length
        return max((len(p) // length + 1) * length for p in self.prompts)

    def require_costs(self) -> None:
        """Check that the profile covers the longest course of every request.

        What no policy changes is known before: prefill by the prompt's length, then a block at a
        time. Which experts run where is not: a run may still find no time for them in the profile.

        Raises:
            ProfileError: a pass that may come has more tokens, or a longer context, than profiled.
        """
        for load in sorted(self._pass_loads(), reverse=True):
            try:
                require_fixed_costs(self.costs, np.array(load, np.float64))
            except ProfileError as error:
                raise ProfileError(
                    f"prompts and --max-new-tokens may lead beyond the profile: {error}"
                ) from None

    def _pass_loads(self) -> set[tuple[int, int, int, int]]:
        """Return (tokens, requests, context, rows of the LM head) of all passes that may come."""
        length, loads = self.settings.block_length, set[tuple[int, int, int, int]]()
        for prompt in map(len, self.prompts):
            first = prompt // length * length
            loads.add((first + length, 1, 0, length))
            starts = range(first, canvas_length(prompt, self.settings), length)
            loads.update((length, 1, context, length) for context in starts)
        return loads
