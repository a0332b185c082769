"""Reading the files of SGLang's expert-distribution recorder in its per-token mode.

A file is what ``torch.save`` made of ``{"records": [...], "last_physical_to_logical_map": ...}``,
one record per forward pass (``sglang/srt/eplb/expert_distribution.py`` of SGLang 0.5.23).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from oled_sim.errors import TraceError

PRIMARY = "primary"
"""Gatherer of the model itself; others belong to draft models."""

_FIELDS = ("forward_pass_id", "gatherer_key", "input_ids", "positions", "topk_ids_of_layer")


class Chunk(NamedTuple):
    """What one forward pass ran of one request. T tokens.

    ``record``: number of the pass in the file, ``row``: of its first token in the pass. ``first``:
    position of that token. ``ids``: int64 [T].
    """

    record: int
    row: int
    first: int
    ids: NDArray[np.int64]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + len(self.ids)


class Dump:
    """One file; its tensors stay on disk until they are used.

    Attributes:
        layers: of the model, that route. experts: per layer. top_k: per token.
        skipped: records of other gatherers.

    Raises:
        TraceError: it is no such file, or records contradict each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = _load(path)
        self._records = _records(content, path)
        self.skipped = len(content["records"]) - len(self._records)
        self._logical = _logical(content.get("last_physical_to_logical_map"))
        self.layers, self.top_k = self._shape()
        self.experts = self._experts()

    def __len__(self) -> int:
        return len(self._records)

    def chunks(self, record: int) -> list[Chunk]:
        """Return what pass number ``record`` ran, request by request.

        Raises:
            TraceError: lengths that do not fit, gaps in positions, or tokens without experts.
        """
        entry = self._records[record]
        ids = np.asarray(entry["input_ids"], np.int64)
        positions = np.asarray(entry["positions"], np.int64)
        lengths = entry.get("extend_seq_lens")
        lengths = [1] * len(ids) if lengths is None else [int(n) for n in lengths]
        if not len(ids) == len(positions) == sum(lengths):
            raise self._error(
                record,
                f"{len(ids)} tokens, {len(positions)} positions, {sum(lengths)} of requests",
            )
        self._check_routes(record, len(ids))
        bounds = np.cumsum([0, *lengths])
        spans = [slice(a, b) for a, b in pairwise(bounds) if b > a]
        for span in spans:
            if (np.diff(positions[span]) != 1).any():
                raise self._error(record, "positions of a request are not consecutive")
        return [Chunk(record, int(s.start), int(positions[s][0]), ids[s]) for s in spans]

    def routes(self, chunk: Chunk) -> NDArray[Any]:
        """Return the experts of a chunk, integer [L, T, k]."""
        rows = slice(chunk.row, chunk.row + len(chunk.ids))
        found = self._topk(chunk.record)[list(self.layers), rows, : self.top_k]
        if self._logical is None:
            return found
        return self._logical[np.asarray(self.layers)[:, None, None], found]

    def _check_routes(self, record: int, tokens: int) -> None:
        found = self._topk(record)
        if found.shape[1] < tokens:
            raise self._error(
                record,
                f"experts of {found.shape[1]} of {tokens} tokens: the recorder's buffer is too"
                " small for the batch, record with fewer requests at a time",
            )
        routes = found[list(self.layers), :tokens, : self.top_k]
        if (lost := (routes < 0).any(axis=2)).any():
            layer, token = np.argwhere(lost)[0]
            raise self._error(
                record,
                f"layer {self.layers[layer]} has no experts for token {token} of {tokens}: the"
                " recorder lost it, record with fewer requests at a time and without CUDA graphs",
            )
        if routes.max(initial=0) >= self.experts:
            raise self._error(
                record,
                f"expert {routes.max()} of {self.experts}: fused shared experts are counted too,"
                " turn their fusion off",
            )

    def _topk(self, record: int) -> NDArray[np.int32]:
        tensor = self._records[record]["topk_ids_of_layer"]
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            raise self._error(record, "topk_ids_of_layer is no tensor [layers, tokens, k]")
        return tensor.numpy()

    def _shape(self) -> tuple[tuple[int, ...], int]:
        """Return layers that route and k, as the first record that routes at all shows them."""
        for record in range(len(self._records)):
            used = self._topk(record) >= 0
            if used.any():
                layers = np.flatnonzero(used.any(axis=(1, 2))).tolist()
                return tuple(layers), int(used.any(axis=(0, 1)).sum())
        raise TraceError(
            f"{self.path}: no record holds an expert: CUDA graphs replay without the recorder,"
            " start the server with --disable-cuda-graph"
        )

    def _experts(self) -> int:
        if self._logical is not None:
            return self._logical.shape[1]
        count = self._records[0].get("global_physical_count")
        if isinstance(count, torch.Tensor) and count.dim() == 2:
            return count.shape[1]
        return 1 + max(int(self._topk(n).max(initial=0)) for n in range(len(self._records)))

    def _error(self, record: int, problem: str) -> TraceError:
        number = self._records[record]["forward_pass_id"]
        return TraceError(f"{self.path}, record {record} (forward pass {number}): {problem}")


def _load(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        first = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise TraceError(f"{path} is no dump of the recorder, or is damaged: {first}") from None
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise TraceError(f"{path} is no dump of the recorder: it holds no list of records")
    return content


def _records(content: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    kept = list(_checked(content["records"], path))
    if not kept:
        raise TraceError(f"{path} holds no record: was recording started before the requests?")
    return kept


def _checked(records: list[Any], path: Path) -> Iterator[dict[str, Any]]:
    last = -1
    for number, record in enumerate(records):
        missing = [f for f in _FIELDS if not isinstance(record, dict) or f not in record]
        if missing == ["topk_ids_of_layer"] or (missing and "input_ids" in missing):
            raise TraceError(
                f"{path}, record {number}: no {missing[0]}: start the server with"
                " --expert-distribution-recorder-mode per_token"
            )
        if missing:
            raise TraceError(f"{path}, record {number}: no {missing[0]}")
        if record["gatherer_key"] != PRIMARY:
            continue
        if record["forward_pass_id"] <= last:
            raise TraceError(
                f"{path}, record {number}: forward pass {record['forward_pass_id']} follows {last}:"
                " the file mixes recordings or ranks"
            )
        last = record["forward_pass_id"]
        yield record


def _logical(table: Any) -> NDArray[np.int64] | None:
    """Return the logical expert of each physical one [layers, E]; None if they are the same."""
    if not isinstance(table, torch.Tensor) or table.dim() != 2:
        return None
    found = table.numpy().astype(np.int64)
    return None if (found == np.arange(found.shape[1])).all() else found
