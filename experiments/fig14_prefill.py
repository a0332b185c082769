"""Figure 14: time to first token by the length of the prompt, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.runner import Contender
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.state import (
    LANES,
    N_ACTIVATED,
    N_CAPACITY,
    N_HITS,
    T_BUSY,
    T_END,
    T_GATE,
    T_LANES,
    T_START,
    Course,
)
from oled_sim.experiment import Detail, Experiment, RunPoint, Size, SyntheticTrace
from oled_sim.plotting.prefill import draw_prefill
from oled_sim.trace import Trace

from ._grids import MACHINES, MODELS, SIGNALS

PROMPTS = (64, 128, 256, 512, 1024, 2048)
"""Tokens; the paper's range."""

CACHE = 100
POLICIES = ("oled", "finemoe", "full")
"""``full`` misses nothing: what it saves is what misses cost."""
CRITICAL = T_BUSY + len(LANES)
"""First column of the critical times of an event."""


@dataclass(frozen=True)
class PrefillPoint(RunPoint):
    """A run whose rows say what the time to first token is made of."""

    def detail(self, trace: Trace) -> Detail:
        """Return what takes the passes up to the first token apart."""
        return PrefillParts(trace)


class PrefillParts(Detail):
    """Splits the time to first token of requests that run one at a time."""

    def __init__(self, trace: Trace) -> None:
        self._prompts = {entry.request: entry.prompt_tokens for entry in trace.manifest.requests}
        self._experts = trace.geometry.experts
        self._found: dict[int, dict[str, float]] = {}

    def add(self, contender: Contender, record: GroupRecord) -> None:
        """Take a request apart; later runs of it replace earlier ones."""
        (member,) = record.batch.members
        course = record.course
        accepting = np.flatnonzero(member.trace.accepted_count > 0)
        if not len(accepting):
            return
        passes = int(accepting[0]) + 1
        self._found[int(member.trace.request)] = {
            **_split(course, passes),
            **_use(course.counts[: course.pass_event[passes]], self._experts),
        }

    def columns(self, request: int) -> Mapping[str, Any]:
        """Return the parts of a request's time to first token, which add up to it, and more.

        ``ttft_h2d_us``, ``ttft_cpu_us``: waiting for copies, and for experts on the CPU, at the
        end of the critical chain. ``ttft_gpu_experts_us``: experts on the GPU, shared ones
        included. ``ttft_dense_us``: norms, attention, gates, dense layers, embedding.
        ``ttft_rest_us``: merging, LM head, sampling. ``ttft_activation_ratio``,
        ``ttft_utilization``, ``ttft_hit_rate``: of these passes. ``prompt_tokens``.
        """
        return {"prompt_tokens": self._prompts[request], **self._found.get(request, {})}


def _split(course: Course, passes: int) -> dict[str, float]:
    """Return what the first passes of a request spend their time on, µs."""
    times, begin, end = _events_of(course, passes)
    dense = (times[:, T_GATE] - times[:, T_START]).sum()
    merge = (times[:, T_END] - times[:, T_LANES]).sum()
    gpu, h2d, cpu = times[:, CRITICAL : CRITICAL + len(LANES)].sum(axis=0)
    return {
        "ttft_h2d_us": float(h2d),
        "ttft_cpu_us": float(cpu),
        "ttft_gpu_experts_us": float(gpu - dense - merge),
        "ttft_dense_us": float(begin + dense),
        "ttft_rest_us": float(merge + end),
    }


def _events_of(course: Course, passes: int) -> tuple[NDArray[np.float64], float, float]:
    """Return the times of the events of the first passes, and what comes before and after them."""
    first, last = course.pass_event[:passes], course.pass_event[1 : passes + 1] - 1
    before = course.times[first, T_START] - course.pass_times[:passes, 0]
    after = course.pass_times[:passes, 1] - course.times[last, T_END]
    return course.times[: last[-1] + 1], float(before.sum()), float(after.sum())


def _use(counts: NDArray[np.int64], experts: int) -> dict[str, float]:
    """Return shares of a layer's experts that are activated, of slots used, of experts that hit."""
    hits, activated = counts[:, N_HITS], counts[:, N_ACTIVATED]
    return {
        "ttft_activation_ratio": float(activated.mean() / experts),
        "ttft_utilization": float((hits / counts[:, N_CAPACITY]).mean()),
        "ttft_hit_rate": float(hits.sum() / activated.sum()),
    }


def _trace(model: str, prompt: int, requests: int) -> SyntheticTrace:
    return SyntheticTrace(
        model, "gsm8k", requests, output_tokens=64, prompt_tokens=prompt, signals=SIGNALS
    )


def points(size: Size) -> list[RunPoint]:
    """Return every policy with every prompt length; prompts that long are synthetic in any size."""
    quick = size == "quick"
    return [
        PrefillPoint(
            _trace(model, prompt, 4 if quick else 9), policy=policy, cache=CACHE,
            profile=f"{machine}-{model}",
        )
        for machine in MACHINES[: 1 if quick else None]
        for model in MODELS[: 1 if quick else None]
        for prompt in PROMPTS[:: 2 if quick else 1]
        for policy in POLICIES
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "fig14",
    "Time to first token by prompt length, and what it is made of",
    "5.2, figure 14",
    points,
    draw_prefill,
)
