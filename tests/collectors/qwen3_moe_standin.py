"""Qwen3-MoE as transformers presents it to hooks; a loop as SDAR's. Ours, and tiny."""

from types import SimpleNamespace

import torch
from torch import nn

MASK, EOS, EXPERTS, TOP_K = 31, 30, 8, 2


class Qwen3MoeTopKRouter(nn.Linear):
    """The gate of transformers 5: takes softmax and top-k itself, returns a triple."""

    def forward(self, hidden):
        logits = super().forward(hidden)
        weights, ids = logits.softmax(-1, dtype=torch.float).topk(TOP_K, dim=-1)
        return logits.softmax(-1), weights / weights.sum(-1, keepdim=True), ids


class Qwen3MoeSparseMoeBlock(nn.Module):
    """``gate`` is a linear layer, as under transformers 4, or a router."""

    def __init__(self, width, router):
        super().__init__()
        self.gate = router(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))

    def forward(self, hidden):
        x = hidden.reshape(-1, hidden.shape[-1])
        out = self.gate(x)
        if isinstance(out, tuple):
            _, weights, ids = out
        else:
            weights, ids = out.softmax(-1, dtype=torch.float).topk(TOP_K, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.stack([e(x) for e in self.experts], 1)
        y = y.gather(1, ids.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
        return (y * weights.unsqueeze(-1)).sum(1).view_as(hidden)


class Qwen3MoeModel(nn.Module):
    """Layer 0 is dense. What a token's cache holds is the sum of what came before it."""

    def __init__(self, width, router):
        super().__init__()
        self.embed_tokens = nn.Embedding(32, width)
        mlp = [nn.Linear(width, width), *(Qwen3MoeSparseMoeBlock(width, router) for _ in range(2))]
        self.layers = nn.ModuleList()
        for part in mlp:
            layer = nn.Module()
            layer.mlp = part
            self.layers.append(layer)

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, context=0.0):
        hidden = self.embed_tokens(input_ids)
        seen = hidden if attention_mask is None else hidden * attention_mask.unsqueeze(-1)
        hidden = hidden + 0.3 * (context + seen.cumsum(1))
        for layer in self.layers:
            hidden = hidden + layer.mlp(hidden)
        return hidden, context + seen.sum(1, keepdim=True)


class Qwen3MoeForCausalLM(nn.Module):
    def __init__(self, router=nn.Linear, seed=0, width=16):
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(
            num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=width, vocab_size=32,
            moe_intermediate_size=width, num_hidden_layers=3, mlp_only_layers=[0],
            decoder_sparse_step=1, eos_token_id=EOS,
        )  # fmt: skip
        self.generation_config = SimpleNamespace(eos_token_id=[EOS], do_sample=False)
        self.model = Qwen3MoeModel(width, router)
        self.lm_head = nn.Linear(width, 32, bias=False)
        self.lm_head.weight.data *= 3
        self.requires_grad_(False)

    def forward(self, **inputs):
        hidden, context = self.model(**inputs)
        return SimpleNamespace(logits=self.lm_head(hidden), context=context)

    def generate(self, inputs=None, generation_config=None, **kwargs):
        """Greedy, with a cache; rows that are done are padded until all are."""
        ids = kwargs["input_ids"] if inputs is None else inputs
        mask = kwargs.get("attention_mask")
        out = self(input_ids=ids, attention_mask=mask)
        done = torch.zeros(len(ids), dtype=torch.bool)
        for step in range(kwargs["max_new_tokens"]):
            token = out.logits[:, -1].argmax(-1)
            token[done] = EOS
            done |= token == EOS
            ids = torch.cat((ids, token.unsqueeze(1)), 1)
            if done.all() or step == kwargs["max_new_tokens"] - 1:
                break
            out = self(input_ids=token.unsqueeze(1), context=out.context)
        return ids


def diffuse(model, prompt, gen_length, block_length, *, cached=True):
    """A block-diffusion loop as SDAR's: prefill of whole blocks, denoising, a commit pass."""
    blocks = -(-(len(prompt) + gen_length) // block_length)
    x = torch.full((1, blocks * block_length), MASK)
    x[0, : len(prompt)] = torch.tensor(prompt)
    context, first = 0.0, len(prompt) // block_length
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    if first and cached:
        span = slice(0, first * block_length)
        context = model(input_ids=x[:, span], position_ids=positions[:, span]).context
    for block in range(first, blocks):
        span = slice(block * block_length if cached else 0, (block + 1) * block_length)
        window = x[:, span].clone() if cached else x[:, span]
        while True:
            masked = window[0, -block_length:] == MASK
            out = model(input_ids=window, position_ids=positions[:, span], context=context)
            if not masked.any():
                context = out.context if cached else 0.0
                break
            probability = out.logits[0, -block_length:].softmax(-1)
            probability[:, MASK] = 0
            sure, token = probability.max(-1)
            best = torch.where(masked, sure, -1.0).argmax()
            window[0, -block_length:][best] = token[best]
        x[:, span] = window
    return x[0]
