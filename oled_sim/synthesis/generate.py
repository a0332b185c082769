"""Writing a synthetic trace: requests made and written by several processes, listed by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry, find_geometry
from oled_sim.synthesis.parameters import DataSet
from oled_sim.synthesis.ranking import MOST_CANDIDATES
from oled_sim.synthesis.request import Recipe, make_request, prompt_tokens
from oled_sim.trace.manifest import Decode, Manifest, Model, Prompts, RequestEntry, Runtime
from oled_sim.trace.schema import SIGNALS
from oled_sim.trace.writer import TraceWriter, write_files
from oled_sim.workers import worker_processes

FITTED = "fitted"
"""The model that means: of the size of the trace that the data set was fitted on."""

COMPRESSION_LEVEL = 1
EDITING_THRESHOLD = 0.9
MAX_POST_STEPS = 16
BASE_SIGNALS = ("ids", "gates", "confidence", "token_state")


class PaperModel(NamedTuple):
    """``sized_like``: the LLaDA2.0 model of the same size. ``rule``: of decoding."""

    sized_like: str
    rule: str


MODELS = {
    "llada2.0-mini": PaperModel("llada2.0-mini", "2.0"),
    "llada2.0-flash": PaperModel("llada2.0-flash", "2.0"),
    "llada2.1-mini": PaperModel("llada2.0-mini", "2.1"),
    "llada2.1-flash": PaperModel("llada2.0-flash", "2.1"),
}
"""Models at the paper's scale: 2.1 differs by its rule of decoding, with editing."""


def make_recipe(
    data: DataSet,
    model: str,
    *,
    coupling: str = "measured",
    output_tokens: int = 1024,
    seed: int = 0,
    signals: tuple[str, ...] = (),
) -> Recipe:
    """Return what all requests of a trace share.

    Args:
        data: parameters of the data set.
        model: one of :data:`MODELS`, or :data:`FITTED`.
        coupling: setting of the confidence-stability relation.
        output_tokens: of every request. seed: of all random numbers.
        signals: ``full_gate`` and ``embedding`` where wanted.

    Raises:
        UsageError: an unknown model, or one that the data set has no parameters for.
    """
    if data.top_k > MOST_CANDIDATES:
        raise UsageError(f"top_k is {data.top_k}: synthetic routes have {MOST_CANDIDATES} at most")
    settings = {"coupling": coupling, "output_tokens": output_tokens, "seed": seed}
    if model == FITTED:
        geometry = RoutingGeometry(tuple(range(1, data.layers + 1)), data.experts, data.top_k)
        return Recipe(data, data.fitted_on, geometry, signals=signals, **settings)
    if model not in MODELS:
        raise UsageError(f"unknown model {model!r}: known are {', '.join(MODELS)}, {FITTED}")
    size, rule = MODELS[model]
    if size not in data.models:
        raise UsageError(f"the data set {data.name!r} has no parameters for {size}")
    cost = find_geometry(size)
    layers = tuple(range(cost.dense_layers, cost.layers))
    geometry = RoutingGeometry(layers, cost.experts, cost.top_k)
    return Recipe(data, size, geometry, edits=rule == "2.1", signals=signals, **settings)


def manifest_of(recipe: Recipe) -> Manifest:
    """Return the manifest of a synthetic trace without requests; it names what it was made from."""
    data, geometry = recipe.data, recipe.geometry
    own = recipe.model == data.fitted_on
    name = recipe.model.replace("2.0", "2.1") if recipe.edits else recipe.model
    return Manifest(
        model=Model(
            name=f"synthetic-{name}-{data.name}-{recipe.coupling}",
            layers=geometry.layers,
            experts=geometry.experts,
            top_k=geometry.top_k,
        ),
        stands_for="llada2.0-mini" if own else recipe.model,
        decode=Decode(
            rule="2.1" if recipe.edits else "2.0",
            block_length=data.block_length,
            threshold=data.confidence.threshold,
            editing_threshold=EDITING_THRESHOLD if recipe.edits else None,
            max_post_steps=MAX_POST_STEPS if recipe.edits else None,
            seed=recipe.seed,
            max_new_tokens=recipe.output_tokens,
        ),
        origin="synthetic",
        signals=tuple(s for s in SIGNALS if s in {*BASE_SIGNALS, *recipe.signals}),
        runtime=Runtime.here("oled-sim synth"),
        prompts=Prompts(source=f"none: synthetic, like {data.name}"),
        notes=f"synthetic; data set {data.name}, fitted on {data.fitted_on};"
        f" confidence-stability relation: {recipe.coupling}",
    )


def write_synthetic(
    path: Path,
    recipe: Recipe,
    requests: int,
    *,
    jobs: int = 1,
    overwrite: bool = False,
    on_request: Callable[[], None] = lambda: None,
) -> Manifest:
    """Write a synthetic trace; its bytes do not depend on ``jobs``.

    Args:
        path: directory of the trace.
        recipe: what its requests share. requests: how many.
        jobs: processes. overwrite: replace a trace that is there.
        on_request: called after each request.

    Raises:
        UsageError: the directory holds something and ``overwrite`` is not given.
        TraceError: the file system refuses.
    """
    manifest = manifest_of(recipe)
    with TraceWriter(path, manifest, overwrite=overwrite) as writer:
        work = partial(write_one, path, manifest, recipe)
        with _mapper(min(jobs, requests)) as mapped:
            for entry in mapped(work, range(requests)):
                writer.add(entry)
                on_request()
        return writer.manifest


def write_one(path: Path, manifest: Manifest, recipe: Recipe, request: int) -> RequestEntry:
    """Make one request and write its files; return its entry for the manifest."""
    trace = make_request(recipe, request)
    about = RequestEntry(
        request=request,
        prompt_tokens=prompt_tokens(recipe, request),
        output_tokens=recipe.output_tokens,
        passes=trace.passes,
        events=trace.events,
        files={},
    )
    return write_files(path, manifest, trace, about, COMPRESSION_LEVEL, check=False)


@contextmanager
def _mapper(jobs: int) -> Iterator[Callable[..., Iterator[RequestEntry]]]:
    """Yield a map over requests, in order, on so many processes."""
    if jobs <= 1:
        yield map
        return
    with worker_processes(jobs) as pool:
        # Not pool.map: stopped, it cancels what the pool's own thread then finds cancelled, and
        # that thread ends with a traceback.
        yield lambda work, requests: map(Future.result, [pool.submit(work, r) for r in requests])
