"""LLaDA2 once more, in float64 numpy with loops over tokens and heads: slow, plain, independent.

Written from the architecture description alone and sharing no code with the package: weights
come in under their published names. It generates by full windows, one request at a time.
"""

import numpy as np


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(vector, position, rotary_dim, theta):
    """Rotate one head's vector: dimension i turns with dimension i + rotary_dim / 2."""
    out = vector.copy()
    half = rotary_dim // 2
    for i in range(half):
        angle = position / theta ** (2 * i / rotary_dim)
        a, b = vector[i], vector[i + half]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def swiglu(x, gate, up, down):
    return down @ (silu(gate @ x) * (up @ x))


def route(x, weight, bias, config):
    """Route one token: (ids by descending biased score, weights)."""
    logits = weight @ x
    score = sigmoid(logits)
    biased = score + bias
    size = config.num_experts // config.n_group
    strength = []
    for group in range(config.n_group):
        best = sorted(biased[group * size : (group + 1) * size], reverse=True)
        strength.append(best[0] + best[1])
    kept = sorted(range(config.n_group), key=lambda g: -strength[g])[: config.topk_group]
    allowed = [e for e in range(config.num_experts) if e // size in kept]
    ids = sorted(allowed, key=lambda e: -biased[e])[: config.num_experts_per_tok]
    raw = np.array([score[e] for e in ids])
    return ids, raw / (raw.sum() + 1e-20) * config.routed_scaling_factor


class NaiveLLaDA2:
    """Attributes: ``routes[layer]`` holds the ids of the last pass, [tokens][k]."""

    def __init__(self, config, tensors):
        self.config = config
        self.w = {name: np.asarray(t, dtype=np.float64) for name, t in tensors.items()}
        self.routes = {}

    def logits(self, ids, block_length):
        """Logits [S, V] of token ids at positions 0..S-1 under block-causal attention."""
        c, w = self.config, self.w
        hidden = np.stack([w["model.word_embeddings.weight"][t] for t in ids])
        for layer in range(c.num_hidden_layers):
            p = f"model.layers.{layer}."
            normed = rms_norm(hidden, w[p + "input_layernorm.weight"], c.rms_norm_eps)
            hidden = hidden + self.attention(normed, p + "attention.", block_length)
            normed = rms_norm(hidden, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
            hidden = hidden + np.stack(self.mlp(normed, layer, p + "mlp."))
        final = rms_norm(hidden, w["model.norm.weight"], c.rms_norm_eps)
        return final @ w["lm_head.weight"].T

    def attention(self, x, p, block_length):
        c, w = self.config, self.w
        d, nq, nkv = c.head_dim, c.num_attention_heads, c.num_key_value_heads
        rotary_dim = round(d * c.partial_rotary_factor)
        fused = x @ w[p + "query_key_value.weight"].T

        def head(index, norm):
            rows = fused[:, index * d : (index + 1) * d]
            rows = rms_norm(rows, w[p + norm], c.rms_norm_eps)
            return np.stack([rope(r, t, rotary_dim, c.rope_theta) for t, r in enumerate(rows)])

        out = np.zeros((len(x), nq * d))
        for h in range(nq):
            shared = h // (nq // nkv)
            q = head(h, "query_layernorm.weight")
            k = head(nq + shared, "key_layernorm.weight")
            v = fused[:, (nq + nkv + shared) * d : (nq + nkv + shared + 1) * d]
            for t in range(len(x)):
                visible = (t // block_length + 1) * block_length
                scores = k[:visible] @ q[t] / np.sqrt(d)
                out[t, h * d : (h + 1) * d] = softmax(scores) @ v[:visible]
        return out @ w[p + "dense.weight"].T

    def mlp(self, x, layer, p):
        w = self.w
        if layer < self.config.first_k_dense_replace:
            return [swiglu(t, *self.swiglu_weights(p)) for t in x]
        self.routes[layer], out = [], []
        for token in x:
            bias = w[p + "gate.expert_bias"]
            ids, weights = route(token, w[p + "gate.weight"], bias, self.config)
            self.routes[layer].append(ids)
            total = swiglu(token, *self.swiglu_weights(p + "shared_experts."))
            for expert, weight in zip(ids, weights, strict=True):
                total = total + weight * swiglu(
                    token, *self.swiglu_weights(f"{p}experts.{expert}.")
                )
            out.append(total)
        return out

    def swiglu_weights(self, p):
        return [self.w[f"{p}{name}_proj.weight"] for name in ("gate", "up", "down")]

    def generate(self, prompt, *, block_length, new_tokens, steps, threshold):
        """Rule 2.0, greedy, full windows: (output tokens, passes)."""
        c = self.config
        total = len(prompt) + new_tokens
        while total % block_length:
            total += 1
        canvas = list(prompt) + [c.mask_token_id] * (total - len(prompt))
        passes = 0
        for end in range(
            len(prompt) // block_length * block_length + block_length, total + 1, block_length
        ):
            block = range(end - block_length, end)
            for step in range(steps):
                masked = [i for i in block if canvas[i] == c.mask_token_id]
                if not masked:
                    break
                logits = self.logits(canvas[:end], block_length)
                passes += 1
                choice = {}
                for i in masked:
                    probability = softmax(logits[i])
                    probability[c.mask_token_id] *= -1
                    token = int(probability.argmax())
                    choice[i] = (float(probability[token]), token)
                quota = block_length // steps + (1 if step < block_length % steps else 0)
                taken = [i for i in masked if choice[i][0] > threshold]
                if len(taken) < quota:
                    taken = sorted(masked, key=lambda i: (-choice[i][0], i))[:quota]
                for i in taken:
                    canvas[i] = choice[i][1]
            if c.eos_token_id in canvas[len(prompt) : end]:
                break
        output = canvas[len(prompt) : len(prompt) + new_tokens]
        if c.eos_token_id in output:
            output = output[: output.index(c.eos_token_id) + 1]
        return output, passes
