"""Measure what recording costs: decode time with and without the collector, same prompts.

Runs alternate (off, on, off, on, …) so that drift of the machine hits both alike; the figure is
the ratio of medians over whole generations, prefill included. Writing a finished request to disk is
timed apart (``write_seconds``). Tokens are compared too.

    python benchmarks/collector_overhead.py --device cuda --out benchmarks/results/NAME.json
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from oled_sim import plugins
from oled_sim.collection import PromptRequest
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import generate
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.loading import checkpoint_path, load_model, load_tokenizer
from oled_sim.prompts import bundled_prompts, read_prompts, read_templates
from oled_sim.trace import Manifest, Model, OpenRequest, TraceWriter
from oled_sim.trace.manifest import processor_name

SIGNAL_SETS = {"routing": (), "all signals": ("full_gate", "embedding", "cosines")}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that ``call`` took, device work included, and its result."""
    started = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def recorded(
    model: LLaDA2MoeModelLM, prompts: list[list[int]], settings: DecodeSettings, signals: Any
) -> tuple[float, float, Any]:
    """Generate for each prompt alone while recording; seconds of decoding, of writing, tokens."""
    config = model.config
    described = Model(
        name="nano", layers=config.moe_layers, experts=config.num_experts,
        top_k=config.num_experts_per_tok,
    )  # fmt: skip
    collector = plugins.load(plugins.COLLECTORS, "native")(model, signals=signals)
    manifest = Manifest(model=described, origin="real", signals=(*collector.SIGNALS, *signals))

    writing = 0.0

    def timed_finish(finish: Callable[..., None]) -> Callable[..., None]:
        def call(**values: Any) -> None:
            nonlocal writing
            started = time.perf_counter()
            finish(**values)
            writing += time.perf_counter() - started

        return call

    def record(prompt: list[int], target: OpenRequest) -> Any:
        target.finish = timed_finish(target.finish)
        return collector.record([PromptRequest(prompt, target)], settings)[0]

    def run() -> list[Any]:
        with TemporaryDirectory() as folder, TraceWriter(Path(folder) / "t", manifest) as writer:
            return [record(p, writer.begin(n)) for n, p in enumerate(prompts)]

    seconds, done = timed(run)
    return seconds - writing, writing, done


def measure(
    model: LLaDA2MoeModelLM, prompts: list[list[int]], settings: DecodeSettings, rounds: int
) -> dict[str, Any]:
    """Return seconds of every run, and the overhead of each set of signals in percent."""
    runs: dict[str, list[float]] = {"off": [], **{name: [] for name in SIGNAL_SETS}}
    writes: dict[str, list[float]] = {name: [] for name in SIGNAL_SETS}
    tokens_equal = True
    for _ in range(rounds + 1):  # the first round warms up
        seconds, plain = timed(lambda: [generate(model, [p], settings)[0] for p in prompts])
        runs["off"].append(seconds)
        for name, signals in SIGNAL_SETS.items():
            seconds, writing, done = recorded(model, prompts, settings, signals)
            runs[name].append(seconds)
            writes[name].append(writing)
            tokens_equal &= done == plain
    kept = {name: values[1:] for name, values in runs.items()}
    off = statistics.median(kept["off"])
    return {
        "seconds": kept,
        "write_seconds": {name: statistics.median(values[1:]) for name, values in writes.items()},
        "overhead_percent": {
            name: 100 * (statistics.median(kept[name]) / off - 1) for name in SIGNAL_SETS
        },
        "tokens_equal": tokens_equal,
    }


def main() -> None:
    """Parse arguments, measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--device", default=None)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = load_model(options.model, options.device)
    tokenizer = load_tokenizer(options.model)
    templates = read_templates(checkpoint_path(options.model))
    prompts = read_prompts(bundled_prompts(), limit=options.prompts, templates=templates)
    settings = DecodeSettings(max_new_tokens=options.max_new_tokens, threshold=0.7)
    result = measure(model, [tokenizer.encode(p.text) for p in prompts], settings, options.rounds)
    result |= {
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "processor": processor_name(),
        "dtype": str(model.dtype),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "prompts": options.prompts,
        "max_new_tokens": options.max_new_tokens,
        "date": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps(result, indent=2) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
