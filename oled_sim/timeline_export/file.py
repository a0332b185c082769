"""The timeline file: written while the run goes on, in place only once it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.output import NewFile
from oled_sim.timeline_export.drawing import RunDrawing
from oled_sim.timeline_export.packets import Arguments, Encoder, require_perfetto

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from oled_sim.engine.budget import Budget
    from oled_sim.engine.rules import Group
    from oled_sim.engine.runner import Contender
    from oled_sim.engine.simulation import GroupRecord


class TimelineFile(NewFile):
    """A Perfetto trace of some requests of every run.

    Use as a context manager, with :meth:`add` as the observer of
    :func:`~oled_sim.engine.runner.simulate_all` and :meth:`draws` as its ``keep_log``.

    Args:
        path: the file.
        layers: the model's own indices of the MoE layers.
        expert_bytes: int64 [L], bytes of one expert per layer.
        requests: numbers of the counted requests to draw, None all; in batches, the batches
            that these are part of.
        about: what the file says of every run, such as its trace, profile and rules.

    Raises:
        UsageError: the package perfetto is absent.
    """

    def __init__(
        self,
        path: Path,
        layers: Sequence[int],
        expert_bytes: NDArray[np.int64],
        *,
        requests: Collection[int] | None = None,
        about: Arguments | None = None,
    ) -> None:
        super().__init__(path)
        require_perfetto()
        self._layers = tuple(layers)
        self._expert_bytes = expert_bytes
        self._about = about or {}
        self._requests = requests
        self._encoder = Encoder()
        self._runs: dict[tuple[str, Budget], RunDrawing] = {}

    def draws(self, group: Group) -> bool:
        """Whether a group of requests is one of those to draw."""
        wanted = self._requests is None or not set(self._requests).isdisjoint(group.requests)
        return group.split == "counted" and wanted

    def add(self, contender: Contender, record: GroupRecord) -> None:
        """Draw a group of requests, if it is one of those to draw."""
        if self.draws(record.group):
            self._drawing((contender.spec, contender.budget)).draw(record)
            self._append(self._encoder.take())

    def _drawing(self, run: tuple[str, Budget]) -> RunDrawing:
        if run not in self._runs:
            spec, budget = run
            name = f"{spec} (cache {budget})"
            self._runs[run] = RunDrawing(
                self._encoder, name, self._about, self._layers, self._expert_bytes
            )
        return self._runs[run]

    def _append(self, data: bytes) -> None:
        try:
            with self.temporary.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise self.refused(error) from error
