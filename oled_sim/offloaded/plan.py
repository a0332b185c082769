"""What a session of offloaded generation runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender
from oled_sim.errors import UsageError
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
