"""Random events and a dense reference for grouped experts."""

import numpy as np
import torch

from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.rows import event_rows
from oled_sim.hardware.slab import Slab


def random_slab(place, cost, slots, seed=0):
    slab = Slab(place, cost, slots)
    generator = torch.Generator(place.device).manual_seed(seed)
    slab.weights.normal_(0, 0.15, generator=generator)
    return slab


def random_event(cost, tokens, seed=0):
    """Routes over all experts, the activated ones in random order, and a slot for each."""
    random = np.random.default_rng(seed)
    routes = np.argsort(random.random((tokens, cost.experts)))[:, : cost.top_k]
    order = random.permutation(np.unique(routes))
    gates = random.random(routes.shape).astype(np.float32) + 0.01
    return event_rows(routes, gates, order, 2.5), random.permutation(len(order))


def dense_reference(x, slab, rows, which, slots, out):
    """Every row by itself, in fp64, into a copy of ``out``."""
    out, x = out.double().cpu(), x.double().cpu()
    up, down = slab.up.double().cpu(), slab.down.double().cpu()
    for i, slot in zip(which, slots, strict=True):
        for at in range(rows.first[i], rows.first[i + 1]):
            gate, value = (up[slot] @ x[rows.row[at] // rows.top_k]).chunk(2)
            y = down[slot] @ (torch.nn.functional.silu(gate) * value)
            out[rows.row[at]] = y * float(rows.weight[at])
    return out


def run_some(grouped, place, cost, tokens, seed):
    """Run half the experts of an event; return (result, reference, untouched rows)."""
    rows, all_slots = random_event(cost, tokens, seed)
    generator = torch.Generator(place.device).manual_seed(seed)
    shape = (tokens, cost.hidden_size)
    x = torch.randn(shape, device=place.device, generator=generator).to(place.dtype)
    out = torch.full((tokens * cost.top_k, shape[1]), 7.0, device=place.device, dtype=place.dtype)
    which = np.arange(0, len(rows.expert), 2)
    slots = all_slots[which]
    expected = dense_reference(x, grouped.slab, rows, which, slots, out)
    grouped.load(rows)
    grouped.run(x, which, slots, out)
    return out, expected


def make(place, cost, most_tokens, **options):
    return GroupedExperts(
        place, cost, random_slab(place, cost, cost.experts), most_tokens, **options
    )
