"""Make a small copy of a trace for the repository: some requests, rounded gates, slow zstd.

``python scripts/bundle_trace.py SOURCE TARGET --requests 16 --unit 512`` keeps the first 16
requests. Gate scores become multiples of 1/512 that still sum to 1 in every row; the block-mean
full gate keeps ``--full-gate-bits`` of its mantissa. Expert ids, states and confidence stay as
they are. The manifest says so in ``notes``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from oled_sim.trace import RequestTrace, open_trace
from oled_sim.trace.writer import TraceWriter

COMPRESSION_LEVEL = 19
LICENCES = {
    "gsm8k_test.jsonl": "MIT, © 2021 OpenAI",
    "humaneval.jsonl.gz": "MIT, © OpenAI",
    "science.jsonl": "MIT, © 2020 Dan Hendrycks (MMLU)",
}


def main() -> None:
    """Copy the trace."""
    chosen = _parse()
    source = open_trace(str(chosen.source))
    manifest = source.manifest
    notes = _notes(chosen, len(manifest.requests), manifest.signals)
    prompts = msgspec.structs.replace(
        manifest.prompts, licence=LICENCES.get(manifest.prompts.source, "")
    )
    bundled = msgspec.structs.replace(manifest, notes=notes, prompts=prompts)
    options = {"overwrite": chosen.overwrite, "compression_level": COMPRESSION_LEVEL}
    with TraceWriter(chosen.target, bundled, **options) as writer:
        for entry in manifest.requests[: chosen.requests]:
            writer.write_request(
                rounded(source.read(entry.request), chosen.unit, chosen.full_gate_bits),
                prompt_tokens=entry.prompt_tokens,
                output_tokens=entry.output_tokens,
                finish_reason=entry.finish_reason,
                prompt_row=entry.prompt_row,
                prompt_sha256=entry.prompt_sha256,
            )


def rounded(request: RequestTrace, unit: int, full_gate_bits: int) -> RequestTrace:
    """Return the request with coarser gate scores."""
    assert request.gates is not None
    full_gate = request.full_gate
    return replace(
        request,
        gates=round_to_unit(request.gates, unit),
        full_gate=None if full_gate is None else round_mantissa(full_gate, full_gate_bits),
    )


def round_to_unit(gates: NDArray[np.float16], unit: int) -> NDArray[np.float16]:
    """Round rows [n, k] that sum to 1 to multiples of 1/``unit`` that sum to 1 exactly.

    The largest remainders are rounded up (Hamilton's method), at equal ones the earlier slot, so
    the order of the slots stays and no score moves by 1/``unit`` or more.
    """
    exact = gates.astype(np.float64)
    exact *= unit / exact.sum(axis=1, keepdims=True)
    whole = np.floor(exact)
    missing = np.rint(unit - whole.sum(axis=1)).astype(np.int64)
    order = np.argsort(whole - exact, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(gates.shape[1])[None], axis=1)
    return ((whole + (rank < missing[:, None])) / unit).astype(np.float16)


def round_mantissa(values: NDArray[np.float16], bits: int) -> NDArray[np.float16]:
    """Round to ``bits`` of the ten stored mantissa bits, half to even, exponents untouched."""
    fraction, exponent = np.frexp(values.astype(np.float32))
    scale = np.float32(1 << (bits + 1))
    return np.ldexp(np.rint(fraction * scale) / scale, exponent).astype(np.float16)


def _notes(chosen: argparse.Namespace, recorded: int, signals: tuple[str, ...]) -> str:
    parts = [
        f"The first {min(chosen.requests, recorded)} of {recorded} requests recorded.",
        f"Gate scores are rounded to multiples of 1/{chosen.unit} that sum to 1 in every row.",
    ]
    if "full_gate" in signals:
        parts.append(f"The full gate keeps {chosen.full_gate_bits} mantissa bits.")
    return " ".join(parts)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--requests", type=int, default=1 << 30)
    parser.add_argument("--unit", type=int, default=512)
    parser.add_argument("--full-gate-bits", type=int, default=4)
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
