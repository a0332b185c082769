"""From text to windows on the device: encoding, hold-out, and the mixture over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from oled_sim.errors import UsageError
from oled_sim.model.training.corpus import held_out, read_source
from oled_sim.model.training.packing import Windows, pack
from oled_sim.model.training.recipe import Data, Source
from oled_sim.model.training.tokenizer import EOS, encode, token_id


@dataclass(frozen=True, slots=True)
class Prepared:
    """Windows per source, for training and held out."""

    train: Mapping[str, Windows]
    validation: Mapping[str, Windows]

    def tokens(self) -> dict[str, dict[str, int]]:
        """Return the number of real tokens per source and split."""
        return {
            name: {"train": int(w.real.sum()), "validation": int(self.validation[name].real.sum())}
            for name, w in self.train.items()
        }


def prepare(data: Data, folder: Path, tokenizer: Tokenizer) -> Prepared:
    """Read, divide, encode and pack every source.

    Raises:
        UsageError: a file is missing, or a source has nothing to train on or to hold out.
    """
    train, validation = {}, {}
    for source in data.sources:
        train[source.name], validation[source.name] = _prepare(source, data, folder, tokenizer)
    return Prepared(train, validation)


def _prepare(
    source: Source, data: Data, folder: Path, tokenizer: Tokenizer
) -> tuple[Windows, Windows]:
    parts: tuple[list[str], list[str]] = ([], [])
    for document in read_source(source, folder):
        parts[held_out(document, data.validation_share)].append(document.text)
    if not all(parts):
        raise UsageError(
            f"source {source.name!r} has {len(parts[0])} documents to train on and "
            f"{len(parts[1])} to hold out: it needs both, change its filter or validation_share"
        )
    eos = token_id(tokenizer, EOS)
    train, validation = (
        pack(encode(tokenizer, _join(part, source.join)), data.window, data.pad_multiple, eos)
        for part in parts
    )
    return train, validation


def _join(documents: Sequence[str], most: int) -> list[str]:
    """Join runs of 1 to ``most`` documents, in order; the lengths of the runs take turns."""
    joined, first = [], 0
    for count in cycle(range(1, most + 1)):
        if first >= len(documents):
            return joined
        joined.append("\n\n".join(documents[first : first + count]))
        first += count
    return joined


@dataclass(frozen=True, slots=True)
class Batch:
    """B windows on the device.

    Attributes:
        tokens: int64 [B, S]. starts, real, used: bool [B, S], as in :class:`Windows`.
    """

    tokens: Tensor
    starts: Tensor
    real: Tensor
    used: Tensor


def to_device(windows: Windows, device: torch.device) -> Batch:
    """Copy windows to the device as one batch."""
    tokens = torch.from_numpy(windows.tokens).to(device).long()
    flags = [
        torch.from_numpy(flag).to(device) for flag in (windows.starts, windows.real, windows.used)
    ]
    return Batch(tokens, *flags)


class Sampler:
    """Draws training batches; every source is passed through in random order, then again.

    All windows stay on the device.
    """

    def __init__(
        self, train: Mapping[str, Windows], sources: tuple[Source, ...], device: torch.device
    ) -> None:
        self._sources = sources
        self._parts = [_Resident(train[source.name], device) for source in sources]
        self.drawn = dict.fromkeys((source.name for source in sources), 0)

    def draw(self, count: int, progress: float, generator: np.random.Generator) -> Batch:
        """Return ``count`` windows mixed as the recipe says at ``progress`` (0 to 1)."""
        shares = mixture(self._sources, progress)
        counts = generator.multinomial(count, shares)
        parts = []
        for source, part, number in zip(self._sources, self._parts, counts, strict=True):
            self.drawn[source.name] += int(number)
            parts.append(part.take(int(number), generator))
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        return Batch(joined[0].long(), *joined[1:])

    def epochs(self) -> dict[str, float]:
        """Return how often each source has been passed through."""
        return {
            name: round(count / len(part), 2)
            for (name, count), part in zip(self.drawn.items(), self._parts, strict=True)
        }


class _Resident:
    """The windows of one source on the device, and what is left of the pass through them."""

    def __init__(self, windows: Windows, device: torch.device) -> None:
        arrays = (windows.tokens, windows.starts, windows.real, windows.used)
        self._tensors = [torch.from_numpy(array).to(device) for array in arrays]
        self._left: NDArray[np.int64] = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def take(self, count: int, generator: np.random.Generator) -> list[Tensor]:
        while len(self._left) < count:
            self._left = np.append(self._left, generator.permutation(len(self)))
        chosen, self._left = self._left[:count], self._left[count:]
        index = torch.from_numpy(chosen).to(self._tensors[0].device, non_blocking=True)
        return [tensor[index] for tensor in self._tensors]


def mixture(sources: tuple[Source, ...], progress: float) -> NDArray[np.float64]:
    """Return the share of each source at ``progress``, summing to 1."""
    weights = np.array([source.weight for source in sources], np.float64)
    mixed = weights[:, 0] * (1 - progress) + weights[:, 1] * progress
    return mixed / mixed.sum()
