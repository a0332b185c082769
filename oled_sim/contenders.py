"""Which policy runs with which budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oled_sim.engine.budget import Budget
from oled_sim.engine.runner import Contender
from oled_sim.policy import Policy


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
