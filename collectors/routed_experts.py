"""Importing arrays of routed experts, [tokens, layers, k], as vLLM and SGLang return them.

With ``--enable-return-routed-experts`` vLLM returns ``routed_experts`` of the generated tokens and
``prompt_routed_experts`` of the prompt (docs of v0.21), SGLang one array of all tokens but the last
(``meta_info["routed_experts"]``). Saved with numpy or safetensors they are read here. What becomes
what is described in docs/importing.md; ``oled-sim export npz`` writes the same arrays, with more
beside them where passes hold several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError, UsageError
from oled_sim.importing import AS_BLOCKS, counted
from oled_sim.plugin_options import takes
from oled_sim.trace.manifest import MOST_LAYER, Manifest, decode_manifest

from .array_files import Arrays, open_arrays
from .array_values import number_within, numbers, signed_ids, whole_numbers
from .cleaning import Cleaning
from .recorded import TOKEN_DTYPES, Recorded, autoregressive
from .recording_options import EXPERTS, FIRST_LAYER, MODEL, PROMPT_TOKENS
from .two_reads import Facts, Target, import_recorded

PROMPT, GENERATED = "prompt_routed_experts", "routed_experts"
WEIGHTS = {PROMPT: "prompt_routed_weights", GENERATED: "routed_weights"}
"""Gate scores of the same shape, optional."""

COURSE = ("step", "position")
"""Arrays [tokens] of recordings in which a position occurs in several passes."""

FIELDS = {PROMPT, GENERATED, *WEIGHTS.values(), *COURSE, *TOKEN_DTYPES, "prompt_tokens"}
"""Arrays of a request, by the last part of their names; what is before it names the request."""

MANIFEST_ARRAY, LAYERS_ARRAY = "manifest", "layers"


@takes(
    PROMPT_TOKENS,
    EXPERTS,
    FIRST_LAYER,
    MODEL,
    AS_BLOCKS,
    examples=(
        "oled-sim import routed-experts routed.npz --experts 128 --prompt-tokens 57 --out trace",
        "oled-sim import routed-experts routed.npy --as-blocks 16 --out blocks",
    ),
)
def import_routed_experts(
    source: Path,
    out: Path,
    *,
    prompt_tokens: int | None = None,
    experts: int | None = None,
    first_layer: int | None = None,
    model: str | None = None,
    as_blocks: int | None = None,
    stands_for: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write the trace of arrays of routed experts; an :class:`oled_sim.importing.Importer`.

    Args:
        source: .npy, .npz or .safetensors.
        out: directory of the trace.
        prompt_tokens: of every request whose arrays do not tell; default 0.
        experts: per layer, where the file does not say.
        first_layer: the model's own index of the arrays' first layer; default 0.
        model: its name, where the file does not say.
        as_blocks: see :mod:`oled_sim.trace.reblock`.
        stands_for: see the protocol, as for the rest.
        overwrite: replace a trace that is there.
        on_progress: takes the share done. on_note: takes sentences.

    Raises:
        TraceError: malformed; names file, array, token and layer.
        UsageError: ``out`` is not free, or blocks were asked for and passes are none of one token.
    """
    file = _ArrayFile(source, prompt_tokens, experts, first_layer, model)
    target = Target(out, stands_for, overwrite, on_progress, on_note, as_blocks)

    def facts() -> Facts:
        return file.facts

    manifest = import_recorded(source, file.read, facts, target)
    if file.without_prompt:
        requests = counted(file.without_prompt, "request")
        on_note(
            f"the file does not say where the prompt of {requests} ends: all of their tokens count"
            " as decoded (--prompt-tokens N)"
        )
    return manifest


class _ArrayFile:
    """An array file and what was said about it."""

    def __init__(
        self,
        path: Path,
        prompt_tokens: int | None,
        experts: int | None,
        first_layer: int | None,
        model: str | None,
    ) -> None:
        self.path = path
        self.prompt_tokens = prompt_tokens
        self.arrays: Arrays = open_arrays(path)
        if not 0 <= (first_layer or 0) <= MOST_LAYER:
            raise UsageError(f"first_layer is {first_layer}: give 0 to {MOST_LAYER}")
        self.requests = _requests(self.arrays, path)
        self.without_prompt = 0
        found = _manifest(self.arrays, path)
        self.layers = self._layer_indices(first_layer, found)
        self.facts = Facts(
            model=model or "unknown",
            experts=experts if found is None else found.model.experts,
            manifest=found,
        )

    def read(self, on_progress: Callable[[float], None], cleaning: Cleaning) -> Iterator[Recorded]:
        """Yield the requests; only one is in memory."""
        self.without_prompt = 0
        for done, (number, prefix) in enumerate(self.requests.items(), 1):
            yield cleaning.clean(self._request(number, prefix))
            on_progress(done / len(self.requests))

    def _request(self, number: int, prefix: str) -> Recorded:
        parts = {name: self._ids(prefix + name) for name in (PROMPT, GENERATED)}
        held = {name: ids for name, ids in parts.items() if ids is not None}
        ids = _join(list(held.values()), self.path, prefix)
        gates = self._weights(prefix, held)
        tokens, layers, k = ids.shape
        indices = self.layers(layers)
        step, position, about = self._course(prefix, tokens, held)
        lengths = {name: len(part) for name, part in held.items()}

        def where(token: int, layer: int) -> str:
            """A token is counted from the start of its own array."""
            name = PROMPT if token < lengths.get(PROMPT, 0) else GENERATED
            within = token if name == PROMPT else token - lengths.get(PROMPT, 0)
            return f"array {prefix + name!r}, token {within}, layer {layer}"

        token = np.repeat(np.arange(tokens), layers)
        return Recorded(
            number=number,
            step=step,
            position=position,
            token=token,
            layer=np.tile(indices, tokens),
            experts=signed_ids(ids.reshape(-1, k)),
            gates=None if gates is None else gates.reshape(-1, k),
            place=token,
            source=self.path,
            where=where,
            about=about,
        )

    def _ids(self, name: str) -> NDArray[Any] | None:
        if name not in self.arrays:
            return None
        ids = self.arrays[name]()
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
            raise TraceError(
                f"{self.path}: array {name!r} is {ids.dtype} of shape {list(ids.shape)}, expected"
                " integers of shape [tokens, layers, k]"
            )
        return ids

    def _weights(self, prefix: str, held: dict[str, NDArray[Any]]) -> NDArray[Any] | None:
        found = []
        for name, ids in held.items():
            weights = prefix + WEIGHTS[name]
            if weights not in self.arrays:
                return None
            values = self.arrays[weights]()
            if values.shape != ids.shape or values.dtype.kind != "f":
                raise TraceError(
                    f"{self.path}: array {weights!r} is {values.dtype} of shape"
                    f" {list(values.shape)}, expected floats of shape {list(ids.shape)}"
                )
            found.append(values)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _course(
        self, prefix: str, tokens: int, held: dict[str, NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return step and position of every token, and what else is known of it."""
        about = {n: self._of_tokens(prefix + n, tokens) for n in (*COURSE, *TOKEN_DTYPES)}
        told = {name: values for name, values in about.items() if values is not None}
        position = told.pop("position", None)
        position = np.arange(tokens) if position is None else position.astype(np.int64)
        step = told.pop("step", None)
        if step is None:
            step = autoregressive(position, self._prompt_tokens(prefix, held))
        step = step.astype(np.int64)
        late = (np.diff(step) < 0) | ((np.diff(step) == 0) & (np.diff(position) <= 0))
        if late.any():
            raise TraceError(
                f"{self.path}: request {prefix or '0'}: token {int(np.argmax(late)) + 1} comes"
                " before the one ahead of it, by step or position"
            )
        return step, position, told

    def _of_tokens(self, name: str, tokens: int) -> NDArray[Any] | None:
        if name not in self.arrays:
            return None
        values = self.arrays[name]()
        if values.shape != (tokens,):
            raise TraceError(
                f"{self.path}: array {name!r} has shape {list(values.shape)}, expected [{tokens}]"
            )
        dtype = np.dtype(TOKEN_DTYPES.get(name.rpartition("/")[2], np.int32))
        if dtype.kind == "f":
            return numbers(values, self._called(name))
        return whole_numbers(values, self._called(name), dtype)

    def _prompt_tokens(self, prefix: str, held: dict[str, NDArray[Any]]) -> int:
        if PROMPT in held:
            return len(held[PROMPT])
        if prefix + "prompt_tokens" in self.arrays:
            name = prefix + "prompt_tokens"
            return number_within(self.arrays[name](), self._called(name), len(held[GENERATED]))
        self.without_prompt += self.prompt_tokens is None
        return self.prompt_tokens or 0

    def _called(self, name: str) -> str:
        return f"{self.path}: array {name!r}"

    def _layer_indices(
        self, first_layer: int | None, found: Manifest | None
    ) -> Callable[[int], NDArray[np.int32]]:
        told = None
        if LAYERS_ARRAY in self.arrays:
            told = whole_numbers(self.arrays[LAYERS_ARRAY](), self._called(LAYERS_ARRAY), np.int32)
        if found is not None:
            told = np.array(found.model.layers)

        def indices(layers: int) -> NDArray[np.int32]:
            if told is None:
                return (np.arange(layers) + (first_layer or 0)).astype(np.int32)
            if told.shape != (layers,):
                raise TraceError(
                    f"{self.path}: {told.size} layers are named, the arrays hold {layers}"
                )
            return told.astype(np.int32, copy=False)

        return indices


def _manifest(arrays: Arrays, path: Path) -> Manifest | None:
    if MANIFEST_ARRAY not in arrays:
        return None
    return decode_manifest(arrays[MANIFEST_ARRAY]().tobytes(), f"{path}, array 'manifest'")


def _requests(arrays: Arrays, path: Path) -> dict[int, str]:
    """Return the prefix of every request's arrays, by ascending number."""
    prefixes = list(
        dict.fromkeys(
            name.removesuffix(name.rpartition("/")[2])
            for name in arrays
            if name.rpartition("/")[2] in (PROMPT, GENERATED)
        )
    )
    if not prefixes:
        raise TraceError(
            f"{path} holds no array {GENERATED!r} or {PROMPT!r}, alone or as REQUEST/{GENERATED}:"
            f" it holds {_few(list(arrays))}"
        )
    numbers = [prefix.removesuffix("/").rpartition("/")[2] for prefix in prefixes]
    if all(n.isascii() and n.isdigit() for n in numbers) and len(set(map(int, numbers))) == len(
        numbers
    ):
        return dict(sorted(zip(map(int, numbers), prefixes, strict=True)))
    return dict(enumerate(prefixes))


def _few(names: list[str]) -> str:
    """Return some names for a sentence."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more if names else "none"


def _join(parts: list[NDArray[Any]], path: Path, prefix: str) -> NDArray[Any]:
    """Return prompt and generated tokens as one array."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].shape[1:] != parts[1].shape[1:]:
        raise TraceError(
            f"{path}: {prefix + PROMPT!r} has shape {list(parts[0].shape)} and"
            f" {prefix + GENERATED!r} {list(parts[1].shape)}: layers or k differ"
        )
    return np.concatenate(parts)
