"""The whole of a plan: what was asked, what was found, what it rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Result
from oled_sim.geometry import CostGeometry
from oled_sim.planning.accuracy import Accuracy, find_accuracy
from oled_sim.planning.memory import Bill, Serving, largest_cache, memory_bill
from oled_sim.planning.routing import BUNDLED, trace_for
from oled_sim.planning.search import Candidate, Found, search
from oled_sim.policy import Policy
from oled_sim.run_header import describe
from oled_sim.run_inputs import expert_bytes_of, source_for
from oled_sim.sweep import Grid, sweep
from oled_sim.trace import Trace

CONTEXTS = (1024, 4096, 16384, 32768)
"""Context lengths that the KV cache is shown for, besides the one asked for."""


@dataclass(frozen=True)
class Question:
    """What was asked. Sizes in bytes, times in µs; see the options of the command."""

    model: CostGeometry
    policies: Mapping[str, Policy]
    target_us: float
    context: int
    batch: int
    staging: int
    reserve_bytes: int
    trace: str | None
    requests: int
    validation: Path | None

    def serving(self, block_length: int, context: int | None = None) -> Serving:
        """Return what is served with the blocks of a trace, and another context if wanted."""
        return Serving(
            context=context or self.context,
            batch=self.batch,
            block_length=block_length,
            staging=self.staging,
            reserve_bytes=self.reserve_bytes,
        )


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        header: what every result must say of trace, model, profile and rules.
        serving: what is served. gpu_memory_bytes: that there is.
        largest: the most experts per layer that fit.
        found: what was simulated. accuracy: of predictions by policy, where known.
    """

    question: Question
    header: dict[str, Any]
    serving: Serving
    gpu_memory_bytes: int
    largest: int
    found: Found
    accuracy: Mapping[str, Accuracy]

    @property
    def choice(self) -> Candidate | None:
        """The smallest cache that meets the target, or None."""
        return self.found.choice

    @property
    def advised(self) -> Candidate:
        """The choice, else the best that can be had."""
        return self.choice or self.found.fastest

    def bill(self, candidate: Candidate) -> Bill:
        """Return the GPU memory of a candidate."""
        return memory_bill(self.question.model, self.serving, candidate.cache)

    def row(self, candidate: Candidate | None) -> dict[str, Any] | None:
        """Return a candidate as plain data."""
        if candidate is None:
            return None
        tpot = candidate.tpot_us
        return {
            "policy": candidate.policy,
            "cache": candidate.cache,
            "tpot_us": tpot.value,
            "low_us": tpot.low,
            "high_us": tpot.high,
            "requests": tpot.requests,
            "gpu_bytes": self.bill(candidate).total,
        }

    @property
    def curve(self) -> list[dict[str, Any]]:
        """Everything that was simulated, as plain data."""
        return [row for c in self.found.candidates if (row := self.row(c)) is not None]

    @property
    def contexts(self) -> list[dict[str, int]]:
        """KV cache and the largest expert cache by context length, where any fits."""
        model, rows = self.question.model, []
        for context in sorted({*CONTEXTS, self.question.context}):
            serving = self.question.serving(self.serving.block_length, context)
            bill = memory_bill(model, serving, 0)
            room = self.gpu_memory_bytes - bill.total
            slots = room // (model.moe_layers * model.expert_bytes)
            largest = max(0, min(int(slots), model.experts))
            rows.append({"context": context, "kv_bytes": bill.kv_cache, "largest_cache": largest})
        return rows

    @property
    def synthetic(self) -> bool:
        """Whether the routing is not of a recorded run."""
        return self.header["trace"]["origin"] == "synthetic"

    @property
    def stands_in(self) -> bool:
        """Whether the routing is that of the small model that ships in the model's place."""
        return self.header["trace"]["name"] in BUNDLED.values()

    @property
    def caption(self) -> str:
        """What a figure says about where its numbers come from."""
        trace, profile = self.header["trace"], self.header["profile"]
        mark = ", provisional" if profile["provisional"] else ""
        return (
            f"{self.question.model.name}, simulated: {trace['origin']} routing ({trace['name']}),\n"
            f"profile {profile['name']} ({profile['status']}{mark})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        question, found = self.question, self.found
        advised = self.advised
        bill = self.bill(advised)
        smallest = {policy: self.row(found.smallest_of(policy)) for policy in found.policies}
        return self.header | {
            "target_us": question.target_us,
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "serving": asdict(self.serving),
            "largest_cache": self.largest,
            "met": self.choice is not None,
            "choice": self.row(self.choice),
            "fastest": self.row(found.fastest),
            "safe": self.row(found.safe),
            "knee": self.row(found.knee),
            "bill": asdict(bill) | {"total": bill.total, "policy": advised.policy},
            "smallest_by_policy": smallest,
            "contexts": self.contexts,
            "accuracy": {name: asdict(a) for name, a in self.accuracy.items()},
            "curve": self.curve,
        }


def answer(
    question: Question,
    costs: LaneCosts,
    gpu_memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> Answer:
    """Work out a plan.

    Args:
        question: what is asked.
        costs: of the model on some machine.
        gpu_memory_bytes: that there is.
        progress: called with (runs of a request done, all of them).

    Raises:
        CapacityError: the model does not fit even with the smallest cache.
        UsageError, TraceError: no trace to plan with, or one of other routing.
        ProfileError: a count lies outside the profiled range.
    """
    signals: frozenset[str] = frozenset().union(
        *(p.needs | p.wants for p in question.policies.values())
    )
    largest_cache(question.model, question.serving(1), gpu_memory_bytes)  # before any work
    with trace_for(question.model, question.trace, signals) as trace:
        serving = question.serving(_block_length(trace))
        largest = largest_cache(question.model, serving, gpu_memory_bytes)
        rules = _rules(question)
        accuracy = find_accuracy(costs.profile, list(question.policies), question.validation)
        found = _search(question, trace, costs, rules, largest, accuracy, progress)
        header = describe(trace, costs, rules)
    return Answer(question, header, serving, gpu_memory_bytes, largest, found, accuracy)


def _block_length(trace: Trace) -> int:
    """Return the tokens of a block, as the trace was decoded; LLaDA2's own if it does not say."""
    decode = trace.manifest.decode
    return decode.block_length if decode is not None else Serving.block_length


def _rules(question: Question) -> Rules:
    """Return how requests run: all of them count where no policy learns from history."""
    learns = any(policy.learns for policy in question.policies.values())
    return Rules(
        batch=question.batch,
        staging=question.staging,
        history=None if learns else 0,
        requests=question.requests,
    )


def _search(
    question: Question,
    trace: Trace,
    costs: LaneCosts,
    rules: Rules,
    largest: int,
    accuracy: Mapping[str, Accuracy],
    progress: Callable[[int, int], None] | None,
) -> Found:
    policies = question.policies
    source = source_for(trace, policies.values())
    expert_bytes = expert_bytes_of(trace, costs)

    def simulate(labels: Sequence[str], caches: Sequence[int]) -> list[Result]:
        grid = Grid(
            {label: policies[label] for label in labels},
            [Budget(cache=cache) for cache in caches],
            batches=(question.batch,),
        )
        return sweep(source, grid, costs, rules, expert_bytes=expert_bytes, progress=progress)

    return search(
        simulate,
        list(policies),
        least=question.model.top_k,
        largest=largest,
        target_us=question.target_us,
        margins={policy: a.margin for policy, a in accuracy.items()},
    )
