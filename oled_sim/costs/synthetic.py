"""A profile by formula, for closed-form tests and what-if questions.

Every cost is affine in its counts, so interpolation reproduces the formula everywhere and the
time of a simulated layer can be worked out by hand.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oled_sim.costs.profile import (
    FORMAT,
    Beside,
    Curve,
    GeometryFields,
    Grid,
    Hardware,
    Interference,
    Origin,
    Profile,
    Quantiles,
    Software,
)
from oled_sim.geometry import CostGeometry

TOKENS = (1, 4096)
EXPERTS = (1, 256)
CONTEXT = (0, 32768)
BYTES = (1, 1 << 30)
REQUESTS = (1, 4096)
KEYS = (1, 65536)


@dataclass(frozen=True)
class Affine:
    """Coefficients of a synthetic machine, in µs, with round numbers as defaults.

    Experts cost ``fixed + per_expert·n + per_token·(n · mean tokens)``; everything else
    ``fixed + per_token·tokens``. Defaults: an 8 MiB copy takes about 200 µs.
    """

    h2d_fixed_us: float = 0.0
    h2d_gb_s: float = 41.94304
    gpu_fixed_us: float = 50.0
    gpu_per_expert_us: float = 2.0
    gpu_per_token_us: float = 0.0
    cpu_fixed_us: float = 0.0
    cpu_per_expert_us: float = 250.0
    cpu_per_token_us: float = 0.0
    cpu_link_us: float = 20.0
    dense_us: float = 100.0
    dense_per_token_us: float = 0.0
    dense_per_context_us: float = 0.0
    attention_per_request_us: float = 0.0
    attention_per_key_us: float = 0.0
    gate_us: float = 30.0
    shared_expert_us: float = 20.0
    dense_layer_us: float = 40.0
    lm_head_us: float = 200.0
    merge_us: float = 10.0
    embedding_us: float = 5.0
    slowdown: float = 1.0
    workers: int = 16


def affine_profile(geometry: CostGeometry, costs: Affine | None = None) -> Profile:
    """Return the profile of a machine whose costs are given by formula."""
    c = costs or Affine()
    per_byte = 1e-3 / c.h2d_gb_s

    def copy(size: float) -> float:
        return c.h2d_fixed_us + per_byte * size

    def gpu(n: float, mean: float) -> float:
        return c.gpu_fixed_us + c.gpu_per_expert_us * n + c.gpu_per_token_us * n * mean

    def cpu(n: float, mean: float) -> float:
        return c.cpu_fixed_us + c.cpu_per_expert_us * n + c.cpu_per_token_us * n * mean

    def dense(tokens: float, context: float) -> float:
        return c.dense_us + c.dense_per_token_us * tokens + c.dense_per_context_us * context

    def attention(requests: float, keys: float) -> float:
        return c.attention_per_request_us * requests + c.attention_per_key_us * requests * keys

    experts = ("experts", "tokens_per_expert")
    return Profile(
        format=FORMAT,
        name=f"synthetic-{geometry.name}",
        status="synthetic",
        provisional=False,
        origin=Origin(
            date=datetime.date(1970, 1, 1),
            script="oled_sim/costs/synthetic.py",
            revision="",
            note="a formula, not a measurement",
        ),
        hardware=_no_hardware(c.workers),
        software=Software(os="none", python="none", torch="none", cuda="none", numpy="none"),
        geometry=_fields(geometry),
        launch=_exactly(0.0),
        synchronize=_exactly(0.0),
        interference=_interference(c.slowdown),
        h2d=_curve("bytes", BYTES, copy),
        h2d_pageable=_curve("bytes", BYTES, lambda size: 3.0 * copy(size)),
        d2h=_curve("bytes", BYTES, copy),
        gpu_experts=_grid(experts, EXPERTS, TOKENS, gpu),
        cpu_experts=_grid(experts, EXPERTS, TOKENS, cpu),
        cpu_link=_constant(c.cpu_link_us),
        dense=_grid(("tokens", "context"), TOKENS, CONTEXT, dense),
        projections=_curve("tokens", TOKENS, lambda tokens: dense(tokens, 0)),
        block_attention=_grid(("requests", "keys"), REQUESTS, KEYS, attention),
        gate=_constant(c.gate_us),
        shared_expert=_constant(c.shared_expert_us),
        dense_layer=_constant(c.dense_layer_us),
        lm_head=_constant(c.lm_head_us),
        merge=_constant(c.merge_us),
        embedding=_constant(c.embedding_us),
    )


def _fields(geometry: CostGeometry) -> GeometryFields:
    return GeometryFields(
        **{name: getattr(geometry, name) for name in GeometryFields.__struct_fields__}
    )


def _no_hardware(workers: int) -> Hardware:
    return Hardware(
        gpu="synthetic",
        gpu_memory_bytes=0,
        driver="none",
        pcie_generation=0,
        pcie_width=0,
        cpu="synthetic",
        cores=workers,
        workers=workers,
        host_memory_bytes=0,
    )


def _exactly(value: float) -> Quantiles:
    return Quantiles(median=value, p10=value, p90=value, repeats=1)


def _interference(factor: float) -> Interference:
    f = _exactly(factor)
    return Interference(
        gpu=Beside(h2d=f, cpu=f, both=f),
        h2d=Beside(gpu=f, cpu=f, both=f),
        cpu=Beside(gpu=f, h2d=f, both=f),
    )


def _curve(axis: str, points: Sequence[int], cost: Callable[[float], float]) -> Curve:
    times = [cost(p) for p in points]
    return Curve(
        axis=axis,
        points=list(points),
        median_us=times,
        p10_us=times,
        p90_us=times,
        repeats=[1] * len(points),
    )


def _constant(time_us: float) -> Curve:
    return _curve("tokens", TOKENS, lambda _: time_us)


def _grid(
    axes: tuple[str, str],
    rows: Sequence[int],
    columns: Sequence[int],
    cost: Callable[[float, float], float],
) -> Grid:
    times = [[cost(r, c) for c in columns] for r in rows]
    return Grid(
        axes=axes,
        rows=list(rows),
        columns=list(columns),
        median_us=times,
        p10_us=times,
        p90_us=times,
        repeats=[[1] * len(columns) for _ in rows],
    )
