"""The timeline file: written while the run goes on, in place only once it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.output import NewFile
from oled_sim.errors import UsageError
from oled_sim.timeline_export.drawing import RunDrawing
from oled_sim.timeline_export.packets import Arguments, Encoder, require_perfetto

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oled_sim.engine.budget import Budget
    from oled_sim.engine.runner import Contender
    from oled_sim.engine.simulation import GroupRecord


class TimelineFile(NewFile):
    """A Perfetto trace of the first counted requests of every run.

    Use as a context manager, and :meth:`add` as the observer of
    :func:`~oled_sim.engine.runner.simulate_all` with ``keep_log=True``.

    Args:
        path: the file.
        layers: the model's own indices of the MoE layers.
        expert_bytes: int64 [L], bytes of one expert per layer.
        requests: how many counted requests to draw of each run; in batches, the batches that
            these are part of.
        about: what the file says of every run, such as its trace, profile and rules.

    Raises:
        UsageError: the package perfetto is absent, or ``requests`` is less than 1.
    """

    def __init__(
        self,
        path: Path,
        layers: Sequence[int],
        expert_bytes: NDArray[np.int64],
        *,
        requests: int = 1,
        about: Arguments | None = None,
    ) -> None:
        super().__init__(path)
        if requests < 1:
            raise UsageError(f"a timeline of {requests} requests is empty: give 1 or more")
        require_perfetto()
        self._layers = tuple(layers)
        self._expert_bytes = expert_bytes
        self._about = about or {}
        self._requests = requests
        self._encoder = Encoder()
        self._runs: dict[tuple[str, Budget], RunDrawing] = {}
        self._left: dict[tuple[str, Budget], int] = {}

    def add(self, contender: Contender, record: GroupRecord) -> None:
        """Draw a group of requests, if it is one of those to draw."""
        run = (contender.spec, contender.budget)
        left = self._left.setdefault(run, self._requests)
        if record.group.split != "counted" or left <= 0:
            return
        self._left[run] = left - len(record.group.requests)
        self._drawing(run).draw(record)
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
