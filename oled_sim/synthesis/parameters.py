"""Parameters of synthetic routing: what they are called, what they mean, where they are kept.

One TOML file per data set ships with the package; ``scripts/fit_synthetic.py`` writes it.
docs/synthetic-traces.md explains the model behind the names.
"""

from __future__ import annotations

import difflib
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from oled_sim.errors import FileError, UsageError

Coupling = Literal["measured", "none", "positive"]
"""How confidence bears on route stability: as in the trace fitted, not at all, or strongly."""

COUPLINGS: tuple[str, ...] = get_args(Coupling)


class Routing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which experts a token prefers, and how that changes from pass to pass.

    Tastes are standard deviations of an expert's log rate (natural logarithm). Chances are shares
    of a token's candidates.

    Attributes:
        popularity: of a layer's experts, whatever is asked: the skew of the model.
        state_contrast: difference between what masks and what words prefer.
        request_taste: of one request. block_taste: of one block.
        block_persistence: correlation of a block's taste with that of the block before.
        masked_sharpness: factor on all tastes for masked tokens, which look alike.
        layer_spread: standard deviation over layers of the log of the factor on all tastes.
        neighbour_masked, neighbour_word: share of candidates shared with the left neighbour.
        carry: share of candidates that survive when a mask becomes a word.
        boundary_carry: share that a mask takes over from the token in its place one block before.
        drift, drift_word: share of its candidates that a mask or a word replaces for every token
            that a pass accepts.
        jitter_masked, jitter_word: standard deviation of the changing part of a log score.
        persistence_masked, persistence_word: correlation of that part from pass to pass.
        jitter_shared: share of its variance that masks of a block have in common.
        jitter_spread: standard deviation of the log of a token's jitter, drawn anew every pass.
    """

    popularity: float = 0.6
    state_contrast: float = 0.9
    request_taste: float = 0.25
    block_taste: float = 0.35
    block_persistence: float = 0.5
    masked_sharpness: float = 1.4
    layer_spread: float = 0.05
    neighbour_masked: float = 0.85
    neighbour_word: float = 0.06
    carry: float = 0.5
    boundary_carry: float = 0.02
    drift: float = 0.03
    drift_word: float = 0.003
    jitter_masked: float = 0.9
    jitter_word: float = 0.25
    persistence_masked: float = 0.6
    persistence_word: float = 0.5
    jitter_shared: float = 0.6
    jitter_spread: float = 0.9


class Confidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sure the model is of a token. All but rates are in logits (log odds).

    Attributes:
        masked_mean: of a mask without masks to its left in the block.
        depth: lost by a mask with many masks to its left; with m of them the share 1 - exp(-m /
            ``reach``) of it. shrink: that share times this is taken from its spreads too: what is
            far away is not easy or hard yet.
        neighbour_gain: gained while the token to the left is a word.
        block_spread: standard deviation over blocks: easy and hard ones.
        token_spread: standard deviation over tokens of a block, lasting.
        pass_spread: standard deviation over passes of a token.
        stretch: factor on logits above 0: masks that are likelier right than not get surer.
        word_mean, word_spread: of decoded and prompt tokens, lasting.
        word_pass_spread: standard deviation over passes of a word.
        threshold: confidence (0..1) from which a pass accepts a mask; at least one it always does.
        edit_rate: chance per pass that a generated word is replaced (rule 2.1).
    """

    masked_mean: float = 0.0
    depth: float = 2.0
    reach: float = 4.0
    shrink: float = 0.4
    neighbour_gain: float = 1.0
    block_spread: float = 0.5
    token_spread: float = 1.0
    pass_spread: float = 0.8
    stretch: float = 1.0
    word_mean: float = 4.5
    word_spread: float = 1.5
    word_pass_spread: float = 0.3
    threshold: float = 0.7
    edit_rate: float = 0.0


class Gates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gate scores: sigmoid(``slope`` × log score + ``offset``), of the k chosen renormalised.

    ``floor``: least log score of experts that are no candidates; only the full gate shows them.
    """

    slope: float = 0.6
    offset: float = -1.0
    floor: float = -3.0


class Prompts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths of prompts in tokens: log-normal, rounded, at least 8."""

    median_tokens: float = 80.0
    log_spread: float = 0.4


class Relation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One setting of the confidence-stability relation.

    A token whose confidence lies z standard deviations above the mean of its kind jitters
    exp(-effect · z) times as much (masked and decoded tokens; masks drift so too), or keeps
    candidates with log odds raised by effect · z when it is accepted. ``*_scale`` and
    ``accepted_shift`` keep the mean kept shares where they were.
    """

    masked: float = 0.0
    accepted: float = 0.0
    decoded: float = 0.0
    masked_scale: float = 1.0
    decoded_scale: float = 1.0
    accepted_shift: float = 0.0


class Moments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean and standard deviation of confidence (0..1) by what becomes of the token."""

    masked: tuple[float, float] = (0.35, 0.2)
    accepted: tuple[float, float] = (0.8, 0.15)
    decoded: tuple[float, float] = (0.97, 0.06)


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a statistic should be: its value, how far off is near enough, and who says so.

    ``source``: ``trace`` (measured), ``paper`` (printed there). ``fitted``: the fit saw it.
    """

    value: float
    tolerance: float
    fitted: bool = True
    source: Literal["trace", "paper"] = "trace"


class Scale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of another size: what differs from the data set's own fit."""

    routing: dict[str, float] = {}
    couplings: dict[str, Relation] = {}
    targets: dict[str, Target] = {}


class DataSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a data set's synthetic requests are made from.

    Attributes:
        name: of the data set.
        fitted_on: name of the trace whose statistics were fitted.
        trace_sha256: checksum in that trace's manifest.
        layers, experts, top_k, block_length: of that trace.
        requests, output_tokens: of that trace; ``output_tokens`` is the mean of a request.
    """

    name: str
    fitted_on: str
    trace_sha256: str = ""
    layers: int = 8
    experts: int = 128
    top_k: int = 8
    block_length: int = 16
    requests: int = 10
    output_tokens: int = 104
    routing: Routing = Routing()
    confidence: Confidence = Confidence()
    gates: Gates = Gates()
    prompts: Prompts = Prompts()
    moments: Moments = Moments()
    couplings: dict[str, Relation] = {}
    targets: dict[str, Target] = {}
    models: dict[str, Scale] = {}

    def routing_for(self, model: str) -> Routing:
        """Return the routing parameters for a model; ``fitted_on``'s own without overrides."""
        scale = self.models.get(model)
        return msgspec.structs.replace(self.routing, **scale.routing) if scale else self.routing

    def relation(self, model: str, coupling: str) -> Relation:
        """Return a setting of the confidence-stability relation for a model."""
        scale = self.models.get(model)
        found = scale.couplings if scale and scale.couplings else self.couplings
        return found.get(coupling, Relation())


_FOLDER = files("oled_sim.synthesis") / "parameters"


def data_sets() -> list[str]:
    """Return the names of the data sets that parameters ship for, sorted."""
    names = [entry.name for entry in _FOLDER.iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_data_set(name: str) -> DataSet:
    """Read the parameters of a data set, or of any ``.toml`` file.

    Raises:
        UsageError: no such data set (the sentence suggests the nearest), or no file that can be
            read.
        FileError: the file breaks the format.
    """
    if name.endswith(".toml"):
        from oled_sim.synthesis.checking import check_values

        data = _read(Path(name))
        check_values(data, name)
        return data
    if name in (known := data_sets()):
        return _read(_FOLDER / f"{name}.toml")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"no synthetic data set {name!r}: {hint}known are {', '.join(known)}")


def _read(path: Any) -> DataSet:
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), DataSet)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FileError(f"{path} is not a text file in UTF-8") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise FileError(f"{path} holds no synthesis parameters: {error}") from None


def to_toml(data: DataSet) -> str:
    """Return the text of a data set's file; the same parameters give the same text."""
    lines: list[str] = []
    _table(msgspec.to_builtins(data), "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(values: dict[str, Any], path: str, lines: list[str]) -> None:
    plain = {key: v for key, v in values.items() if not isinstance(v, dict)}
    if path and (plain or not values):
        lines += ["", f"[{path}]"]
    lines += [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, dict):
            name = key if key.replace("_", "").replace("-", "").isalnum() else f'"{key}"'
            _table(value, f"{path}.{name}" if path else name, lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(v) for v in value)}]"
    return msgspec.json.encode(value).decode()
