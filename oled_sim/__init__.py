"""oled-sim: collect, simulate and replay expert offloading for MoE diffusion LLMs."""

__version__ = "0.1.0"
