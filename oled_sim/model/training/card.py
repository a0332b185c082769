"""The model card, written from what was measured (:data:`REPORT_FILE`), with the loss curve.

``python -m oled_sim.model.training.card --model DIR`` writes it again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from oled_sim.model.training.report import REPORT_FILE, read_report, write_atomically

CARD_FILE = "MODEL_CARD.md"
CURVE_FILE = "loss.png"

_CALIBRATION = ("threshold", "source", "tokens", "tokens per pass", "confidence", "accuracy")


def write_card(folder: Path) -> None:
    """Write the card and the loss curve beside a model's report."""
    report = read_report(folder / REPORT_FILE)
    write_atomically(folder / CURVE_FILE, draw_curve(report["curve"]))
    write_atomically(folder / CARD_FILE, card_text(report).encode())


def draw_curve(records: Sequence[Mapping[str, float]]) -> bytes:
    """Return a PNG of loss and router imbalance over training time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    loss, load = figure.subplots(1, 2)
    kept = [record for record in records if "loss" in record]
    seconds = [record["seconds"] for record in kept]
    loss.plot(seconds, [record["loss"] for record in kept], lw=1, color="#1f5fa8")
    loss.set(xlabel="training time (s)", ylabel="loss (nats per masked token)")
    loss.set_ylim(0, min(5.0, max((r["loss"] for r in kept), default=1.0) * 1.05))
    load.plot(seconds, [record["imbalance"] for record in kept], lw=1, color="#a8551f")
    load.set(xlabel="training time (s)", ylabel="expert load, max / mean", ylim=(0, 6))
    for axes in (loss, load):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    png = BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def card_text(report: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    sections = (
        _head(report),
        _data(report),
        _training(report),
        _quality(report),
        _speed(report),
        _samples(report),
    )
    return "\n".join(sections)


def _head(report: Mapping[str, Any]) -> str:
    model, name = report["recipe"]["model"], report["recipe"]["name"]
    moe_layers = model["num_hidden_layers"] - model["first_k_dense_replace"]
    return f"""# llada2-{name}

A block-diffusion language model with LLaDA2's architecture, trained from scratch for
expert-offloading experiments: small enough to ship, with routing, confidence and parallel
acceptance that are real. It is no assistant: it imitates the form of worked arithmetic and of
Python code, and its results are usually wrong.

| | |
|---|---|
| parameters | {report["parameters"]:,} |
| layers | {model["num_hidden_layers"]}, of which {moe_layers} with experts |
| experts per layer | {model["num_experts"]} (top {model["num_experts_per_tok"]}, \
{model["topk_group"]} of {model["n_group"]} groups) and {model["num_shared_experts"]} shared |
| hidden / expert width | {model["hidden_size"]} / {model["moe_intermediate_size"]} |
| heads / key-value heads / head width | {model["num_attention_heads"]} / \
{model["num_key_value_heads"]} / {model["head_dim"]} |
| vocabulary | {model["vocab_size"]}, byte-level BPE, every digit a token |
| weights | bf16, expert biases fp32, published LLaDA2 tensor names |
| licence | Apache-2.0; notices of the training data in LICENSES.md |

Prompts: word problems as `Question: …` and, on the next line, `Steps:`; program heads as they
are. `prompt.json` maps the field of a prompt row to its layout.
"""


def _data(report: Mapping[str, Any]) -> str:
    epochs = report["training"]["epochs"]
    rows = [
        (
            source["name"],
            source["file"] or "Python standard library",
            source["licence"],
            f"{report['data_tokens'][source['name']]['train']:,}",
            f"{report['data_tokens'][source['name']]['validation']:,}",
            f"{source['weight'][0]:g} → {source['weight'][1]:g}",
            f"{epochs.get(source['name'], 0):g}",
        )
        for source in report["recipe"]["data"]["sources"]
    ]
    columns = ("source", "from", "licence", "tokens", "held out", "share over time", "epochs")
    return f"""## Data

{_table(columns, rows)}

`gsm8k` is the training set alone, its calculator notes kept; `worked` and `maths` are the parts
of the generated arithmetic with and without steps; `programs` are small Python programs after a
description of their task. Held-out documents are chosen by a hash of their content (per file
for the standard library). Test sets served as prompts only.
"""


def _training(report: Mapping[str, Any]) -> str:
    training, environment, noise = report["training"], report["environment"], report["recipe"]
    noise, optimizer = noise["noise"], report["recipe"]["optimizer"]
    lengths = ", ".join(f"{length} ({share:.0%})" for length, share in noise["block_lengths"])
    return f"""## Training

{training["seconds"]:.0f} s on one {environment["device"]} (torch {environment["torch"]}, Python
{environment["python"]}), {training["first_step_seconds"]:.0f} s of compilation before;
{training["steps"]:,} steps, {training["tokens"] / 1e6:.0f} M window tokens.

Sequences hold {noise["copies"]} noisy copies of a window and the clean one; a noisy block sees
itself and the clean blocks before it. Block lengths: {lengths}. The noise level is uniform per
block{", masks of the copies are complementary" if noise["complementary"] else ""};
{noise["prefix_share"]:.0%} of the blocks show a prefix and mask the rest; in
{noise["edit_share"]:.0%} the visible tokens count in the loss, {noise["edit_rate"]:.0%} of them
replaced (LLaDA2.1's editing). Loss: mean cross-entropy, no weight by noise level. Matrices are
stepped by {optimizer["matrices"]} at {optimizer["matrix_rate"]:g}, the rest by adamw at
{optimizer["rate"]:g}, linear decay to zero. Experts are balanced by the selection bias alone:
{optimizer["bias_rate"]:g} per step against the sign of the excess load.

{_temperature(report["temperature"])}

![loss and router balance]({CURVE_FILE})

To rebuild:
`python -m oled_sim.model.training --recipe {report["recipe"]["name"]} --data DATA --out DIR`.
The schedule follows the clock, so weights differ from run to run; the figures below should not.
Everything measured is in `{REPORT_FILE}`.
"""


def _temperature(temperature: float) -> str:
    if temperature == 1:
        return "No temperature was fitted."
    return f"""Final logits are divided by {temperature:g}, a temperature fitted on held-out
text that the figures below leave out, and folded into the final norm: many passes through little
text had made the model too sure of itself."""


def _quality(report: Mapping[str, Any]) -> str:
    elbo, how = report["elbo_nats_per_token"], report["evaluation"]
    return f"""## Likelihood and balance

Measured on {how["device"]} with torch {how["torch"]}, {how["windows"]} held-out windows of
{report["recipe"]["data"]["window"]} tokens per source, {how["strata"]} noise levels each.

Upper bound on the negative log-likelihood of held-out text (masked-diffusion ELBO, 1/t weight,
block length {how["block_length"]}), nats per token; `mixture` weights sources as in training:

{_table(elbo.keys(), [[f"{value:.3f}" for value in elbo.values()]])}

Largest over mean load of the experts of a layer, on held-out text:

{_table(report["router"].keys(), [[f"{value:.2f}" for value in report["router"].values()]])}
"""


def _speed(report: Mapping[str, Any]) -> str:
    answers = [
        (
            threshold,
            f"{figures['tokens_per_denoise_pass']:.2f}",
            f"{figures['tokens_per_pass']:.2f}",
            f"{figures['output_tokens'] / figures['requests']:.0f}",
            f"{figures['ended']:.0%}",
            f"{figures['right_results']:.1%}",
        )
        for threshold, figures in report["answers"].items()
    ]
    calibration = [
        (
            threshold,
            source,
            f"{figures['tokens']:,}",
            f"{figures['tokens_per_pass']:.2f}",
            f"{figures['confidence']:.3f}",
            f"{figures['accuracy']:.3f}",
        )
        for threshold, by_source in report["acceptance"].items()
        for source, figures in by_source.items()
    ]
    requests = next(iter(report["answers"].values()))["requests"]
    columns = ("threshold", "per denoising pass", "per pass", "length", "ended", "right")
    return f"""## Tokens per pass and calibration

GSM8K test questions (the first {requests}), LLaDA2.0's rule, 32 steps, greedy. Output tokens
up to and including the first end-of-text. *Per denoising pass*: those accepted by denoising
passes over such passes, prefill and commit left out. *Per pass*: all over prefill and denoising
passes.

{_table(columns, answers)}

Held-out text, accepted positions filled with the true token (blocks independent): mean
confidence of accepted tokens and share of them that are right.

{_table(_CALIBRATION, calibration)}
"""


def _samples(report: Mapping[str, Any]) -> str:
    samples = [
        f"Row {sample['row']}:\n\n```text\n{sample['text'].strip()}\n```\n"
        for sample in report["samples"]
    ]
    return f"""## Samples

Continuations of the first {len(samples)} GSM8K test questions at threshold 0.7, unselected
(row numbers count from 0 in `gsm8k_test.jsonl`; the questions are not repeated here).

{chr(10).join(samples)}"""


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = list(columns)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the card of a trained model from its report."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True)
    write_card(parser.parse_args(arguments).model)


if __name__ == "__main__":
    main()
