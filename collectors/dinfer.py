"""Recording LLaDA2 under dInfer: the object that holds model and decoder, in one process.

Follows dInfer's ``BlockDiffusionLLM`` and ``BlockDiffusionLLMAttnmask`` (``decoding/
generate_uniform.py``, revisions fce4e32 and b813f32) with either backend. Its vLLM model never
calls ``gate.forward``: vLLM's fused layer calls a routing function that returns (weights, ids),
the reverse of the published order. Its SGLang model routes in a ``TopK`` module. The decoder's
``decode(logits, start, end, x)`` is followed for the canvas ``x``, since passes are given copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from oled_sim.errors import TraceError, UsageError
from oled_sim.recording import Recorder, Wishes
from oled_sim.trace.manifest import Decode, Manifest

from .block_run import BlockRun
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
from .taps import Call, FunctionTap, Patch, Routing, Site, Tap, class_names, find_sites, flat

VLLM_BLOCK = "LLaDA2MoeSparseMoeBlock"
SGLANG_BLOCK = "LLaDA2SparseMoeBlock"


class DinferCollector:
    """Follows ``generate`` of a dInfer object; every call with one prompt becomes a request.

    Args:
        model: what ``generate`` is called on, with ``model`` and ``decoder``.
        recorder: takes the requests.
        wishes: what to record besides.

    Raises:
        UsageError: an unknown signal or geometry, or the signal ``embedding``.
        TraceError: layers are missing.
    """

    def __init__(self, model: Any, recorder: Recorder, wishes: Wishes) -> None:
        self.signals = checked_signals(wishes.signals)
        if "embedding" in self.signals:
            raise UsageError("the signal 'embedding' cannot be recorded under dInfer")
        check_geometry(wishes)
        self.engine = model
        self.model = model.model
        self.config = self.model.config
        self._recorder = recorder
        self._wishes = wishes
        self._routers = _routers(self.model)
        expected = range(self.config.first_k_dense_replace, self.config.num_hidden_layers)
        check_layers(self._routers.layers, expected, "router")
        self._run: BlockRun | None = None
        self._canvas: Tensor | None = None
        self._hooks = ExitStack()

    @staticmethod
    def knows(model: Any) -> bool:
        """Whether ``model`` is an engine of dInfer around a LLaDA2."""
        inner = getattr(model, "model", None)
        if not isinstance(inner, nn.Module) or not hasattr(model, "decoder"):
            return False
        return bool(class_names(inner) & {VLLM_BLOCK, SGLANG_BLOCK})

    def __enter__(self) -> None:
        engine = self.engine
        with ExitStack() as hooks:  # a hook that cannot be set leaves none behind
            hooks.enter_context(self._routers)
            before = self.model.register_forward_pre_hook(self._before_pass, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(self.model.register_forward_hook(self._after_pass).remove)
            decode = engine.decoder.decode
            hooks.enter_context(Patch(engine.decoder, "decode", self._following_decode(decode)))
            hooks.enter_context(Patch(engine, "generate", self._following(engine.generate)))
            self._hooks = hooks.pop_all()

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._run = self._canvas = None

    def request(self, prompt: Any, **about: Any) -> AbstractContextManager[Any]:
        """Refuse: ``generate`` marks its requests itself."""
        raise UsageError("generate marks the requests of dInfer: call it as it is")

    def _following(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def follow(*args: Any, **kwargs: Any) -> Any:
            with self._call(arguments(generate, args, kwargs)) as run:
                output = generate(*args, **kwargs)
                if self._canvas is None:
                    raise TraceError(
                        "generate never called decoder.decode: acceptance cannot be followed"
                    )
                run.finish(self._canvas)
            return output

        return follow

    def _following_decode(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        def follow(logits: Tensor, start: int, end: int, x: Any, *args: Any, **kwargs: Any) -> Any:
            result = decode(logits, start, end, x, *args, **kwargs)
            self._canvas = x.data[0]  # of a TokenArray, or of a tensor
            return result

        return follow

    @contextmanager
    def _call(self, call: dict[str, Any]) -> Iterator[BlockRun]:
        prompt = prompt_ids(call["prompt"])
        decoder = self.engine.decoder
        limit = whole_number("gen_length", call["gen_length"], 1)
        rules = CanvasRules(
            prompt_tokens=len(prompt),
            mask_id=decoder.mask_id,
            block_length=whole_number("block_length", call["block_length"], 1),
            redact=self._wishes.redact,
            unrolled=True,
        )
        self._canvas = None
        with self._recorder.one_request():
            self._run = BlockRun(
                self._recorder.begin(self._manifest(call)),
                rules,
                Reducer(self.config.num_experts),
                limit=limit,
                eos_id=decoder.eos_id,
                note=self._recorder.note,
            )
            try:
                yield self._run
            finally:
                self._run = None

    def _manifest(self, call: dict[str, Any]) -> Manifest:
        decoder = self.engine.decoder
        decode = Decode(
            rule="2.0",
            block_length=int(call["block_length"]),
            threshold=getattr(decoder, "threshold", None),
            temperature=float(getattr(decoder, "temperature", 0.0) or 0.0),
            max_new_tokens=int(call["gen_length"]),
        )
        described = describe_model(self.model, self._routers.layers, self._wishes.name)
        return describe_run(self.model, described, decode, self._wishes, name="dinfer")

    def _before_pass(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._routers.forget()
        if self._run is None:
            self._recorder.note("passes outside generate were left out")
            return
        positions = kwargs.get("position_ids")
        first = 0 if positions is None else positions.reshape(-1)[0]
        cached = kwargs.get("past_key_values") is not None
        self._run.before(input_ids(args, kwargs), first, cached=cached)

    def _after_pass(self, _module: nn.Module, _args: Any, output: Any) -> None:
        run = self._run
        if run is None:
            self._routers.forget()
            return
        routing = self._routing(self._routers.take())
        layers, top_k = self._routers.layers, self.config.num_experts_per_tok
        check_routing(routing.experts, run.window, top_k, layers)
        part = run.reducer(stack(routing).rows(run.rows), block=run.block_length)
        run.after(output.logits[0], part)

    def _routing(self, calls: list[Call]) -> Routing:
        chosen = [_choice(call.returned) for call in calls]
        return Routing(
            experts=[ids for _, ids in chosen],
            weights=[w.float() / w.float().sum(-1, keepdim=True) for w, _ in chosen],
            logits=[self._logits(call) for call in calls] if "full_gate" in self.signals else None,
            inputs=[flat(call.given[0]) for call in calls] if "cosines" in self.signals else None,
        )

    def _logits(self, call: Call) -> Tensor:
        """Return what the routing function was given besides hidden states: logits [N, E]."""
        for given in call.given[1:]:
            if isinstance(given, Tensor) and given.shape[-1] == self.config.num_experts:
                return flat(given)
        raise TraceError("the routing function is given no logits: record without `full_gate`")


def _choice(returned: Any) -> tuple[Tensor, Tensor]:
    """Return weights and ids, told apart by dtype, of a tuple or of SGLang's named one."""
    first, second = returned[0], returned[1]
    return (first, second) if first.dtype.is_floating_point else (second, first)


def _routers(model: nn.Module) -> Tap | FunctionTap:
    """Return a tap on whatever routes: SGLang's module, or the function given to vLLM."""
    if blocks := find_sites(model, (SGLANG_BLOCK,)):
        return Tap([Site(layer, block.get_submodule("topk")) for layer, block in blocks])
    return FunctionTap(
        [
            (layer, [(block.get_submodule("gate"), "routing"),
                     (block.get_submodule("experts"), "custom_routing_function")])
            for layer, block in find_sites(model, (VLLM_BLOCK,))
        ]
    )  # fmt: skip
