"""What the simulating commands have in common: from what was asked for to a run, and its header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
import msgspec

from oled_sim.engine.budget import Budget, parse_bytes, parse_capacities
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Result
from oled_sim.errors import UsageError
from oled_sim.policy import Policy
from oled_sim.policy_spec import parse_policies
from oled_sim.run_header import describe
from oled_sim.run_inputs import ALWAYS_READ, costs_for, expert_bytes_of, source_for
from oled_sim.trace import Trace

__all__ = [
    "ALWAYS_READ",
    "asked_for",
    "budgets_for",
    "costs_for",
    "describe",
    "expert_bytes_of",
    "note_ample",
    "note_few",
    "note_moot",
    "source_for",
    "to_json",
]


def asked_for(
    policies: Sequence[str], caches: Sequence[str], sizes: Sequence[str]
) -> tuple[dict[str, Policy], list[Budget]]:
    """Return policies by label, and budgets in the order given."""
    parsed = parse_policies(policies)
    return parsed, budgets_for(parsed, caches, sizes)


def budgets_for(
    policies: Mapping[str, Policy], caches: Sequence[str], sizes: Sequence[str]
) -> list[Budget]:
    """Return every budget that lists of slots (``8,16``, ``8:128:8``) and of bytes mean, once.

    Raises:
        UsageError: one of them is none, or there is none and a policy needs one.
    """
    budgets = [Budget(cache=c) for text in caches for c in parse_capacities(text)]
    budgets += [Budget(size_bytes=parse_bytes(size)) for text in sizes for size in text.split(",")]
    if not budgets and any(p.residency == "budget" for p in policies.values()):
        raise UsageError(
            "no cache size to run: give --cache, such as --cache 40 or --cache 8:128:8"
        )
    return list(dict.fromkeys(budgets))


def note_moot(rules: Rules, batches: Sequence[int]) -> None:
    """Say on stderr which rule changes nothing."""
    if rules.batch_mode != "lockstep" and max(batches) == 1:
        _note(
            f"--batch-mode {rules.batch_mode} changes nothing with one request at a time (--batch)"
        )


def note_few(traces: Mapping[str, Trace], requests: int | None) -> None:
    """Say on stderr which traces hold fewer ``requests`` than were asked for."""
    for name, trace in traces.items():
        if requests is not None and requests > len(trace.requests):
            _note(f"--requests {requests}: {name} holds {len(trace.requests)}, all are used")


def note_ample(budgets: Sequence[Budget], experts: Iterable[int]) -> None:
    """Say on stderr, once per number of ``experts`` of a layer, which slots are more than those."""
    for most in sorted(set(experts)):
        ample = sorted({b.cache for b in budgets if b.cache is not None and b.cache > most})
        if ample:
            which = "exceeds" if len(ample) == 1 else "and more exceed"
            _note(f"--cache {ample[0]} {which} a layer's {most} experts: all are resident")


def _note(text: str) -> None:
    click.echo(f"Note: {text}", err=True)


def to_json(header: dict[str, Any], results: Sequence[Result]) -> str:
    """Return header and results as one JSON object; NaN (0/0) becomes null."""
    document = header | {"results": [r.to_dict() for r in results]}
    return msgspec.json.encode(document).decode()
