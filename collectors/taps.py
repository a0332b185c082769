"""Reading what the gates of a live model return, without slowing the model down.

A hook only keeps references: it launches nothing and copies nothing while the model runs. Once a
pass is over, the kept tensors of all layers are stacked on the device and one asynchronous copy
per signal leaves for pinned host memory; whoever writes the trace waits for it, later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from oled_sim.errors import TraceError

GATE_CLASS = "LLaDA2MoeGate"

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Site(NamedTuple):
    """A module to watch, and the model's own index of its layer."""

    layer: int
    module: nn.Module


def class_names(model: nn.Module) -> frozenset[str]:
    """Return the class names of a model and of all its modules."""
    return frozenset(type(module).__name__ for module in model.modules())


def find_sites(model: nn.Module, names: Collection[str]) -> list[Site]:
    """Return the modules whose class has one of ``names``, by layer.

    The layer is read from the module's path (``layers.7.mlp.gate``); without such a path, modules
    are numbered as they come.
    """
    return sorted(_sites(model, names), key=lambda site: site.layer)


def _sites(model: nn.Module, names: Collection[str]) -> Iterator[Site]:
    found = 0
    for path, module in model.named_modules():
        if type(module).__name__ in names:
            layer = _LAYER.search(path)
            yield Site(int(layer[1]) if layer else found, module)
            found += 1


class Routing(NamedTuple):
    """What the gates of one pass chose; one entry per MoE layer, ascending.

    ``experts`` integer [N, k]; ``weights`` float [N, k]; ``logits`` float [N, E] and ``inputs``
    [N, H], each None unless asked for. N tokens.
    """

    experts: list[Tensor]
    weights: list[Tensor]
    logits: list[Tensor] | None = None
    inputs: list[Tensor] | None = None


class Call(NamedTuple):
    """One call of a watched module or function: its positional arguments, what it returned."""

    given: tuple[Any, ...]
    returned: Any


class _Calls:
    """Calls of one pass, one by every watched place, ascending by layer."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._seen: list[tuple[int, Call]] = []

    def forget(self) -> None:
        """Drop what was seen since the last call of :meth:`take`."""
        self._seen = []

    def take(self) -> list[Call]:
        """Return the calls since the last one, by layer, and forget them.

        Raises:
            TraceError: not exactly one call per gate, in the order of layers. Hooks are bypassed
                when a CUDA graph replays or when a fused kernel replaces the gate; a trace would
                then be empty or lack layers.
        """
        seen, self._seen = self._seen, []
        if len(seen) != len(self.layers):
            raise TraceError(
                f"a pass called {len(seen)} of {len(self.layers)} gates: the model bypasses them"
                " (CUDA graph or fused routing), so nothing can be recorded; turn that off"
            )
        for place, (called, _) in enumerate(seen):
            if place != called:
                layer = self.layers[called]
                raise TraceError(f"a pass called the gate of layer {layer} out of order, or twice")
        return [call for _, call in seen]


class Tap(_Calls):
    """Forward hooks on the gates of a model.

    Use as a context manager: hooks are removed on exit, also when an exception leaves the block.
    """

    def __init__(self, sites: list[Site]) -> None:
        super().__init__([site.layer for site in sites])
        self._modules = [site.module for site in sites]
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [
            module.register_forward_hook(partial(self._keep, place))
            for place, module in enumerate(self._modules)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], []

    def _keep(self, place: int, _module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._seen.append((place, Call(args, output)))


class FunctionTap(_Calls):
    """Wrappers around routing functions that runtimes keep as attributes; a context manager.

    Args:
        places: of each layer, its index and the attributes (owner, name) that may hold the
            function. Those that are there are wrapped; one that calls another counts once.
    """

    def __init__(self, places: Sequence[tuple[int, Sequence[tuple[Any, str]]]]) -> None:
        super().__init__([layer for layer, _ in places])
        self._places = [attributes for _, attributes in places]
        self._patches = ExitStack()
        self._inside = False

    def __enter__(self) -> Self:
        for place, attributes in enumerate(self._places):
            for owner, name in attributes:
                function = getattr(owner, name, None)
                if callable(function):
                    self._patches.enter_context(Patch(owner, name, self._wrap(place, function)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        self._seen = []

    def _wrap(self, place: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            outermost, self._inside = not self._inside, True
            try:
                returned = function(*args, **kwargs)
            finally:
                self._inside = not outermost
            if outermost:
                self._seen.append((place, Call((*args, *kwargs.values()), returned)))
            return returned

        return wrapper


class Patch:
    """Puts a function in the place of an attribute of an object; a context manager."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement

    def __enter__(self) -> None:
        own = vars(self._owner)
        self._had, self._before = self._name in own, own.get(self._name)
        setattr(self._owner, self._name, self._replacement)

    def __exit__(self, *_: object) -> None:
        if self._had:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


class GateTap(Tap):
    """A tap on gates that return ``(topk_idx, topk_weight, logits)``, as LLaDA2's do.

    Args:
        model: any model that holds them.
        logits: keep the logits too. inputs: keep the gates' inputs too.
        name: class name of the gates.

    Raises:
        TraceError: the model has no such module.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        logits: bool = False,
        inputs: bool = False,
        name: str = GATE_CLASS,
    ) -> None:
        sites = find_sites(model, (name,))
        if not sites:
            raise TraceError(f"the model has no module of class {name}: it is no LLaDA2 MoE model")
        super().__init__(sites)
        self._logits, self._inputs = logits, inputs

    def routing(self) -> Routing:
        """Return what the gates chose since the last call; see :meth:`take`."""
        calls = self.take()
        return Routing(
            experts=[call.returned[0] for call in calls],
            weights=[call.returned[1] for call in calls],
            logits=[call.returned[2] for call in calls] if self._logits else None,
            inputs=[flat(call.given[0]) for call in calls] if self._inputs else None,
        )


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor [..., H] as [N, H]."""
    return tensor.reshape(-1, tensor.shape[-1])


class EmbeddingTap:
    """A hook on a token embedding; :meth:`take` returns its last output as [N, H]."""

    def __init__(self, embedding: nn.Module) -> None:
        self._module = embedding
        self._last: Tensor | None = None

    def __enter__(self) -> EmbeddingTap:
        self._handle = self._module.register_forward_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        self._last = None

    def _keep(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self._last = output

    def take(self) -> Tensor:
        """Return the last output and forget it.

        Raises:
            TraceError: the embedding was not called.
        """
        last, self._last = self._last, None
        if last is None:
            raise TraceError("a pass did not call the token embedding: record without `embedding`")
        return flat(last)


class HostCopy:
    """Tensors on their way to host memory; :meth:`wait` returns them as numpy arrays.

    On a CPU nothing is copied: what is handed over must not be written to afterwards.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._host = {name: _to_host(t) for name, t in tensors.items()}
        # A model may lie on several devices, none of which need be the current one.
        devices = {t.device for t in tensors.values() if t.is_cuda}
        self._done = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait(self) -> dict[str, Any]:
        """Wait for the copies and return numpy arrays."""
        for event in self._done:
            event.synchronize()
        return {name: t.numpy() for name, t in self._host.items()}


def _to_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()  # the caller's loop may run without torch.no_grad()
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_uint(ids: Tensor, experts: int) -> Tensor:
    """Narrow expert ids for the copy: uint8 up to 256 experts, else int32."""
    return ids.to(torch.uint8 if experts <= 256 else torch.int32)
