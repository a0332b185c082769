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

from torch import Tensor, nn

from oled_sim.errors import TraceError, UsageError
from oled_sim.recording import Recorder, Wishes
from oled_sim.trace.background import BackgroundRequest
from oled_sim.trace.manifest import Decode, Manifest

from .canvas import Canvas, CanvasRules, Seen
from .live import (
    Patch,
    arguments,
    check_geometry,
    check_layers,
    check_routing,
    describe_model,
    describe_run,
    input_ids,
    prompt_ids,
)
from .reduction import Reducer, checked_signals, confidence, stack
from .taps import EmbeddingTap, GateTap, HostCopy, class_names

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
        self._run: _Run | None = None
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
        hooks = self._hooks
        hooks.enter_context(self._gates)
        if "embedding" in self.signals:
            hooks.enter_context(self._embedding)
        inner, head = self.model.model, self.model.lm_head
        before = inner.register_forward_pre_hook(self._before_pass, with_kwargs=True)
        hooks.callback(before.remove)
        hooks.callback(head.register_forward_hook(self._after_pass).remove)
        hooks.enter_context(Patch(self.model, "generate", self._following(self.model.generate)))

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._run = None

    def request(self, prompt: Any, **about: Any) -> Any:
        """Refuse: ``generate`` marks its requests itself."""
        raise UsageError("model.generate marks the requests of this model: call it as it is")

    def _following(self, generate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def follow(*args: Any, **kwargs: Any) -> Tensor:
            call = arguments(generate, args, kwargs)
            with self._following_call(call) as run:
                output = generate(*args, **kwargs)
                run.finish(output)
            return output

        return follow

    @contextmanager
    def _following_call(self, call: dict[str, Any]) -> Iterator[_Run]:
        prompt = prompt_ids(call["inputs"])
        target = self._recorder.begin(self._manifest(call))
        self._run = _Run(target, call, prompt, self._wishes.redact, self._new_reducer())
        try:
            yield self._run
            self._recorder.finished()
        except BaseException:
            self._recorder.note("a generation that failed was left out")
            raise
        finally:
            self._run = None

    def _new_reducer(self) -> Reducer:
        return Reducer(self.config.num_experts, scaling=self.config.routed_scaling_factor)

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
        rows = slice(run.start, run.window)
        part = run.reducer(
            stack(routing).rows(rows),
            None if embedding is None else embedding[rows],
            run.block_length,
        )
        run.after(logits[0, -run.block_length :], part)


class _Run:
    """One call of ``generate``: its passes on their way to the trace.

    Attributes:
        window: tokens of the pass at work. start: the first of them that counts.
    """

    def __init__(
        self,
        target: BackgroundRequest,
        call: dict[str, Any],
        prompt: Tensor,
        redact: bool,
        reducer: Reducer,
    ) -> None:
        self.block_length = int(call["block_length"])
        self.reducer = reducer
        self.window = self.start = 0
        self._target = target
        self._mask_id = _id_of(call, "mask_id", MASK_ID)
        self._eos_id = _id_of(call, "eos_id", EOS_ID)
        self._limit = int(call["gen_length"])
        rules = CanvasRules(len(prompt), self._mask_id, self.block_length, redact)
        self._prompt_tokens = len(prompt)
        self._canvas: Canvas | None = None
        self._rules = rules
        self._held: Tensor | None = None
        self._ids: Tensor | None = None
        self._passes = 0

    def before(self, ids: Tensor) -> None:
        """Take the input of a pass, int [1, W]; the generator will write over it."""
        if len(ids) != 1:
            raise TraceError(f"a pass over {len(ids)} rows: LLaDA2's generate runs one request")
        self.window = ids.shape[1]
        self.start = 0 if self._passes == 0 else self.window - self.block_length
        self._held = ids
        self._ids = ids[0].clone()

    def after(self, logits: Tensor, part: dict[str, Tensor]) -> None:
        """Take what a pass returned: logits [L, V] of the block, and its reduced routing."""
        ids = self._ids
        if ids is None:
            raise TraceError("lm_head ran before the model: its logits belong to no pass")
        self._ids = None
        self._passes += 1
        part["confidence"] = confidence(logits, ids[-len(logits) :], self._mask_id)
        part["ids"] = ids.int()
        copies, start = HostCopy(part), self.start

        def add(request: Any) -> None:
            if self._canvas is None:
                self._canvas = Canvas(request, self._rules)
            arrays = copies.wait()
            ids, sure = arrays.pop("ids"), arrays.pop("confidence")
            self._canvas.add(Seen(ids, 0, start, sure, arrays))

        self._target.put(add)

    def finish(self, output: Tensor) -> None:
        """Take what ``generate`` returned, and the canvas it left behind."""
        if self._held is None:
            raise TraceError("generate ran no pass through the model: nothing can be recorded")
        copies = HostCopy({"ids": self._held[0].int(), "output": output[0].int()})
        self._held = None

        def finish(request: Any) -> None:
            assert self._canvas is not None  # a pass came before
            arrays = copies.wait()
            self._canvas.show(arrays["ids"], 0)
            self._canvas.finish()
            tokens = self._canvas.generated(self._limit, self._eos_id)
            if arrays["output"][-len(tokens) :].tolist() != tokens.tolist():
                raise TraceError(
                    "generate returned other tokens than its passes left in their input: it works"
                    " on a copy, so acceptance cannot be followed"
                )
            request.finish(
                prompt_tokens=self._prompt_tokens,
                output_tokens=len(tokens),
                finish_reason="eos" if self._eos_id in tokens else "length",
            )

        self._target.put(finish)


def _id_of(call: dict[str, Any], name: str, default: int) -> int:
    value = call.get(name)
    return default if value is None else int(value)


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
