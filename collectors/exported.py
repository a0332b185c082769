"""What an export says of itself in the manifest it carries, held against what the file holds.

A file that was cut short, or edited, would otherwise come back as a smaller trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError
from oled_sim.trace.manifest import Manifest, RequestEntry
from oled_sim.trace.schema import RequestTrace, TokenState


class Counts(NamedTuple):
    """What was found of a request.

    ``full``: every event holds a row for each token of its pass.
    """

    passes: int
    events: int
    full: bool


def count(request: RequestTrace) -> Counts:
    """Return what a request holds, to compare it with its entry in a manifest."""
    tokens = np.diff(request.token_offset)[request.event_pass]
    full = np.array_equal(np.diff(request.event_offset), tokens)
    return Counts(request.passes, request.events, full)


def check_export(source: Path, manifest: Manifest, found: Mapping[int, Counts]) -> None:
    """Refuse an export that does not hold what its manifest lists.

    Args:
        source: the file. manifest: that it carries. found: by request, what it holds.

    Raises:
        TraceError: the first difference; names file, request, and what is missing.
    """
    for problem in _problems(manifest, found):
        raise TraceError(
            f"{source}: {problem}: the file is cut short or was edited, export it again"
        )


def _problems(manifest: Manifest, found: Mapping[int, Counts]) -> Iterator[str]:
    for entry in manifest.requests:
        if entry.request not in found:
            yield (
                f"request {entry.request} is missing, the manifest in it lists"
                f" {len(manifest.requests):,}"
            )
            continue
        yield from _lacks(entry, found[entry.request], manifest.ragged)
    for number in sorted(set(found) - {entry.request for entry in manifest.requests}):
        yield f"the manifest in it lists no request {number}"


def _lacks(entry: RequestEntry, found: Counts, ragged: bool) -> Iterator[str]:
    """Yield what is missing; a ragged trace may have had passes and tokens without any route."""
    for name in ("passes", "events"):
        have, listed = getattr(found, name), getattr(entry, name)
        fewer_is_right = ragged and name == "passes" and have < listed
        if have != listed and not fewer_is_right:
            yield (
                f"request {entry.request} has {have:,} {name}, the manifest in it lists {listed:,}"
            )
    if not (ragged or found.full):
        yield f"request {entry.request} lacks routes of some tokens in a layer"


def entries(manifest: Manifest | None) -> Mapping[int, RequestEntry]:
    """Return the entries of the requests that were exported, by number."""
    found = () if manifest is None else manifest.requests
    return {entry.request: entry for entry in found}


def about(request: RequestTrace, entry: RequestEntry | None) -> dict[str, Any]:
    """Return what the manifest says of a request: as exported once, else as counted."""
    if entry is not None:
        return {
            "prompt_tokens": entry.prompt_tokens,
            "output_tokens": entry.output_tokens,
            "finish_reason": entry.finish_reason,
            "prompt_row": entry.prompt_row,
            "prompt_sha256": entry.prompt_sha256,
        }
    return {
        "prompt_tokens": _prompt_tokens(request),
        "output_tokens": int(request.accepted_count.sum()),
    }


def _prompt_tokens(request: RequestTrace) -> int:
    """Return the prompt's tokens, or all before the first generated one, whichever is known."""
    prompt: NDArray[np.bool_] = request.state == TokenState.PROMPT
    if prompt.any():
        # Positions of a batch count its rows, in every pass anew: its prompts are that many tokens.
        return max(int(request.position[prompt].max()) + 1, int(np.count_nonzero(prompt)))
    return int(request.position[0])
