"""Fit the parameters of synthetic traces to traces of real models.

    python scripts/fit_synthetic.py gsm8k=mini-gsm8k,mini-gsm8k-signals

Each argument is a data set and the trace to fit it on (a bundled name or a directory), and after a
comma another trace of the same model that holds the full gate, if the first does not. A data set
alone keeps what was fitted on the trace and fits the relations and the paper's sizes again. Writes
``oled_sim/synthesis/parameters/<data set>.toml``. Takes a few minutes for each on one core; the
same traces give the same files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from oled_sim.synthesis import fitting, targets
from oled_sim.synthesis.generate import make_recipe
from oled_sim.synthesis.parameters import DataSet, Scale, Target, load_data_set, to_toml
from oled_sim.trace import open_trace

FOLDER = Path(__file__).parent.parent / "oled_sim" / "synthesis" / "parameters"


def fit(name: str, source: str, signals: str = "") -> DataSet:
    """Return the parameters of a data set fitted on a trace; ``signals`` may have the full gate."""
    data = targets.start_from(name, open_trace(source), open_trace(signals) if signals else None)
    print(f"{name}: confidence", flush=True)
    data = fitting.fit_confidence(data, note=_say)
    print(f"{name}: routing", flush=True)
    data = fitting.fit_routing(data, note=_say)
    print(f"{name}: gates", flush=True)
    return fitting.fit_gates(data, note=_say)


def fit_rest(data: DataSet) -> DataSet:
    """Return the parameters with the three relations, and with those of the paper's sizes."""
    name = data.name
    print(f"{name}: relations", flush=True)
    own = fitting.own_recipe(data)
    couplings = fitting.fit_couplings(data, own, data.requests, note=_say)
    data = msgspec.structs.replace(data, couplings=couplings)
    for model, wanted in targets.PAPER.items():
        print(f"{name}: {model}", flush=True)
        data = _fit_size(data, model, wanted)
    return data


def _fit_size(data: DataSet, model: str, wanted: dict[str, Target]) -> DataSet:
    def with_scale(scale: Scale) -> DataSet:
        return msgspec.structs.replace(data, models=data.models | {model: scale})

    recipe = make_recipe(with_scale(Scale()), model, coupling="none", output_tokens=256)
    routing = fitting.fit_size(data, recipe, wanted, note=_say)
    scale = Scale(routing=routing, targets=wanted)
    recipe = make_recipe(with_scale(scale), model, coupling="none", output_tokens=256)
    couplings = fitting.fit_couplings(recipe.data, recipe, 2, note=_say)
    return with_scale(msgspec.structs.replace(scale, couplings=couplings))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, _, sources = argument.partition("=")
        found = fit_rest(fit(name, *sources.split(",")) if sources else load_data_set(name))
        (FOLDER / f"{name}.toml").write_text(to_toml(found), encoding="utf-8")
