"""Reading the files of SGLang's expert-distribution recorder in its per-token mode.

A file is what ``torch.save`` made of ``{"records": [...], "last_physical_to_logical_map": ...}``,
one record per forward pass (``sglang/srt/eplb/expert_distribution.py`` of SGLang 0.5.23).
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from oled_sim.errors import TraceError

from .sglang_fields import FieldError, is_integer_tensor, routes, token_fields

PRIMARY = "primary"
"""Gatherer of the model itself; others belong to draft models."""

_ZIP = b"PK\x03\x04"
"""What a file of ``torch.save`` begins with."""

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
            TraceError: fields of another kind, lengths that do not fit, gaps in positions, or
                tokens without experts.
        """
        try:
            ids, positions, lengths = token_fields(self._records[record])
        except FieldError as error:
            raise self._error(record, str(error)) from None
        self._check_routes(record, len(ids))
        bounds = np.concatenate(([0], np.cumsum(lengths)))
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

    def _topk(self, record: int) -> NDArray[Any]:
        try:
            return routes(self._records[record])
        except FieldError as error:
            raise self._error(record, str(error)) from None

    def _shape(self) -> tuple[tuple[int, ...], int]:
        """Return layers that route and k, as the first record that routes at all shows them."""
        self._same_layers()
        for record in range(len(self._records)):
            used = self._topk(record) >= 0
            if used.any():
                layers = np.flatnonzero(used.any(axis=(1, 2))).tolist()
                return tuple(layers), int(used.any(axis=(0, 1)).sum())
        raise TraceError(
            f"{self.path}: no record holds an expert: CUDA graphs replay without the recorder,"
            " start the server with --disable-cuda-graph"
        )

    def _same_layers(self) -> None:
        layers, _, columns = self._topk(0).shape
        for record in range(len(self._records)):
            found = self._topk(record).shape
            if (found[0], found[2]) != (layers, columns):
                raise self._error(
                    record,
                    f"topk_ids_of_layer has {found[0]} layers and {found[2]} columns, {layers} and"
                    f" {columns} in record 0: the file mixes models",
                )
        if self._logical is not None and len(self._logical) < layers:
            raise TraceError(
                f"{self.path}: last_physical_to_logical_map has {len(self._logical)} layers, the"
                f" records have {layers}"
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
    damage = "is no dump of the recorder, or is damaged"
    try:
        if not zipfile.is_zipfile(path):  # its directory comes last
            with path.open("rb") as file:
                cut = file.read(len(_ZIP)) == _ZIP
            what = "it is truncated" if cut else "it is no file of torch.save"
            raise TraceError(f"{path} {damage}: {what}")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        first = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise TraceError(f"{path} {damage}: {first}") from None
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise TraceError(f"{path} is no dump of the recorder: it holds no list of records")
    return content


def _records(content: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    kept = list(_checked(content["records"], path))
    if not kept:
        raise TraceError(f"{path} holds no record: was recording started before the requests?")
    return kept


def _checked(records: list[Any], path: Path) -> Iterator[dict[str, Any]]:
    last, rank = -1, None
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
        if not isinstance(record["forward_pass_id"], int):
            raise TraceError(f"{path}, record {number}: forward_pass_id is no whole number")
        # Every rank counts its own passes, so that ids may well ascend over several of them.
        other = record.get("rank")
        if not isinstance(other, int | None):
            raise TraceError(f"{path}, record {number}: rank is no whole number")
        rank = other if rank is None else rank
        if other != rank:
            raise TraceError(
                f"{path}, record {number}: it is of rank {other}, earlier ones of rank {rank}:"
                " import the file of one rank"
            )
        if record["forward_pass_id"] <= last:
            raise TraceError(
                f"{path}, record {number}: forward pass {record['forward_pass_id']} follows {last}:"
                " the file mixes recordings or ranks"
            )
        last = record["forward_pass_id"]
        yield record


def _logical(table: Any) -> NDArray[np.int64] | None:
    """Return the logical expert of each physical one [layers, E]; None if they are the same."""
    if not is_integer_tensor(table, 2):
        return None
    found = table.numpy().astype(np.int64)
    return None if (found == np.arange(found.shape[1])).all() else found
