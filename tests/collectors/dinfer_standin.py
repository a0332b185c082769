"""dInfer's engine, decoder and both models as they present themselves to hooks; ours, and tiny."""

from types import SimpleNamespace

import torch
from torch import nn

MASK, EOS, EXPERTS, TOP_K, BLOCK, WIDTH = 31, 30, 8, 2, 4, 16


def top(logits):
    """Weights and ids, in this order; the weights carry a scaling factor."""
    weights, ids = logits.sigmoid().topk(TOP_K, dim=-1)
    return 2.5 * weights / weights.sum(-1, keepdim=True), ids.int()


class LLaDA2MoeGate(nn.Module):
    """``forward`` is never called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / WIDTH**0.5)

    def get_logits(self, hidden):
        return hidden @ self.weight.T

    def routing(self, hidden_states, gating_output, topk, renormalize):
        return top(gating_output)


class FusedMoE(nn.Module):
    """Holds the routing function that it was given."""

    def __init__(self, routing):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)
        self.custom_routing_function = routing

    def forward_impl(self, hidden, logits):
        weights, ids = self.custom_routing_function(
            hidden_states=hidden, gating_output=logits, topk=TOP_K, renormalize=True
        )
        return (self.experts[ids.long()] * weights.unsqueeze(-1)).sum(1) * hidden


class LLaDA2MoeSparseMoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = LLaDA2MoeGate()
        self.experts = FusedMoE(self.gate.routing)

    def forward(self, hidden):
        x = hidden.reshape(-1, WIDTH)
        return self.experts.forward_impl(x, self.gate.get_logits(x)).view_as(hidden)


class TopK(nn.Module):
    """SGLang's: a named tuple of weights, ids and logits."""

    def forward(self, hidden_states, router_logits):
        return SGLangOutput(*top(router_logits), router_logits)


class SGLangOutput(tuple):
    def __new__(cls, *values):
        return super().__new__(cls, values)


class LLaDA2SparseMoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = LLaDA2MoeGate()
        self.topk = TopK()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)

    def forward(self, hidden):
        x = hidden.reshape(-1, WIDTH)
        weights, ids, _ = self.topk(x, self.gate.get_logits(x))
        return ((self.experts[ids.long()] * weights.unsqueeze(-1)).sum(1) * x).view_as(hidden)


class Model(nn.Module):
    """Layer 0 is dense. A cache is the sum of the embeddings it holds."""

    def __init__(self, block, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(
            num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=WIDTH, vocab_size=32,
            moe_intermediate_size=WIDTH, num_hidden_layers=3, first_k_dense_replace=1,
        )  # fmt: skip
        self.device = torch.device("cpu")
        self.words = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList()
        for mlp in (nn.Linear(WIDTH, WIDTH), block(), block()):
            layer = nn.Module()
            layer.mlp = mlp
            self.layers.append(layer)
        self.head = nn.Linear(WIDTH, 32)
        self.requires_grad_(False)

    def forward(self, input_ids, position_ids=None, past_key_values=None, use_cache=False):
        hidden = self.words(input_ids)
        before = 0.0 if past_key_values is None else past_key_values
        own = hidden.cumsum(1)
        hidden = hidden + 0.2 * (before + own) + 0.1 * position_ids.unsqueeze(-1).sin()
        for layer in self.layers:
            hidden = hidden + layer.mlp(hidden)
        return SimpleNamespace(logits=3 * self.head(hidden), past_key_values=before + own[:, -1:])


class ThresholdParallelDecoder:
    def __init__(self, threshold=0.5, mask_id=MASK, eos_id=EOS):
        self.threshold, self.temperature = threshold, 0
        self.mask_id, self.eos_id = mask_id, eos_id

    def decode(self, logits, block_start, block_end, x):
        held = x.data[:, block_start:block_end]
        masked = held == self.mask_id
        probability = logits.softmax(-1)
        probability[..., self.mask_id] = 0
        sure, token = probability.max(-1)
        sure = torch.where(masked, sure, -torch.inf)
        chosen = masked & (sure >= (sure.max() - 1e-5).clamp(max=self.threshold))
        held[chosen] = token[chosen]


class BlockDiffusionLLM:
    """With a cache: prefill of at least one block, then unrolled loops of two passes or more."""

    def __init__(self, block=LLaDA2MoeSparseMoeBlock, unroll=2, seed=1, **decoder):
        self.model = Model(block, seed)
        self.decoder = ThresholdParallelDecoder(**decoder)
        self.unroll = unroll

    @torch.no_grad()
    def generate(self, prompt, gen_length=128, block_length=128):
        blocks = -(-(prompt.shape[1] + gen_length) // block_length)
        x = SimpleNamespace(data=torch.full((1, blocks * block_length), MASK))
        x.data[:, : prompt.shape[1]] = prompt
        positions = torch.arange(x.data.shape[1]).unsqueeze(0)
        first = prompt.shape[1] // block_length
        span = slice(0, max(first, 1) * block_length)
        out = self.model(x.data[:, span].clone(), position_ids=positions[:, span], use_cache=True)
        cache = out.past_key_values if first else torch.zeros(1, 1, WIDTH)
        for block in range(first, blocks):
            start, end = block * block_length, (block + 1) * block_length
            span = slice(start, end)
            clean = False
            while (x.data[:, span] == MASK).any() or not clean:
                for _ in range(self.unroll):
                    clean = not (x.data[:, span] == MASK).any()
                    out = self.model(
                        x.data[:, span].clone(), position_ids=positions[:, span],
                        past_key_values=cache, use_cache=True,
                    )  # fmt: skip
                    self.decoder.decode(out.logits, start, end, x)
            cache = out.past_key_values
            if (x.data[:, max(start, prompt.shape[1]) : end] == EOS).any():
                x.data[:, end:] = EOS
                break
        return x.data[:, : prompt.shape[1] + gen_length]
