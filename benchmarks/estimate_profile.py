"""Estimate the profiles of the paper's testbed from the bundled measured ones.

    python benchmarks/estimate_profile.py [--out oled_sim/profiles] [--from FILE.toml]

Nothing of that testbed was measured: `oled_sim/costs/estimate.py` says how times are carried over,
the note in each profile says what was assumed. Run it again when a measured profile changes.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from oled_sim.costs import estimate as method
from oled_sim.costs import work
from oled_sim.costs.estimate import Machine, Rates, estimate
from oled_sim.costs.profile import Hardware, Origin, Profile, Software
from oled_sim.costs.store import bundled_profiles, load_profile, save_profile
from oled_sim.geometry import find_geometry

PCIE_5_X16_GB_S = 63.0
H200 = Rates(gpu_memory_gb_s=4800, gpu_tflops=989.4, cpu_memory_gb_s=307.2,
             link_gb_s=PCIE_5_X16_GB_S)  # fmt: skip
"""NVIDIA's data sheet of the H200 SXM; the processor's memory is no limit there."""

RATES = {
    "llada2.0-mini": Rates(gpu_memory_gb_s=1792, gpu_tflops=209.5, cpu_memory_gb_s=307.2,
                           link_gb_s=PCIE_5_X16_GB_S),
    "llada2.0-flash": Rates(gpu_memory_gb_s=1792, gpu_tflops=503.8, cpu_memory_gb_s=307.2,
                            link_gb_s=PCIE_5_X16_GB_S),
}  # fmt: skip
"""GeForce RTX 5090 and RTX PRO 6000 (Workstation Edition) by NVIDIA's RTX Blackwell papers; a Xeon
Platinum 8470Q has eight channels of DDR5-4800."""

GPUS = {
    "llada2.0-mini": ("NVIDIA GeForce RTX 5090", 32 << 30, 90 * 10**9),
    "llada2.0-flash": ("NVIDIA RTX PRO 6000 Blackwell", 96 << 30, 240 * 10**9),
}
"""The paper's configurations A and B (§5.1): GPU, its memory, host memory, bytes."""

CORES = 25
SOFTWARE = Software(os="unknown", python="unknown", torch="2.8.0", cuda="12.8", numpy="unknown")


def main() -> None:
    """Write a profile per configuration."""
    parser = argparse.ArgumentParser(description="Estimate the profiles of the paper's testbed.")
    parser.add_argument("--out", type=Path, default=Path("oled_sim/profiles"))
    parser.add_argument(
        "--from",
        dest="measured",
        type=Path,
        help="profile measured on an H200; default: the bundled one of each geometry, else mini's",
    )
    args = parser.parse_args()
    for name in RATES:
        profile = testbed(name, load_profile(args.measured or measured_for(name)))
        save_profile(profile, args.out / f"{profile.name}.toml", overwrite=True)
        print(f"{profile.name}: from {profile.origin.note.split(';')[0]}")


def testbed(geometry: str, measured: Profile) -> Profile:
    """Return the estimate of the paper's machine for one geometry.

    As many of its cores drive copies and launches as where costs were measured.
    """
    gpu, memory, host = GPUS[geometry]
    machine = Machine(
        hardware=Hardware(
            gpu=gpu,
            gpu_memory_bytes=memory,
            driver="unknown",
            pcie_generation=5,
            pcie_width=16,
            cpu="Intel Xeon Platinum 8470Q",
            cores=CORES,
            workers=CORES - (measured.hardware.cores - measured.hardware.workers),
            host_memory_bytes=host,
        ),
        software=SOFTWARE,
        rates=RATES[geometry],
    )
    origin = Origin(
        date=measured.origin.date,
        script="benchmarks/estimate_profile.py",
        revision=_revision(),
        note=_note(measured, machine),
    )
    name = f"paper-testbed-{geometry}"
    return estimate(measured, H200, machine, find_geometry(geometry), origin, name)


def measured_for(geometry: str) -> str:
    """Return the bundled profile that an estimate starts from: mini's while flash's is missing."""
    name = f"h200-{geometry}"
    return name if name in bundled_profiles() else "h200-llada2.0-mini"


def _note(measured: Profile, machine: Machine) -> str:
    rates, source = machine.rates, measured.hardware
    return (
        f"{measured.name}, revision {measured.origin.revision}; estimated, nothing here was "
        f"measured. GPU: {H200.gpu_memory_gb_s:g} GB/s and {H200.gpu_tflops:g} TFLOPS (bf16, "
        f"dense, fp32 sums) became {rates.gpu_memory_gb_s:g} and {rates.gpu_tflops:g} in the part "
        "of every time that bytes and operations at peak explain; the rest (launches, latency, "
        "kernels below peak) stayed, so passes of many tokens, where kernels are far below peak, "
        "are the least certain. Link: PCIe 5 x16 on both machines, copies as measured. "
        f"CPU: {source.workers} workers became {machine.hardware.workers} of {CORES} cores of the "
        f"same speed, work per worker alike, never faster than {rates.cpu_memory_gb_s:g} GB/s. "
        "Host and interference as measured; the Python hooks of the paper's system are not in it."
    )


def _revision() -> str:
    digest = hashlib.sha256()
    for file in (__file__, method.__file__, work.__file__):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
