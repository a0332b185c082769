"""Importing in two reads: the first checks every request and learns what the manifest must say,
the second writes. A malformed file so leaves nothing behind, and memory holds one request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from oled_sim.errors import TraceError
from oled_sim.importing import counted
from oled_sim.trace.manifest import (
    MOST_EXPERTS,
    MOST_LAYER,
    Decode,
    Manifest,
    Model,
    Prompts,
    Runtime,
    package_versions,
)
from oled_sim.trace.reblock import reblock, reblocked_manifest
from oled_sim.trace.schema import Kind, RequestTrace
from oled_sim.trace.validate import check_request
from oled_sim.trace.whole import whole_trace

from .cleaning import Cleaning
from .exported import Counts, about, check_export, count, entries
from .recorded import Recorded, build_request, check_routes, normalised

OPTIONAL_SIGNALS = {"confidence": "confidence", "state": "token_state"}
"""Facts about tokens that are signals of a trace, and their names there."""


@dataclass(frozen=True)
class Facts:
    """What is known of a recording apart from its routes.

    Attributes:
        model: its name. runtime: what recorded it.
        experts: per layer; None takes the highest id plus 1.
        manifest: of the trace that was exported to the file, with its requests; None if it was not.
        notes: further words for the manifest.
    """

    model: str = "unknown"
    runtime: str = "unknown"
    experts: int | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()


Reader = Callable[[Callable[[float], None], Cleaning], Iterable[Recorded]]
"""Reads the file once: takes a callback for the share read, and what drops dummies; yields
requests in ascending order of their numbers, cleaned."""


@dataclass(frozen=True)
class Target:
    """Where to, and how: the arguments of an :class:`oled_sim.importing.Importer`."""

    out: Path
    stands_for: str | None
    overwrite: bool
    on_progress: Callable[[float], None]
    on_note: Callable[[str], None]
    as_blocks: int | None = None


def import_recorded(
    source: Path, read: Reader, facts: Callable[[], Facts], target: Target
) -> Manifest:
    """Write the trace of a recording and return its manifest.

    Args:
        source: the file.
        read: reads it, twice.
        facts: what is known so far; all of it after the first read.
        target: where to.

    Raises:
        TraceError: malformed; names file and place.
        UsageError: blocks of a recording that is not autoregressive, or ``out`` is not free.
    """
    survey = _Survey(source, Cleaning(exported=facts().manifest is not None))
    for recorded in read(lambda done: target.on_progress(done / 2), survey.cleaning):
        survey.add(recorded, facts())
    known = facts()
    manifest = survey.manifest(known, target.stands_for)
    for note in survey.notes(known):
        target.on_note(note)
    if target.as_blocks is not None:
        manifest = reblocked_manifest(manifest, target.as_blocks)
    listed = entries(known.manifest)
    with whole_trace(target.out, manifest, overwrite=target.overwrite) as writer:
        for recorded in read(
            lambda done: target.on_progress((1 + done) / 2), survey.fresh_cleaning()
        ):
            request = survey.build(recorded, manifest)
            if target.as_blocks is not None:
                request = reblock(request, target.as_blocks)
            writer.write_request(request, **about(request, listed.get(request.request)))
    return writer.manifest


@dataclass
class _Survey:
    """What must be known of the whole file before its first request can be written."""

    source: Path
    cleaning: Cleaning
    layers: set[int] = field(default_factory=set)
    counts: dict[int, Counts] = field(default_factory=dict)
    whole_events: bool = True
    highest_id: int = 0
    top_k: int = 0
    first_of_top_k: int = 0
    longest_block: int = 1
    autoregressive: bool = True
    ungated: int = 0
    unknown_weights: int = 0
    about: set[str] | None = None

    def add(self, recorded: Recorded, facts: Facts) -> None:
        """Take a request into account; refuse what no trace may hold."""
        if len(recorded.experts) == 0:
            raise TraceError(f"{self.source}: request {recorded.number} holds no route but padding")
        self._check_geometry(recorded, facts)
        check_routes(recorded, facts.experts or MOST_EXPERTS)
        self.highest_id = max(self.highest_id, int(recorded.experts.max()))
        gates = normalised(recorded)
        self.ungated += gates is None
        if gates is None and recorded.gates is not None:
            self.unknown_weights += int(np.isnan(recorded.gates).any(axis=1).sum())
        layers = np.unique(recorded.layer).tolist()
        request = build_request(recorded, layers, self.highest_id + 1, gates, 1)
        manifest = Manifest(
            model=Model(name="", layers=tuple(layers), experts=MOST_EXPERTS, top_k=self.top_k),
            origin="imported",
            signals=("ids", *(() if gates is None else ("gates",)), *_told(recorded.about)),
            ragged=True,
            row_order="source",
        )
        check_request(request, manifest, str(self.source))
        self._count(request, layers)
        told = set(recorded.about)
        self.about = told if self.about is None else self.about & told

    def _check_geometry(self, recorded: Recorded, facts: Facts) -> None:
        if (facts.experts or 1) > MOST_EXPERTS:
            raise TraceError(
                f"{self.source}: {facts.experts:,} experts per layer, a trace can number"
                f" {MOST_EXPERTS:,}"
            )
        problem = f"the layer index is above {MOST_LAYER}, the highest that a trace can hold"
        recorded.refuse_if(recorded.layer > MOST_LAYER, problem)
        if facts.manifest is not None:
            known = np.isin(recorded.layer, facts.manifest.model.layers)
            recorded.refuse_if(~known, "the manifest in the file lists no such layer")
        k = recorded.experts.shape[1]
        self.top_k = self.top_k or k
        if k != self.top_k:
            recorded.refuse(0, f"{k} experts per token, {self.top_k} in earlier requests")

    def _count(self, request: RequestTrace, layers: list[int]) -> None:
        self.layers |= set(layers)
        self.counts[request.request] = count(request)
        tokens = np.diff(request.token_offset)
        self.whole_events &= events_are_whole(request)
        self.autoregressive &= _one_by_one(request)
        denoise = tokens[request.kind == Kind.DENOISE]
        self.longest_block = max(self.longest_block, int(denoise.max(initial=1)))

    def fresh_cleaning(self) -> Cleaning:
        """Return what cleans the file once more, counting from zero."""
        return Cleaning(exported=self.cleaning.exported)

    def build(self, recorded: Recorded, manifest: Manifest) -> RequestTrace:
        """Return a request of the trace."""
        gates = normalised(recorded) if "gates" in manifest.signals else None
        model = manifest.model
        return build_request(recorded, model.layers, model.experts, gates, self.longest_block)

    def notes(self, facts: Facts) -> Iterator[str]:
        """Yield a sentence about everything that the trace leaves out or had to guess."""
        yield from self.cleaning.notes()
        if self.unknown_weights:
            rows = counted(self.unknown_weights, "route")
            yield f"the trace has no gates, because weights of {rows} are unknown (nan)"
        elif 0 < self.ungated < len(self.counts):
            requests = counted(self.ungated, "request")
            yield f"the trace has no gates, because weights of {requests} are missing"
        if facts.experts is None:
            yield (
                "the file does not say how many experts a layer has:"
                f" {self.highest_id + 1}, the highest id plus 1, is taken (--experts N)"
            )

    def manifest(self, facts: Facts, stands_for: str | None) -> Manifest:
        """Return the manifest of the trace, without requests."""
        if not self.counts:
            raise TraceError(f"{self.source} holds no route: there is nothing to import")
        model = self._model(facts)
        with self.source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        origin = f"imported from {self.source.name} (SHA-256 {digest})"
        missing = sum(n.passes * len(model.layers) - n.events for n in self.counts.values())
        whole = self.whole_events and missing == 0
        if facts.manifest is not None:
            check_export(self.source, facts.manifest, self.counts)
            return self._manifest_again(facts.manifest, model, origin, stands_for, whole)
        ours = {k: v for k, v in package_versions().items() if k == "oled-sim"}
        decode = Decode(rule="autoregressive", block_length=1) if self.autoregressive else None
        return Manifest(
            model=model,
            origin="imported",
            signals=self._signals(),
            stands_for=stands_for,
            decode=decode,
            runtime=Runtime(name=facts.runtime, device="unknown", packages=ours),
            prompts=Prompts(redacted=True),
            ragged=not whole,
            row_order="source",
            notes="; ".join((origin, *facts.notes)),
        )

    def _manifest_again(
        self, found: Manifest, model: Model, origin: str, stands_for: str | None, whole: bool
    ) -> Manifest:
        """Return the manifest of a trace that was exported once."""
        signals = set(self._signals())
        return msgspec.structs.replace(
            found,
            model=model,
            origin="imported",
            signals=tuple(s for s in found.signals if s in signals),
            stands_for=stands_for or found.stands_for,
            ragged=found.ragged or not whole,
            notes="; ".join(filter(None, (found.notes, origin))),
            requests=(),
        )

    def _model(self, facts: Facts) -> Model:
        if facts.manifest is not None:
            return facts.manifest.model
        experts = facts.experts or self.highest_id + 1
        layers = tuple(sorted(self.layers))
        return Model(name=facts.model, layers=layers, experts=experts, top_k=self.top_k)

    def _signals(self) -> tuple[str, ...]:
        return ("ids", *(() if self.ungated else ("gates",)), *_told(self.about or ()))


def events_are_whole(request: RequestTrace) -> bool:
    """Return whether every event holds the tokens of its pass, in their order.

    Otherwise the trace is ragged, which stores the token of every row.
    """
    tokens = np.diff(request.token_offset)[request.event_pass]
    rows = np.diff(request.event_offset)
    if not np.array_equal(rows, tokens):
        return False
    first = request.token_offset[request.event_pass] - request.event_offset[:-1]
    return np.array_equal(request.row_token, np.arange(len(request.row_token)) + first.repeat(rows))


def _one_by_one(request: RequestTrace) -> bool:
    """Return whether every pass after the prefill decodes the next token of one sequence."""
    decoded = np.flatnonzero(request.kind != Kind.PREFILL)
    single = bool((np.diff(request.token_offset)[decoded] == 1).all())
    position = request.position[request.token_offset[decoded]]
    return single and bool((np.diff(position) > 0).all() and request.accepted_count[decoded].all())


def _told(about: Collection[str]) -> list[str]:
    return [signal for fact, signal in OPTIONAL_SIGNALS.items() if fact in about]
