"""oled-sim: collect, simulate and replay expert offloading for MoE diffusion LLMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oled_sim.recording import record

__version__ = "0.1.0"
__all__ = ["__version__", "record"]


def __getattr__(name: str) -> Any:
    """Import what costs time only when it is used."""
    if name == "record":
        from oled_sim.recording import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
