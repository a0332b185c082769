"""LLaDA2 as its remote code presents it to hooks: names, call paths and ``generate`` of ours.

Layers are those of the native model, so that both collectors can be held against each other. What
matters is kept: ``generate`` calls ``self.forward``, the inner model and the head are called as
modules, there is no KV cache, and accepted tokens are written into the tensor of the next pass.
"""

from types import SimpleNamespace

import torch
from torch import nn

from oled_sim.model.attention import BlockCausalAttention


class LLaDA2MoeModel(nn.Module):
    def __init__(self, native):
        super().__init__()
        self.word_embeddings = native.word_embeddings
        self.layers = native.layers
        self.norm = native.norm
        self.rotary_emb = native.rotary_emb

    def forward(self, input_ids=None, attention_mask=None, position_ids=None):
        hidden = self.word_embeddings(input_ids)
        rotary = self.rotary_emb(position_ids, hidden.dtype)
        attention = BlockCausalAttention(attention_mask, [input_ids.shape[1]])
        for layer in self.layers:
            hidden = layer(hidden, rotary, attention)
        return (self.norm(hidden),)


class LLaDA2MoeModelLM(nn.Module):
    """``attention_mask`` is the block length: what the mask of the real one says."""

    def __init__(self, native):
        super().__init__()
        self.config = SimpleNamespace(
            **{name: getattr(native.config, name) for name in native.config.__struct_fields__}
        )
        self.model = LLaDA2MoeModel(native.model)
        self.lm_head = native.lm_head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None):
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
        )
        return SimpleNamespace(logits=self.lm_head(outputs[0]).float())

    def predict(self, window, block_length, mask_id):
        positions = torch.arange(window.shape[1]).unsqueeze(0)
        logits = self.forward(window, attention_mask=block_length, position_ids=positions).logits
        probability = logits[0, -block_length:].softmax(-1)
        probability[:, mask_id] = 0
        sure, token = probability.max(-1)
        return token, sure

    @staticmethod
    def accept(masked, sure, threshold, at_least):
        sure = torch.where(masked, sure, -torch.inf)
        above = sure > threshold
        if above.sum() >= at_least:
            return above
        best = sure.sort(descending=True, stable=True).indices
        chosen = torch.zeros_like(masked)
        chosen[best[: min(at_least, int(masked.sum()))]] = True
        return chosen


class LLaDA20(LLaDA2MoeModelLM):
    """The quota rule."""

    @torch.no_grad()
    def generate(
        self, inputs=None, temperature=0.0, block_length=32, steps=32, gen_length=2048,
        threshold=0.95, minimal_topk=1, eos_early_stop=False, eos_id=156892, mask_id=156895,
    ):  # fmt: skip
        steps = min(steps, gen_length // minimal_topk)
        x, blocks = canvas(inputs, gen_length, block_length, mask_id)
        prompt = inputs.shape[1]
        share, rest = divmod(block_length, steps)
        for block in range(prompt // block_length, blocks):
            window = x[:, : (block + 1) * block_length]
            for step in range(steps):
                masked = window[0, -block_length:] == mask_id
                if not masked.any():
                    break
                token, sure = self.predict(window, block_length, mask_id)
                chosen = self.accept(masked, sure, threshold, share + (step < rest))
                window[0, -block_length:][chosen] = token[chosen]
                if eos_early_stop and (token[chosen] == eos_id).any():
                    first = int((window[0] == eos_id).nonzero()[0])
                    if (window[0, prompt:first] != mask_id).all():
                        return x[:, : first + 1]
            if (window[0, prompt:] == eos_id).any():
                break
        return answer(x, prompt, gen_length, eos_id)


class LLaDA21(LLaDA2MoeModelLM):
    """The rule with editing and post steps."""

    @torch.no_grad()
    def generate(
        self, inputs=None, temperature=0.0, block_length=32, steps=32, gen_length=2048,
        threshold=0.7, editing_threshold=0.5, max_post_steps=16, num_to_transfer=1,
        eos_early_stop=False, eos_id=None, mask_id=None,
    ):  # fmt: skip
        mask_id = self.config.mask_token_id if mask_id is None else mask_id
        x, blocks = canvas(inputs, gen_length, block_length, mask_id)
        prompt = inputs.shape[1]
        for block in range(prompt // block_length, blocks):
            window = x[:, : (block + 1) * block_length]
            generated = torch.arange(block * block_length, (block + 1) * block_length) >= prompt
            post_steps = 0
            while True:
                held = window[0, -block_length:].clone()
                masked = held == mask_id
                post_steps += not masked.any()
                if post_steps > max_post_steps:
                    break
                token, sure = self.predict(window, block_length, mask_id)
                chosen = self.accept(masked, sure, threshold, num_to_transfer)
                edited = generated & ~masked & (token != held) & (sure > editing_threshold)
                chosen = (chosen & masked) | edited
                window[0, -block_length:][chosen] = token[chosen]
                if not (masked.any() or edited.any()):
                    break
            if (window[0, prompt:] == eos_id).any():
                break
        return answer(x, prompt, gen_length, eos_id)


def canvas(inputs, gen_length, block_length, mask_id):
    blocks = -(-(inputs.shape[1] + gen_length) // block_length)
    x = torch.full((1, blocks * block_length), mask_id)
    x[:, : inputs.shape[1]] = inputs
    return x, blocks


def answer(x, prompt, gen_length, eos_id):
    stops = (x[0, prompt : prompt + gen_length] == eos_id).nonzero()
    length = int(stops[0]) + 1 if len(stops) else gen_length
    return x[:, prompt : prompt + length]
