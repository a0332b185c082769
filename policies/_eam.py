"""Expert activation matrices (EAMs) of requests, their collection, and the search in it.

Follows ``moe_infinity/memory/expert_tracer.py`` of MoE-Infinity at revision d617801.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import inlined, lean
from oled_sim.engine.output import NewFile, refuse_existing
from oled_sim.engine.source import Source
from oled_sim.errors import UsageError
from oled_sim.policy import Event

from ._candidates import ranked
from ._similarity import add_products, with_room

# ruff: noqa: ANN001, ANN202

Match = Literal["released", "observed", "all"]
"""Layers that are compared after the gate of layer l: those above l, those up to l, or all."""

FORMAT = 1
"""Version of collection files."""


class RunningEAM:
    """The EAM of a request so far, and its products with a collection.

    Attributes:
        counts: float64 [L, E].
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.counts = np.zeros((layers, experts))
        self.products = np.zeros((layers, 0))
        self.stale = np.ones(layers, np.bool_)
        self.version = -1

    def add(self, layer: int, counts: NDArray[np.float64]) -> None:
        """Add counts float64 [E] to a layer."""
        self.counts[layer] += counts
        self.stale[layer] = True


class EAMCollection:
    """EAMs of earlier requests.

    A new one takes a free row, else that of the least accessed one (the first among equals) after
    the persistent rows, which are never replaced. (The released code overwrites row 0 when all
    rows are persistent; here a new EAM is then dropped.)

    Args:
        layers, experts: L, E. capacity: most rows.
        persistent: float64 [n, L, E], rows that stay.

    Attributes:
        size: rows. access: int64 [size], times a row was inserted or matched.
    """

    def __init__(
        self, layers: int, experts: int, capacity: int, persistent: NDArray[np.float64]
    ) -> None:
        self.capacity = capacity
        self.persistent = len(persistent)
        self.size = 0
        self.version = 0
        self._counts = np.zeros((0, layers, experts))
        self._units = np.zeros((layers, experts, 0))
        self._access = np.zeros(0, np.int64)
        self._orders = np.zeros((0, layers, experts), np.int32)
        self._ranked = np.zeros((0, layers, experts))
        for eam in persistent:
            self._write(self.size, eam)

    @property
    def access(self) -> NDArray[np.int64]:
        """int64 [size]."""
        return self._access[: self.size]

    @property
    def counts(self) -> NDArray[np.float64]:
        """float64 [size, L, E]."""
        return self._counts[: self.size]

    def insert(self, eam: NDArray[np.float64]) -> None:
        """Add the EAM float64 [L, E] of a finished request; an empty one is no row."""
        if not eam.any():
            return
        if self.size < self.capacity:
            self._write(self.size, eam)
        elif self.persistent < self.capacity:
            self._write(self.persistent + int(np.argmin(self.access[self.persistent :])), eam)

    def match(self, running: RunningEAM, layer: int, rule: Match) -> int | None:
        """Return the row most like a running EAM, after the gate of ``layer``.

        The likeness is the mean over layers of the cosine of the layers' rows; layers that are
        not compared add the same to all. The first row wins a tie.

        Returns:
            The row, or None if nothing that is compared has been observed, or there is no row.
        """
        first = layer + 1 if rule == "released" else 0
        if self.size == 0:
            return None
        likeness, unit = np.empty(self.size), np.empty(running.counts.shape[1])
        past = layer + 1 if rule == "observed" else len(running.counts)
        self.open(running)
        row = most_like(
            running.counts, running.stale, running.products, self._units, first, past, unit,
            likeness,
        )  # fmt: skip
        return None if row < 0 else int(row)

    def order(self, row: int) -> NDArray[np.int32]:
        """Return the experts of each layer by their counts in a row, int32 [L, E]."""
        return self._orders[row]

    def note_access(self, row: int) -> None:
        """Count a match."""
        self._access[row] += 1

    def _write(self, row: int, eam: NDArray[np.float64]) -> None:
        self._counts = with_room(self._counts, row + 1, axis=0)
        self._units = with_room(self._units, row + 1, axis=2)
        self._access = with_room(self._access, row + 1, axis=0)
        self._orders = with_room(self._orders, row + 1, axis=0)
        self._ranked = with_room(self._ranked, row + 1, axis=0)
        length = np.sqrt(np.square(eam).sum(axis=1, keepdims=True))
        self._counts[row] = eam
        self._units[:, :, row] = np.divide(eam, length, out=np.zeros_like(eam), where=length > 0)
        self._access[row] = 1
        self._orders[row] = ranked(eam)
        self._ranked[row] = np.take_along_axis(eam, self._orders[row], axis=1)
        self.size = max(self.size, row + 1)
        self.version += 1

    def open(self, running: RunningEAM) -> None:
        """Give a running EAM products with the rows there are now."""
        if running.version != self.version:
            running.version = self.version
            running.products = np.zeros((len(running.counts), self._units.shape[2]))
            running.stale[:] = True

    @property
    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]:
        """What kernels read of the rows: units [L, E, n]; counts, falling, and whose they are,
        [size, L, E] each."""
        return self._units, self._ranked[: self.size], self._orders[: self.size]


@lean
def most_like(counts, stale, products, units, first, past, unit, likeness):
    """Return the row most like a running EAM in layers ``first`` to before ``past``, -1 for none.

    Args:
        counts: float64 [L, E], stale: bool [L], products: float64 [L, n], of the running EAM; the
            products of stale layers are worked out again.
        units: float64 [L, E, n], rows of the collection.
        unit: float64 [E], scratch. likeness: float64 [size], scratch.
    """
    if not _any_count(counts, first, past):
        return -1
    for layer in range(len(counts)):
        if stale[layer]:
            _multiply(counts[layer], units[layer], unit, products[layer])
            stale[layer] = False
    likeness[:] = 0.0
    for layer in range(first, past):
        for row in range(len(likeness)):
            likeness[row] += products[layer, row]
    best = 0
    for row in range(1, len(likeness)):
        if likeness[row] > likeness[best]:
            best = row
    return best


@inlined
def _any_count(counts, first, past):
    for layer in range(first, past):
        for expert in range(counts.shape[1]):
            if counts[layer, expert] != 0.0:
                return True
    return False


@inlined
def _multiply(counts, units, unit, products):
    """Write the products of a layer's counts, scaled to norm 1, with ``units`` to ``products``.

    With the columns for rows to come as well: these are 0, and all together are multiples of 8.
    """
    products[:] = 0.0
    square = 0.0  # whole numbers, so any order gives the same
    for expert in range(len(counts)):
        square += counts[expert] * counts[expert]
    if square > 0.0:
        length = np.sqrt(square)
        for expert in range(len(counts)):
            unit[expert] = counts[expert] / length
        add_products(units, unit, len(products), products)


def requests_of(event: Event) -> list[int]:
    """Return the requests that have tokens in an event, in the order of its rows."""
    return list(dict.fromkeys(event.owner.tolist()))


def counts_by_request(event: Event, experts: int) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield each request of an event with its tokens per expert, float64 [E]."""
    requests = requests_of(event)
    for request in requests:
        if len(requests) == 1:
            counts = np.zeros(experts)
            counts[event.experts] = event.tokens
        else:
            routes = event.routes[event.owner == request]
            counts = np.bincount(routes.ravel(), minlength=experts).astype(np.float64)
        yield request, counts


def collect_eams(
    source: Source, requests: int | None = None, *, count: Literal["tokens", "event"] = "tokens"
) -> NDArray[np.float64]:
    """Return the EAMs of the first requests of a trace, float64 [n, L, E]; they need no simulation.

    Args:
        source: the trace.
        requests: how many; all by default.
        count: what an activation adds, its tokens or 1.
    """
    layers, experts = len(source.geometry.layers), source.geometry.experts
    chosen = list(source.requests)[:requests]
    eams = np.zeros((len(chosen), layers, experts))
    for eam, request in zip(eams, chosen, strict=True):
        trace = source.read(request)
        for v, layer in enumerate(trace.event_layer):
            routes = trace.experts[trace.event_offset[v] : trace.event_offset[v + 1]]
            found = np.bincount(routes.ravel(), minlength=experts)
            eam[layer] += found if count == "tokens" else found > 0
    return eams


def save_eams(path: Path, eams: NDArray[np.float64], *, force: bool = False) -> None:
    """Write EAMs float64 [n, L, E] to a .npz file; the same EAMs give the same bytes.

    Raises:
        UsageError: the file exists and ``force`` is false, or cannot be written.
    """
    refuse_existing(path, force=force)
    with NewFile(path) as file:
        try:
            with file.temporary.open("wb") as stream:
                np.savez(stream, format=np.int64(FORMAT), eams=np.asarray(eams, "<f8"))
        except OSError as error:
            raise file.refused(error) from error


def load_eams(path: Path, layers: int, experts: int) -> NDArray[np.float64]:
    """Return the EAMs of a file, float64 [n, L, E].

    Raises:
        UsageError: it cannot be read, is no such file, or has another geometry.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            version, eams = int(file["format"]), np.asarray(file["eams"], np.float64)
    except FileNotFoundError:
        raise UsageError(f"no EAM collection {path}: save one first") from None
    except Exception as error:  # whatever a damaged zip file may raise
        raise UsageError(f"{path} is no EAM collection: {error}") from error
    if version != FORMAT:
        raise UsageError(f"{path} has format {version} of EAM collections, but {FORMAT} is known")
    if eams.ndim != 3 or eams.shape[1:] != (layers, experts):
        raise UsageError(
            f"{path} holds EAMs of shape {list(eams.shape[1:])}, but the trace has {layers} MoE"
            f" layers of {experts} experts: make a collection of a trace of this model"
        )
    if not (np.isfinite(eams).all() and (eams >= 0).all() and eams.any(axis=(1, 2)).all()):
        raise UsageError(f"{path} holds an empty EAM or impossible counts: make it again")
    return eams
