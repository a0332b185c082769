"""Which policy runs with which budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oled_sim.engine.budget import Budget
from oled_sim.engine.runner import Contender
from oled_sim.errors import UsageError
from oled_sim.policy import Policy


def require_causal(policies: Mapping[str, Policy]) -> None:
    """Refuse a policy that looks into the future where there is none: on hardware.

    Raises:
        UsageError: names the first.
    """
    for label, policy in policies.items():
        if "future" in policy.needs:
            raise UsageError(
                f"policy {label!r} looks into the future, which hardware cannot:"
                " leave it out, or simulate it with `oled-sim run`"
            )


def contenders(
    policies: Mapping[str, Policy], budgets: Sequence[Budget], experts: int
) -> list[Contender]:
    """Return every policy with every budget; a reference once, with the only one it has.

    Args:
        policies: by label.
        budgets: in the order wanted; within one the policies keep theirs. References come last.
        experts: per layer.
    """
    own = {"none": Budget(cache=0), "all": Budget(cache=experts)}
    found = [
        Contender(label, policy, budget)
        for budget in budgets
        for label, policy in policies.items()
        if policy.residency not in own
    ]
    return found + [
        Contender(label, policy, own[policy.residency])
        for label, policy in policies.items()
        if policy.residency in own
    ]
