"""How long importers take for ten million rows, and how much memory.

    python benchmarks/importing.py [--rows 10000000] [--only FORMAT]

Writes made-up recordings of an autoregressive model (8 layers × 64 experts, top 2) to a temporary
folder and imports each in a process of its own: as 20 requests, and as a single one. A row is a
line of the file: a token in a layer (for ``route-csv`` one of its experts); in the arrays it is a
token in a layer. Times are processor times; memory is the peak resident size of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
from numpy.typing import NDArray

LAYERS, EXPERTS, TOP_K, PROMPT = 8, 64, 2, 128
CHUNK_TOKENS = 1 << 14
FORMATS = {
    "csv": ".csv",
    "route-csv": ".route.csv",
    "route-jsonl": ".jsonl",
    "routed-experts": ".npz",
}
EXPERT_OPTION = {"csv", "route-jsonl", "routed-experts"}


def routes(rng: np.random.Generator, tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ids [tokens, layers, k], distinct and never 0, and weights that sum to 1."""
    first = rng.integers(1, EXPERTS, (tokens, LAYERS))
    second = (first + rng.integers(1, EXPERTS - 1, first.shape) - 1) % (EXPERTS - 1) + 1
    weight = rng.uniform(0.5, 0.9, first.shape).round(3)
    return np.stack([first, second], -1), np.stack([weight, 1 - weight], -1)


def chunks(requests: int, tokens: int) -> Iterator[tuple[int, int, NDArray[Any], NDArray[Any]]]:
    """Yield request, first token, ids and weights; each token goes through all layers in turn."""
    rng = np.random.default_rng(0)
    for request in range(requests):
        for start in range(0, tokens, CHUNK_TOKENS):
            yield request, start, *routes(rng, min(CHUNK_TOKENS, tokens - start))


def columns(request: int, start: int, ids: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return request, token and layer of every row."""
    token = np.repeat(np.arange(start, start + len(ids)), LAYERS)
    return {
        "request": np.full(len(token), request),
        "token": token,
        "layer": np.tile(np.arange(LAYERS), len(ids)),
    }


def write_csv(path: Path, requests: int, tokens: int) -> None:
    """One line per token and layer."""
    options = pcsv.WriteOptions(include_header=False)
    with path.open("wb") as file:
        file.write(b"request,token,layer,expert_0,expert_1,gate_0,gate_1\n")
        for request, start, ids, weights in chunks(requests, tokens):
            flat = columns(request, start, ids)
            for k in range(TOP_K):
                flat[f"expert_{k}"] = ids[..., k].ravel()
            for k in range(TOP_K):
                flat[f"gate_{k}"] = weights[..., k].ravel().astype(np.float32)
            pcsv.write_csv(pa.table(flat), file, options)


def write_route_csv(path: Path, requests: int, tokens: int) -> None:
    """One line per token, layer and slot."""
    options = pcsv.WriteOptions(include_header=False)
    header = ["# route_trace v1", f"# model=m arch=a n_layer={LAYERS} n_expert={EXPERTS}"]
    header[1] += f" n_expert_used={TOP_K}"
    header += [f"# layer={layer} expert_bytes=9" for layer in range(LAYERS)]
    header += ["turn,phase,step,layer,slot,expert,weight"]
    with path.open("wb") as file:
        file.write("".join(line + "\n" for line in header).encode())
        for request, start, ids, weights in chunks(requests, tokens):
            flat = {n: v.repeat(TOP_K) for n, v in columns(request, start, ids).items()}
            table = {
                "turn": flat["request"],
                "phase": np.ones_like(flat["token"]),
                "step": flat["token"],
                "layer": flat["layer"],
                "slot": np.tile(np.arange(TOP_K), len(flat["token"]) // TOP_K),
                "expert": ids.ravel(),
                "weight": weights.ravel().astype(np.float32),
            }
            pcsv.write_csv(pa.table(table), file, options)


def write_route_jsonl(path: Path, requests: int, tokens: int) -> None:
    """One object per token and layer."""
    with path.open("w") as file:
        file.write(json.dumps({"type": "meta", "model_id": "m", "top_k": TOP_K}) + "\n")
        for request, start, ids, weights in chunks(requests, tokens):
            flat = columns(request, start, ids)
            pairs = zip(
                flat["token"].tolist(),
                flat["layer"].tolist(),
                ids.reshape(-1, TOP_K).tolist(),
                weights.reshape(-1, TOP_K).round(3).tolist(),
                strict=True,
            )
            file.writelines(
                f'{{"type": "route", "req_id": "r{request}", "token_idx": {token},'
                f' "layer": {layer}, "topk_ids": {row}, "topk_weights": {weight}}}\n'
                for token, layer, row, weight in pairs
            )


def write_routed_experts(path: Path, requests: int, tokens: int) -> None:
    """One array per request."""
    arrays: dict[str, NDArray[Any]] = {}
    rng = np.random.default_rng(0)
    for request in range(requests):
        arrays[f"{request}/routed_experts"] = routes(rng, tokens)[0].astype(np.int16)
    np.savez(path, allow_pickle=False, **arrays)


WRITERS = {
    "csv": write_csv,
    "route-csv": write_route_csv,
    "route-jsonl": write_route_jsonl,
    "routed-experts": write_routed_experts,
}


def measure(form: str, path: Path, out: Path) -> dict[str, float]:
    """Import in a fresh process; return processor seconds, wall seconds and peak MiB."""
    call = [sys.executable, __file__, "--measure", form, str(path), str(out)]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure_here(form: str, path: Path, out: Path) -> None:
    """Print what :func:`measure` returns."""
    from oled_sim import plugins

    options: dict[str, Any] = {"experts": EXPERTS} if form in EXPERT_OPTION else {}
    if form in EXPERT_OPTION:
        options["prompt_tokens"] = PROMPT
    began = time.monotonic()
    plugins.load(plugins.IMPORTERS, form)(path, out, **options)
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - began,
        "peak_mib": used.ru_maxrss / 1024,
    }
    print(json.dumps(figures))


def main() -> None:
    """Measure every format."""
    parser = argparse.ArgumentParser(description="Time importers.")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--only", choices=list(FORMATS))
    parser.add_argument("--measure", nargs=3, metavar=("FORMAT", "FILE", "OUT"))
    arguments = parser.parse_args()
    if arguments.measure:
        form, path, out = arguments.measure
        measure_here(form, Path(path), Path(out))
        return
    for form in [arguments.only] if arguments.only else FORMATS:
        for requests in (20, 1):
            per_token = LAYERS * (TOP_K if form == "route-csv" else 1)
            tokens = arguments.rows // requests // per_token
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"made{FORMATS[form]}"
                WRITERS[form](path, requests, tokens)
                found = measure(form, path, Path(folder) / "out")
                size = path.stat().st_size / 1e6
            print(
                f"{form:15} {requests:3} requests of {tokens:,} tokens, {size:6.0f} MB:"
                f" {found['cpu_s']:5.1f} s processor, {found['peak_mib']:6.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
