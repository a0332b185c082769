"""Who is resident by a policy's own word, and how many slots it gives to layers.

What is transferred and retained at gates is decided event by event; here is what a policy places
before the first request, what a clairvoyant sets, and how the budget moves between layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.allotment import Allotment
from oled_sim.engine.hooks import Hooks
from oled_sim.engine.jit import kernel
from oled_sim.engine.merge import own
from oled_sim.engine.state import POOL_BYTES
from oled_sim.engine.state_machine import StateMachine
from oled_sim.policy import Event, LayerHistory, Setting


class Residency:
    """The pools of one run, outside its events.

    Attributes:
        allotment: how much may be resident.
        initial_residents: experts that were loaded free before the first request.
    """

    def __init__(self, machine: StateMachine, allotment: Allotment, hooks: Hooks) -> None:
        self._machine, self.allotment, self._hooks = machine, allotment, hooks
        self._initial: NDArray[np.bool_] | None = None
        self.initial_residents = 0

    @property
    def slots(self) -> int:
        """Slots of all layers together."""
        allotment = self.allotment
        if allotment.per_layer:
            return int(self._machine.state.pools.capacity.sum())
        return allotment.pool_slots

    @property
    def unused_prefetches(self) -> int:
        """Prefetched residents that nothing has used so far."""
        return int(self._machine.state.pools.unused.sum())

    def place(self, setting: Setting) -> None:
        """Ask for the initial residents and load them free of charge, into empty pools."""
        self._hooks.request = self._hooks.pass_index = self._hooks.layer = -1
        self._initial = self._hooks.place(setting)
        if self.allotment.holds_all:
            self._initial = np.ones_like(self._machine.state.pools.resident)
        self.load_initial()

    def load_initial(self) -> None:
        """Load the initial residents, whom the policy has placed, into empty pools."""
        mask, pools = self._initial, self._machine.state.pools
        if mask is None:
            return
        count = mask.sum(axis=1)
        size = self.allotment.bytes_of(count)
        self._make_room(count, size)
        if size > self.allotment.total_bytes:
            raise self._hooks.fail(f"place() fills {size} of {self.allotment.total_bytes} bytes")
        pools.resident[:] = mask
        pools.occupied[:] = count
        for layer in np.flatnonzero(count):  # nothing has been used: the highest ids go first
            pools.order[layer, : count[layer]] = np.flatnonzero(mask[layer])[::-1]
        self._machine.work[POOL_BYTES] = size
        self.initial_residents = int(count.sum())

    def _make_room(self, count: NDArray[np.int64], size: int) -> None:
        """Let a policy that moves slots place more than a layer's share; refuse it to others."""
        allotment, hooks, pools = self.allotment, self._hooks, self._machine.state.pools
        if not allotment.per_layer or not (count > pools.capacity).any():
            return
        if hooks.policy.moves_slots and size <= allotment.total_bytes:
            pools.capacity[:] = allotment.just(count)
            return
        layer = int(np.argmax(count > pools.capacity))
        raise hooks.fail(
            f"place() fills {count[layer]} of {pools.capacity[layer]} slots of layer"
            f" {hooks.layers[layer]}"
        )

    def set_residents(self, event: Event, ids: NDArray[np.int64] | None) -> None:
        """Make exactly ``ids`` resident in the event's layer, unless a clairvoyant has no wish."""
        allotment, layer = self.allotment, event.layer
        if ids is None:
            return
        if len(ids) * int(allotment.expert_bytes[layer]) > allotment.total_bytes:
            raise self._hooks.fail(f"reside() returned {len(ids)} experts, more than fit")
        self._machine.set_residents(layer, ids)
        event.resident = own(self._machine.state.pools.resident[layer])

    def set_slots(self, slots: NDArray[np.int64] | None) -> None:
        """Give every layer the slots that a clairvoyant wishes, where there is a choice."""
        allotment = self.allotment
        if slots is not None and allotment.per_layer and not allotment.holds_all:
            self._machine.change_capacities(slots)

    def allocate(self) -> None:
        """Let the policy share the budget anew; layers that shrink drop residents first."""
        pools = self._machine.state.pools
        ratio, utilization = window_means(pools.window)
        pools.window[:] = 0.0
        if not self.allotment.can_move:
            return
        capacity = pools.capacity.copy()
        wanted = self._hooks.allocate(
            LayerHistory(ratio, utilization, capacity, int(capacity.sum()))
        )
        if wanted is not None and wanted.sum() != 0:
            self._machine.change_capacities(self.allotment.by_weight(wanted))


@kernel
def window_means(window):  # noqa: ANN001, ANN201
    """Return mean |A|/E and mean |R ∩ A|/C since the last allocation, float64 [L]; NaN unknown.

    Args:
        window: float64 [L, 4], see ``Pools``.
    """
    ratio, utilization = np.full(len(window), np.nan), np.full(len(window), np.nan)
    for layer in range(len(window)):
        if window[layer, 0] > 0:
            ratio[layer] = window[layer, 1] / window[layer, 0]
        if window[layer, 2] > 0:
            utilization[layer] = window[layer, 3] / window[layer, 2]
    return ratio, utilization
