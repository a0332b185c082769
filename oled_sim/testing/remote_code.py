"""LLaDA2 as its published remote code presents it to hooks; names and call paths alone.

Layers are those of a native model, so that collectors can be held against each other, and so that
what recording costs can be measured at full size. What matters is kept: ``generate`` calls
``self.forward``, the inner model and the head are called as modules, there is no KV cache, and
accepted tokens are written into the tensor that the next pass is given. Unlike the published code
a most likely token is never the mask, and temperature 0 is greedy under 2.0 too.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from oled_sim.model.attention import BlockCausalAttention
from oled_sim.model.llada2 import LLaDA2MoeModel as NativeModel
from oled_sim.model.llada2 import LLaDA2MoeModelLM as NativeModelLM

MASK_ID, EOS_ID = 156895, 156892


class LLaDA2MoeModel(nn.Module):
    """The inner model; ``attention_mask`` is the block length, which the real one's mask says."""

    def __init__(self, native: NativeModel) -> None:
        super().__init__()
        self.word_embeddings = native.word_embeddings
        self.layers = native.layers
        self.norm = native.norm
        self.rotary_emb = native.rotary_emb

    def forward(
        self, input_ids: Tensor, attention_mask: int, position_ids: Tensor
    ) -> tuple[Tensor]:
        """Return hidden states [1, W, H] of a window [1, W]."""
        hidden = self.word_embeddings(input_ids)
        rotary = self.rotary_emb(position_ids, hidden.dtype)
        attention = BlockCausalAttention(attention_mask, [input_ids.shape[1]])
        for layer in self.layers:
            hidden = layer(hidden, rotary, attention)
        return (self.norm(hidden),)


class LLaDA2MoeModelLM(nn.Module):
    """What both versions share."""

    def __init__(self, native: NativeModelLM) -> None:
        super().__init__()
        names = native.config.__struct_fields__
        self.config = SimpleNamespace(**{name: getattr(native.config, name) for name in names})
        self.model = LLaDA2MoeModel(native.model)
        self.lm_head = native.lm_head

    def forward(
        self, input_ids: Tensor, attention_mask: int, position_ids: Tensor
    ) -> SimpleNamespace:
        """Return ``logits`` fp32 [1, W, V]."""
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
        )
        return SimpleNamespace(logits=self.lm_head(outputs[0]).float())

    def _predict(self, window: Tensor, block: int, mask_id: int) -> tuple[Tensor, Tensor]:
        """Return the most likely token of each position of the block, and its probability."""
        positions = torch.arange(window.shape[1], device=window.device).unsqueeze(0)
        logits = self.forward(window, attention_mask=block, position_ids=positions).logits
        probability = logits[0, -block:].softmax(-1)
        probability[:, mask_id] = 0
        sure, token = probability.max(-1)
        return token, sure

    def _canvas(self, inputs: Tensor, gen_length: int, block: int, mask_id: int) -> Tensor:
        blocks = -(-(inputs.shape[1] + gen_length) // block)
        device = self.lm_head.weight.device
        x = torch.full((1, blocks * block), mask_id, device=device)
        x[:, : inputs.shape[1]] = inputs
        return x


class LLaDA20(LLaDA2MoeModelLM):
    """The quota rule of 2.0."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor,
        temperature: float = 0.0,
        block_length: int = 32,
        steps: int = 32,
        gen_length: int = 2048,
        threshold: float = 0.95,
        minimal_topk: int = 1,
        eos_early_stop: bool = False,
        eos_id: int = EOS_ID,
        mask_id: int = MASK_ID,
    ) -> Tensor:
        """Return generated ids [1, n] up to the first end of sequence."""
        steps = min(steps, gen_length // minimal_topk)
        x = self._canvas(inputs, gen_length, block_length, mask_id)
        prompt = inputs.shape[1]
        share, rest = divmod(block_length, steps)
        for end in range((prompt // block_length + 1) * block_length, x.shape[1] + 1, block_length):
            window = x[:, :end]
            for step in range(steps):
                masked = window[0, -block_length:] == mask_id
                if not masked.any():
                    break
                token, sure = self._predict(window, block_length, mask_id)
                chosen = _accept(masked, sure, threshold, share + (step < rest))
                window[0, -block_length:][chosen] = token[chosen]
                if eos_early_stop and (token[chosen] == eos_id).any():
                    first = int((window[0] == eos_id).nonzero()[0])
                    if (window[0, prompt:first] != mask_id).all():
                        return x[:, : first + 1]  # with the prompt, as published
            if (window[0, prompt:] == eos_id).any():
                break
        return _answer(x, prompt, gen_length, eos_id)


class LLaDA21(LLaDA2MoeModelLM):
    """The rule of 2.1, with editing and post steps."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor,
        temperature: float = 0.0,
        block_length: int = 32,
        steps: int = 32,
        gen_length: int = 2048,
        threshold: float = 0.7,
        editing_threshold: float = 0.5,
        max_post_steps: int = 16,
        num_to_transfer: int = 1,
        eos_early_stop: bool = False,
        eos_id: int | None = None,
        mask_id: int | None = None,
    ) -> Tensor:
        """Return generated ids [1, n]; cut at an end of sequence only with ``eos_early_stop``."""
        mask = int(self.config.mask_token_id if mask_id is None else mask_id)
        eos = int(self.config.eos_token_id if eos_id is None else eos_id)
        x = self._canvas(inputs, gen_length, block_length, mask)
        prompt = inputs.shape[1]
        for end in range((prompt // block_length + 1) * block_length, x.shape[1] + 1, block_length):
            window = x[:, :end]
            generated = torch.arange(end - block_length, end, device=x.device) >= prompt
            post_steps = 0
            while True:
                held = window[0, -block_length:].clone()
                masked = held == mask
                post_steps += not masked.any()
                if post_steps > max_post_steps:
                    break
                token, sure = self._predict(window, block_length, mask)
                accepted = _accept(masked, sure, threshold, num_to_transfer)
                edited = generated & ~masked & (token != held) & (sure > editing_threshold)
                chosen = accepted | edited
                window[0, -block_length:][chosen] = token[chosen]
                if not (masked.any() or edited.any()):
                    break
            text = window[0, prompt:]
            if eos_early_stop and (text != mask).all() and (text == eos).any():
                break
        return _answer(x, prompt, gen_length, eos if eos_early_stop else None)


def _accept(masked: Tensor, sure: Tensor, threshold: float, at_least: int) -> Tensor:
    sure = torch.where(masked, sure, -torch.inf)
    above = sure > threshold
    if above.sum() >= at_least:
        return above
    best = sure.sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(masked)
    chosen[best[: min(at_least, int(masked.sum()))]] = True
    return chosen


def _answer(x: Tensor, prompt: int, gen_length: int, eos_id: int | None) -> Tensor:
    """Return what follows the prompt, up to the first ``eos_id`` if one is given."""
    text = x[:, prompt : prompt + gen_length]
    if eos_id is None or eos_id not in text:
        return text
    return text[:, : int((text[0] == eos_id).nonzero()[0]) + 1]
