"""The two geometries of a simulation (spec §2).

*Routing geometry* (layers, experts, k) comes from the trace: what was routed where. *Cost
geometry* (expert bytes, widths, heads, vocabulary) says how large the simulated model is. They
differ on purpose: a trace of a narrow model can stand for the routing of a wide one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from oled_sim.errors import UsageError


@dataclass(frozen=True, slots=True)
class RoutingGeometry:
    """What a trace routes over.

    ``layers`` are the model's own indices of its MoE layers in ascending order (LLaDA2 starts
    at 1); arrays indexed by layer use the position in this tuple.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class CostGeometry:
    """Sizes that costs depend on. Widths are in elements, weights take ``weight_bytes`` each."""

    name: str
    hidden_size: int
    dense_intermediate_size: int
    moe_intermediate_size: int
    layers: int
    dense_layers: int
    experts: int
    top_k: int
    shared_experts: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    weight_bytes: int = 2

    @property
    def moe_layers(self) -> int:
        """Number of layers that hold routed experts."""
        return self.layers - self.dense_layers

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert: gate, up and down projection."""
        return 3 * self.hidden_size * self.moe_intermediate_size * self.weight_bytes

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts: what must be held in host memory."""
        return self.moe_layers * self.experts * self.expert_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one context token keeps on the GPU."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.weight_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of everything except the routed experts: always on the GPU."""
        h, w = self.hidden_size, self.weight_bytes
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim * h
        attention = qkv + self.heads * self.head_dim * h + 2 * self.head_dim + 2 * h
        dense = 3 * h * self.dense_intermediate_size
        shared = 3 * h * self.moe_intermediate_size * self.shared_experts
        moe = shared + self.experts * h + self.experts
        total = self.layers * attention + self.dense_layers * dense + self.moe_layers * moe
        return (total + 2 * self.vocabulary * h + h) * w


GEOMETRIES: dict[str, CostGeometry] = {
    g.name: g
    for g in (
        CostGeometry("llada2.0-mini", 2048, 5120, 512, 20, 1, 256, 8, 1, 16, 4, 128, 157184),
        CostGeometry("llada2.0-flash", 4096, 9216, 1024, 32, 1, 256, 8, 1, 32, 4, 128, 157184),
    )
}

DEFAULT_GEOMETRY = "llada2.0-mini"
"""What costs are for when neither the user nor the trace says it."""


def find_geometry(name: str) -> CostGeometry:
    """Return the named cost geometry, or that of a file whose name ends in ``.toml`` or ``.json``.

    Raises:
        UsageError: no such name (the sentence suggests the nearest and lists all) or file.
        FileError: the file is no geometry.
    """
    if name in GEOMETRIES:
        return GEOMETRIES[name]
    if name.endswith((".toml", ".json")):
        from oled_sim.geometry_file import read_geometry

        return read_geometry(Path(name))
    near = difflib.get_close_matches(name, GEOMETRIES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"unknown geometry {name!r}: {hint}known are {', '.join(GEOMETRIES)}; "
        "the path of a geometry file ends in .toml or .json"
    )
