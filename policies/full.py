"""Everything resident: the upper reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from oled_sim.errors import UsageError
from oled_sim.policy import Policy, Setting


@dataclass
class Full(Policy):
    """Every expert of every layer is resident from the start: full residency.

    What the OLED-MoE paper (section 5.2) calls the model that fits; no policy is involved, so
    the only question is what happens when the budget is smaller. Nothing can be resident then
    that does not fit: ``oled-sim run`` gives ``full`` a budget of all experts, once, and shows it
    in the row; from Python a smaller budget is refused.
    """

    residency: ClassVar[Literal["budget", "none", "all"]] = "all"

    def place(self, setting: Setting) -> None:
        """Refuse a budget that does not hold every expert.

        Raises:
            UsageError: it does not.
        """
        experts, layers = setting.routing.experts, len(setting.routing.layers)
        if setting.budget < experts * layers:
            raise UsageError(
                f"full needs room for all {experts} experts of each of {layers} layers, but the"
                f" budget is {setting.budget} slots in all: give a cache of {experts}"
            )
