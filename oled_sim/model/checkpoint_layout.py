"""Names of files and tensors in a published LLaDA2 checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from oled_sim.model.llada2 import LLaDA2MoeModelLM

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_PREFIXES = (("model.language_model.", "model."), ("model.lm_head.", "lm_head."))


def published_tensors(model: LLaDA2MoeModelLM) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of ``model`` under its published name, experts one by one.

    Tensors are views (also on the ``meta`` device); a tied head is left out.
    """
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            yield from pieces(name, tensor)


def pieces(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of the model as published: stacked experts one by one, others whole."""
    stem, is_stacked, projection = name.partition(".mlp.experts.")
    if not is_stacked:
        yield name, tensor
        return
    for expert, weight in enumerate(tensor.unbind(0)):
        yield f"{stem}.mlp.experts.{expert}.{projection}.weight", weight


def canonical(name: str) -> str:
    """Return a stored tensor's name without the prefixes that some runtimes add."""
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return name
