"""Recording LLaDA2.0 and 2.1 under transformers, with the remote code as published.

Follows ``modeling_llada2_moe.py`` of the LLaDA2.0 and 2.1 checkpoints. Its ``generate`` calls
``self.forward`` and not the module, so hooks on the model itself never run; ``model.model`` and
``lm_head`` are called as modules. It keeps no KV cache: every pass runs the whole window again,
and all but the last block of it is dropped here. It writes accepted tokens into the very tensor
that it gives to the next pass, so each pass's input is copied before it runs.

Remote code is run by whoever loads the model (``trust_remote_code=True``), never by this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from oled_sim.errors import TraceError, UsageError
from oled_sim.recording import Recorder, Wishes
from oled_sim.trace.manifest import Decode, Manifest

from .block_run import BlockRun, Check
from .canvas import CanvasRules
from .live import (
    arguments,
    check_geometry,
    check_layers,
    check_routing,
    describe_model,
    describe_run,
    input_ids,
    prompt_ids,
    whole_number,
)
from .reduction import Reducer, checked_signals, stack
from .taps import EmbeddingTap, GateTap, HostCopy, Patch, class_names

MASK_ID, EOS_ID = 156895, 156892
"""Of the published checkpoints, where neither the call nor the configuration says another."""


class HfCollector:
    """Follows ``model.generate`` of LLaDA2's remote code; every call becomes a request.

    Args:
        model: a ``LLaDA2MoeModelLM`` in evaluation mode, on any device.
        recorder: takes the requests.
        wishes: what to record besides.

    Raises:
        UsageError: an unknown signal or geometry.
        TraceError: gates are missing.
    """

    def __init__(self, model: Any, recorder: Recorder, wishes: Wishes) -> None:
        self.signals = checked_signals(wishes.signals)
        check_geometry(wishes)
        self.model = model
        self.config = model.config
        self._recorder = recorder
        self._wishes = wishes
        self._gates = GateTap(
            model, logits="full_gate" in self.signals, inputs="cosines" in self.signals
        )
        self._embedding = EmbeddingTap(model.model.word_embeddings)
        expected = range(self.config.first_k_dense_replace, self.config.num_hidden_layers)
        check_layers(self._gates.layers, expected, "LLaDA2MoeGate")
        self._run: BlockRun | None = None
        self._hooks = ExitStack()

    @staticmethod
    def knows(model: Any) -> bool:
        """Whether ``model`` is LLaDA2 with the published ``generate``."""
        if not isinstance(model, nn.Module):
            return False
        if not {"LLaDA2MoeModel", "LLaDA2MoeGate"} <= class_names(model):
            return False
        generate: Any = getattr(model, "generate", None)
        wanted = {"inputs", "gen_length", "block_length"}
        return callable(generate) and wanted <= set(signature(generate).parameters)

    def __enter__(self) -> None:
        with ExitStack() as hooks:  # a hook that cannot be set leaves none behind
            hooks.enter_context(self._gates)
            if "embedding" in self.signals:
                hooks.enter_context(self._embedding)
            inner, head = self.model.model, self.model.lm_head
            before = inner.register_forward_pre_hook(self._before_pass, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(head.register_forward_hook(self._after_pass).remove)
            hooks.enter_context(Patch(self.model, "generate", self._following(self.model.generate)))
            self._hooks = hooks.pop_all()

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._run = None

    def request(self, prompt: Any, **about: Any) -> Any:
        """Refuse: ``generate`` marks its requests itself."""
        raise UsageError("model.generate marks the requests of this model: call it as it is")

    def _following(self, generate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def follow(*args: Any, **kwargs: Any) -> Tensor:
            call = arguments(generate, args, kwargs)
            with self._call(call) as run:
                output = generate(*args, **kwargs)
                eos_id = _id_of(call, self.config, "eos", EOS_ID)
                run.finish(check=_check(output, eos_id, self._recorder.note))
            return output

        return follow

    @contextmanager
    def _call(self, call: dict[str, Any]) -> Iterator[BlockRun]:
        prompt = prompt_ids(call["inputs"])
        limit = whole_number("gen_length", call["gen_length"], 1)
        rules = CanvasRules(
            prompt_tokens=len(prompt),
            mask_id=_id_of(call, self.config, "mask", MASK_ID),
            block_length=whole_number("block_length", call["block_length"], 1),
            redact=self._wishes.redact,
        )
        with self._recorder.one_request():
            self._run = BlockRun(
                self._recorder.begin(self._manifest(call)),
                rules,
                Reducer(self.config.num_experts, scaling=self.config.routed_scaling_factor),
                limit=limit,
                eos_id=_id_of(call, self.config, "eos", EOS_ID),
            )
            try:
                yield self._run
            finally:
                self._run = None

    def _manifest(self, call: dict[str, Any]) -> Manifest:
        described = describe_model(self.model, self._gates.layers, self._wishes.name)
        return describe_run(self.model, described, _decode(call), self._wishes, name="hf")

    def _before_pass(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._gates.forget()
        if self._run is None:
            self._recorder.note("passes outside model.generate were left out")
        else:
            self._run.before(input_ids(args, kwargs))

    def _after_pass(self, _head: nn.Module, _args: Any, logits: Tensor) -> None:
        run = self._run
        if run is None:
            self._gates.forget()
            return
        routing = self._gates.routing()
        check_routing(
            routing.experts, run.window, self.config.num_experts_per_tok, self._gates.layers
        )
        embedding = self._embedding.take() if "embedding" in self.signals else None
        part = run.reducer(
            stack(routing).rows(run.rows),
            None if embedding is None else embedding[run.rows],
            run.block_length,
        )
        run.after(logits[0], part)


def _check(output: Tensor, eos_id: int, note: Callable[[str], None]) -> Check:
    """Return a check that ``generate`` returned what its passes left in their input.

    2.0 cuts at the first end of sequence, and returns the prompt too where it stops early; 2.1
    without ``eos_early_stop`` goes on to the end and cuts nothing.
    """
    returned = HostCopy({"output": output[0].int()})

    def check(tokens: NDArray[np.int64]) -> None:
        found, left = returned.wait()["output"].tolist(), tokens.tolist()
        first = left.index(eos_id) + 1 if eos_id in left else len(left)
        whole = found == left[: len(found)]
        if not whole and found[-first:] != left[:first]:
            raise TraceError(
                "generate returned other tokens than its passes left in their input: it works on"
                " a copy, so acceptance cannot be followed"
            )
        if whole and first < len(found):
            note(
                "generation went on after an end of sequence (eos_early_stop is off): those passes"
                " are in the trace, their tokens are not counted"
            )

    return check


def _id_of(call: dict[str, Any], config: Any, token: str, default: int) -> int:
    """Return the id of a special token: of the call, else of the model, else as published."""
    for value in (call.get(f"{token}_id"), getattr(config, f"{token}_token_id", None)):
        if value is not None:
            return int(value)
    return default


def _decode(call: dict[str, Any]) -> Decode:
    editing = call.get("editing_threshold") is not None
    return Decode(
        rule="2.1" if editing else "2.0",
        block_length=int(call["block_length"]),
        threshold=float(call["threshold"]),
        steps=None if editing else int(call["steps"]),
        editing_threshold=float(call["editing_threshold"]) if editing else None,
        max_post_steps=int(call["max_post_steps"]) if editing else None,
        temperature=float(call.get("temperature") or 0.0),
        max_new_tokens=int(call["gen_length"]),
    )
