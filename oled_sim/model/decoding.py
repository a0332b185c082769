"""Block-diffusion decoding: settings and acceptance rules.

Nothing here needs torch: a forward pass is a :class:`Prediction` per position of the block, so
the rules can be checked by hand. Source: ``generate`` of the published LLaDA2.0 and 2.1 remote
code, with argmax at temperature 0 (as 2.1, dInfer and SGLang have it: the 2.0 original draws
from the distribution even then).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import UsageError

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """How to generate.

    Attributes:
        block_length: tokens per block L; blocks are counted from position 0 of the prompt.
        max_new_tokens: most tokens to generate.
        steps: denoising passes per block over which rule 2.0 spreads its quota.
        threshold: a masked position is accepted when its confidence is above this.
        minimal_topk: bounds ``steps`` to ``max_new_tokens // minimal_topk`` (rule 2.0).
        rule: ``"2.0"`` (quota per step) or ``"2.1"`` (editing and post steps).
        editing_threshold: rule 2.1 overwrites a decoded token whose position prefers another
            one with more than this probability.
        max_post_steps: rule 2.1 runs at most this many passes on a block without masks.
        num_to_transfer: rule 2.1 accepts at least this many positions per pass.
        temperature: 0 is greedy; above, candidates are sampled from softmax(logits / T).
            Confidence is always taken from the untempered distribution.
        seed: of the sampling; each request draws from its own stream.
        prefix_cache: keep keys and values of finished blocks; without, every pass runs the
            whole window, as the published remote code does.
        eos_early_stop: rule 2.0 stops inside a block once everything before an accepted
            end-of-text token is decoded. A block that holds one always ends the request.
        ignore_eos: end-of-text is never a candidate, so every request has all its new tokens.

    Raises:
        UsageError: a value is out of range.
    """

    block_length: int = 16
    max_new_tokens: int = 256
    steps: int = 32
    threshold: float = 0.95
    minimal_topk: int = 1
    rule: Literal["2.0", "2.1"] = "2.0"
    editing_threshold: float = 0.9
    max_post_steps: int = 16
    num_to_transfer: int = 1
    temperature: float = 0.0
    seed: int = 0
    prefix_cache: bool = True
    eos_early_stop: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("block_length", "max_new_tokens", "steps", "minimal_topk", "num_to_transfer"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: at least 1")
        for name in ("max_post_steps", "temperature", "seed"):
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}: at least 0")
        for name in ("threshold", "editing_threshold"):
            value = getattr(self, name)
            _require(0.0 <= value <= 1.0, f"{name} is {value}: it lies between 0 and 1")
        _require(self.rule in ("2.0", "2.1"), f"no decoding rule {self.rule!r}: use 2.0 or 2.1")
        _require(
            self.minimal_topk <= self.max_new_tokens,
            f"minimal_topk {self.minimal_topk} exceeds max_new_tokens {self.max_new_tokens}",
        )

    def quota(self, step: int) -> int:
        """Positions that rule 2.0 accepts at least in denoising pass ``step`` of a block.

        Summed over the steps this is ``block_length``, so a block is always finished in time.
        """
        steps = min(self.steps, self.max_new_tokens // self.minimal_topk)
        share, rest = divmod(self.block_length, steps)
        return share + (step < rest)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UsageError(otherwise)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a pass says about the L positions of the block.

    Attributes:
        candidate: int64 [L], the token to write (argmax, or a sample); never the mask token.
        probability: float32 [L], its probability.
        best: float32 [L], probability of the argmax; equal to ``probability`` when greedy.
        held: float32 [L], probability of the token the position held (of no use at a mask).
    """

    candidate: NDArray[np.int64]
    probability: NDArray[np.float32]
    best: NDArray[np.float32]
    held: NDArray[np.float32]


def accept(
    confidence: NDArray[np.float32], masked: Bools, threshold: float, at_least: int
) -> Bools:
    """Choose masked positions to accept: those above the threshold, or the best few.

    Args:
        confidence: [L].
        masked: [L], positions that may be accepted.
        threshold: strict.
        at_least: when fewer positions than this pass the threshold, this many of the most
            confident ones (as far as there are) are accepted instead; ties go to the left.

    Returns:
        [L].
    """
    above = masked & (confidence > np.float32(threshold))
    if np.count_nonzero(above) >= at_least:
        return above
    ranked = np.argsort(np.where(masked, -confidence, np.inf), kind="stable")
    best = np.zeros_like(masked)
    best[ranked[:at_least]] = True
    return best & masked


def edit(
    prediction: Prediction, current: NDArray[np.int64], editable: Bools, threshold: float
) -> Bools:
    """Choose decoded positions to overwrite: another token is preferred above the threshold.

    Args:
        prediction: of the pass.
        current: [L], tokens held.
        editable: [L], neither masked nor part of the prompt.
        threshold: strict.

    Returns:
        [L].
    """
    differs = prediction.candidate != current
    return editable & differs & (prediction.probability > np.float32(threshold))
