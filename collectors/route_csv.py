"""Importing route CSVs: the routing trace that BigMoeOnEdge writes with ``--route-trace``.

What becomes what is described in docs/importing.md. Every turn becomes a request; its whole
prefill is one pass, every decoded token another. Rows keep the order of the file, which decides
how recent an expert of an event is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from oled_sim.errors import TraceError
from oled_sim.importing import AS_BLOCKS
from oled_sim.plugin_options import takes
from oled_sim.trace.manifest import Decode, Manifest, Model, Prompts, Runtime, package_versions
from oled_sim.trace.reblock import reblock, reblocked_manifest
from oled_sim.trace.schema import Kind, RequestTrace
from oled_sim.trace.validate import check_request
from oled_sim.trace.whole import whole_trace

from .recorded import AUTOREGRESSIVE_PREFILL, Recorded
from .recorded import build_request as build_recorded
from .route_csv_header import Header, read_header
from .route_csv_rows import DECODE, PREFILL, TOKEN_KEY, RouteCsv, Tokens
from .text_blocks import LineReader, parse_columns
from .two_reads import events_are_whole

Lookup = tuple[int, int, int, int]
"""Request, pass, the model's layer index, expert."""


@takes(AS_BLOCKS, examples=("oled-sim import route-csv qwen.route.csv.xz --out qwen",))
def import_route_csv(
    source: Path,
    out: Path,
    *,
    as_blocks: int | None = None,
    stands_for: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write the trace of a route CSV; an :class:`oled_sim.importing.Importer`.

    ``as_blocks``: tokens of a block that decoding is put together to, see
    :mod:`oled_sim.trace.reblock`.

    The file is read twice, so that a malformed one leaves nothing behind: first every row is
    checked, then the requests are written.
    """
    survey = _survey(source, lambda done: on_progress(done / 2))
    for note in survey.notes():
        on_note(note)
    manifest = survey.manifest(stands_for)
    if as_blocks is not None:
        manifest = reblocked_manifest(manifest, as_blocks)
    layers = manifest.model.layers
    with (
        RouteCsv(source, lambda done: on_progress((1 + done) / 2)) as file,
        whole_trace(out, manifest, overwrite=overwrite) as writer,
    ):
        for turn in file.turns():
            request = build_request(turn, layers, gates="gates" in manifest.signals)
            writer.write_request(
                request if as_blocks is None else reblock(request, as_blocks),
                prompt_tokens=_prompt_tokens(request),
                output_tokens=int(request.accepted_count.sum()),
            )
    return writer.manifest


def build_request(turn: Tokens, layers: Sequence[int], *, gates: bool = True) -> RequestTrace:
    """Return one turn as a request.

    Args:
        turn: tokens in file order: prefill, then decoding step by step.
        layers: the trace's layers, by the model's own index.
        gates: whether the weights are known.
    """
    # A token of the request is a (phase, step), each decoded one a pass. A long prompt may come in
    # chunks, each through all layers; its prefill is still one pass.
    tokens, index = np.unique((turn.phase.astype(np.int64) << 32) | turn.step, return_inverse=True)
    position = tokens & 0xFFFFFFFF
    recorded = Recorded(
        number=int(turn.turn[0]),
        step=np.where(tokens >> 32 == DECODE, position, AUTOREGRESSIVE_PREFILL),
        position=position,
        token=index,
        layer=turn.layer,
        experts=turn.experts,
        gates=None,
        place=turn.line,
        source=Path(),
        where=lambda line, layer: f"line {line}",
    )
    experts = np.iinfo(turn.experts.dtype).max + 1
    return build_recorded(recorded, layers, experts, turn.gates if gates else None, 1)


def read_residency(source: Path) -> dict[Lookup, bool]:
    """Return what the recording engine found in its cache, which is no part of a trace.

    One lookup per distinct expert of an event; True is a hit (``residency`` 1, or 2 for one that
    a speculative prefetch had brought). Holds every lookup: meant for comparisons.

    Raises:
        TraceError: malformed, no column ``residency``, or rows of one lookup that disagree.
    """
    names = (*TOKEN_KEY, "expert", "residency")
    needed: dict[str, pa.DataType] = {name: pa.int32() for name in names}
    found: dict[Lookup, bool] = {}
    passes: dict[int, dict[int, int]] = {}  # by turn: number of the pass of a step, -1 the prefill
    with LineReader(source) as reader:
        columns = read_header(reader, needed).columns
        for block in reader.blocks():
            values = parse_columns(block, source, columns, needed)
            rows = zip(*(values[name].tolist() for name in needed), strict=True)
            for line, (turn, phase, step, layer, expert, residency) in enumerate(
                rows, block.first_line
            ):
                numbers = passes.setdefault(turn, {})
                number = numbers.setdefault(-1 if phase == PREFILL else step, len(numbers))
                hit = residency > 0
                if found.setdefault((turn, number, layer, expert), hit) != hit:
                    raise TraceError(
                        f"{source}, line {line}: residency differs from that of an earlier row of"
                        " the same expert and event"
                    )
    return found


class _Survey:
    """What must be known of the whole file before its first request can be written."""

    def __init__(self, source: Path, header: Header) -> None:
        self.source = source
        self.header = header
        self.declared = tuple(header.expert_bytes)
        self.layers: set[int] = set()
        self.passes = 0
        self.events = 0
        self.whole_events = True
        self.padding_rows = 0
        self.unknown_weights = 0

    def add(self, turn: Tokens) -> None:
        """Take one turn into account; refuse what no trace may hold."""
        gated = not np.isnan(turn.gates).any()
        request = build_request(turn, self.declared, gates=gated)
        signals = ("ids", "gates") if gated else ("ids",)
        model = _model(self.header, self.declared)
        check_request(
            request,
            Manifest(
                model=model, origin="imported", signals=signals, ragged=True, row_order="source"
            ),
            str(self.source),
        )
        self.layers |= set(np.asarray(self.declared)[request.event_layer].tolist())
        self.passes += request.passes
        self.events += request.events
        self.whole_events &= events_are_whole(request)

    def notes(self) -> Iterator[str]:
        """Yield a sentence about everything that the trace leaves out."""
        if self.padding_rows:
            yield f"{self.padding_rows:,} padding rows (expert -1) are left out"
        if self.unknown_weights:
            rows = f"{self.unknown_weights:,} rows"
            yield f"the trace has no gates, because the weight of {rows} is unknown (nan)"

    def manifest(self, stands_for: str | None) -> Manifest:
        """Return the manifest of the trace, without requests."""
        layers = tuple(sorted(self.layers))
        with self.source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        origin = f"{self.source.name} (SHA-256 {digest}), architecture {self.header.architecture}"
        ours = {k: v for k, v in package_versions().items() if k == "oled-sim"}
        return Manifest(
            model=_model(self.header, layers),
            origin="imported",
            signals=("ids",) if self.unknown_weights else ("ids", "gates"),
            stands_for=stands_for,
            decode=Decode(rule="autoregressive", block_length=1),
            runtime=Runtime(name="BigMoeOnEdge", device="unknown", packages=ours),
            prompts=Prompts(redacted=True),
            ragged=not self.whole_events or self.events != self.passes * len(layers),
            row_order="source",
            expert_bytes=tuple(self.header.expert_bytes[layer] for layer in layers),
            notes="; ".join((f"imported from {origin}", *self.header.comments)),
        )


def _survey(source: Path, on_progress: Callable[[float], None]) -> _Survey:
    with RouteCsv(source, on_progress) as file:
        survey = _Survey(source, file.header)
        for turn in file.turns():
            survey.add(turn)
        survey.padding_rows = file.padding_rows
        survey.unknown_weights = file.unknown_weights
    return survey


def _model(header: Header, layers: tuple[int, ...]) -> Model:
    return Model(
        name=header.model,
        layers=layers,
        experts=header.experts,
        top_k=header.top_k,
        total_layers=header.total_layers,
    )


def _prompt_tokens(request: RequestTrace) -> int:
    """Return the tokens before the first generated one, an earlier turn's included."""
    if request.kind[0] == Kind.PREFILL:
        return int(request.position[request.token_offset[1] - 1]) + 1
    return int(request.position[0])
