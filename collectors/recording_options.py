"""Options that several importers take, because their formats leave the same things open."""

from __future__ import annotations

from oled_sim.plugin_options import PluginOption, number
from oled_sim.trace.manifest import MOST_EXPERTS, MOST_LAYER

EXPERTS = PluginOption(
    "--experts",
    "E",
    "Experts per layer, where the file does not say [default: its highest id plus 1].",
    number("--experts", 1, MOST_EXPERTS),
)

PROMPT_TOKENS = PluginOption(
    "--prompt-tokens",
    "N",
    "Tokens of every prompt, where the file does not tell prompt and decoding apart.",
    number("--prompt-tokens", 0),
)

MODEL = PluginOption("--model", "NAME", "Name of the model, where the file does not say.")

FIRST_LAYER = PluginOption(
    "--first-layer",
    "N",
    "The model's own index of the file's first layer [default: 0].",
    number("--first-layer", 0, MOST_LAYER),
)
