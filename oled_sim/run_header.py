"""What the results of every run must say about where they come from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from oled_sim import __version__
from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.rules import Rules, split_requests
from oled_sim.trace import Trace


def describe(trace: Trace, costs: LaneCosts, rules: Rules) -> dict[str, Any]:
    """Return what every result must say: trace, both geometries, profile, run rules."""
    manifest, profile = trace.manifest, costs.profile
    return {
        "version": __version__,
        "trace": {
            "path": str(trace.path),
            "name": trace.path.name,
            "origin": manifest.origin,
            "model": manifest.model.name,
            "checksum": manifest.checksum,
        },
        "routing_geometry": asdict(trace.geometry),
        "cost_geometry": asdict(costs.geometry) | {"expert_bytes": costs.geometry.expert_bytes},
        "stands_for": manifest.stands_for,
        "expert_bytes": manifest.expert_bytes,
        "profile": {
            "name": profile.name,
            "status": profile.status,
            "provisional": profile.provisional,
            "gpu": profile.hardware.gpu,
            "cpu": profile.hardware.cpu,
            "workers": costs.workers,
            "link_gb_s": costs.link_bandwidth_gb_s,
            "extrapolate": costs.extrapolate,
        },
        "rules": asdict(rules),
        "splits": asdict(split_requests(trace.requests, rules)),
    }
