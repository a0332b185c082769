"""Where an offloaded run leaves the path of the resident one, and how narrow the choice was there.

Sums in another order or other kernels change the last bits of a layer's output. Nothing comes of
it until a choice is narrower than that: an expert in or out, a token above the threshold or below,
one word or another. From then on the two runs see different inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled_sim.model.decoding import DecodeSettings
from oled_sim.offloaded.recording import Margins, RecordedPass, Recording
from oled_sim.trace.schema import Kind


@dataclass(frozen=True)
class Divergence:
    """The first choice in which a request differs from its resident run.

    Attributes:
        request, pass_index: where; passes count from the prefill.
        kind: of the pass.
        cause: ``router``, ``acceptance``, ``edit`` or ``token``.
        layer: the model's own index, for routers.
        position: of the token in the request.
        margin: by how much the resident run had chosen as it did, in units of the scores compared:
            biased gate scores or group strengths, probability, or logits.
        what: a sentence that says what differs.
    """

    request: int
    pass_index: int
    kind: str
    cause: str
    layer: int | None
    position: int
    margin: float
    what: str


def first_divergence(
    resident: Recording, other: Recording, layers: Sequence[int], settings: DecodeSettings
) -> Divergence | None:
    """Return the first difference of two runs of one request, in the order of execution.

    Args:
        resident: with margins. other: the run compared with it.
        layers: the model's own indices of the MoE layers.
        settings: how both decoded.
    """
    # A difference shows before either run ends earlier than the other.
    for p, (mine, theirs) in enumerate(zip(resident.passes, other.passes, strict=False)):
        found = _by_router(mine, theirs, layers) or _by_acceptance(mine, theirs, settings)
        if found is not None:
            cause, layer, position, margin, what = found
            kind = Kind(mine.record.kind).name.lower()
            return Divergence(
                resident.request, p, kind, cause, layer, position, float(margin), what
            )
    return None


_Found = tuple[str, int | None, int, float, str]


def _margins(recorded: RecordedPass) -> Margins:
    if recorded.margins is None:
        raise ValueError("the resident run was recorded without margins")
    return recorded.margins


def _by_router(mine: RecordedPass, theirs: RecordedPass, layers: Sequence[int]) -> _Found | None:
    for i, layer in enumerate(layers):
        a, b = np.sort(mine.routes[i], axis=1), np.sort(theirs.routes[i], axis=1)
        differing = np.flatnonzero((a != b).any(axis=1))
        if len(differing):
            token = int(differing[0])
            position = int(mine.record.positions[token])
            return "router", layer, position, *_router_margin(mine, i, token, a[token], b[token])
    return None


def _router_margin(
    mine: RecordedPass, layer: int, token: int, a: NDArray[np.int64], b: NDArray[np.int64]
) -> tuple[float, str]:
    margins = _margins(mine)
    lost, won = np.setdiff1d(a, b), np.setdiff1d(b, a)
    kept = margins.kept[layer, token]
    said = f"experts {lost.tolist()} became {won.tolist()}"
    if (~kept[won // (margins.experts // len(kept))]).any():
        return margins.group[layer, token], f"{said}, of a group that had not been kept"
    return margins.expert[layer, token], said


def _by_acceptance(
    mine: RecordedPass, theirs: RecordedPass, settings: DecodeSettings
) -> _Found | None:
    (accepted, edited), (their_accepted, their_edited) = mine.choice, theirs.choice
    block = len(accepted)
    position = mine.record.positions[-block:]
    for i in np.flatnonzero(accepted != their_accepted)[:1]:
        margin, what = _acceptance_margin(mine, theirs, int(i), settings)
        return "acceptance", None, int(position[i]), margin, what
    for i in np.flatnonzero(edited != their_edited)[:1]:
        probability = float(mine.prediction.probability[i])
        margin = abs(probability - settings.editing_threshold)
        what = f"probability {probability:.6f}, editing threshold {settings.editing_threshold}"
        return "edit", None, int(position[i]), margin, what
    written, their_written = mine.record.written[-block:], theirs.record.written[-block:]
    for i in np.flatnonzero(written != their_written)[:1]:
        what = f"token {written[i]} became {their_written[i]}"
        if settings.temperature > 0:
            what += ", sampled"
        return "token", None, int(position[i]), float(_margins(mine).logit[i]), what
    return None


def _acceptance_margin(
    mine: RecordedPass, theirs: RecordedPass, i: int, settings: DecodeSettings
) -> tuple[float, str]:
    """Return the distance to the threshold, or to the rank that a quota ended at."""
    confidence, other = mine.prediction.probability, theirs.prediction.probability
    accepted = mine.choice[0]
    sides = (p[i] > np.float32(settings.threshold) for p in (confidence, other))
    said = f"confidence {confidence[i]:.6f} became {other[i]:.6f}"
    if tuple(sides) == (accepted[i], theirs.choice[0][i]):
        margin = abs(float(confidence[i]) - settings.threshold)
        return margin, f"{said}, threshold {settings.threshold}"
    masked = mine.record.state[-len(accepted) :] == 0
    rivals = confidence[masked & (accepted != accepted[i])]
    nearest = rivals.min() if not accepted[i] else rivals.max()
    return abs(float(confidence[i] - nearest)), f"{said}, among the best of a pass's quota"
