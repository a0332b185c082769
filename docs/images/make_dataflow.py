"""Draw docs/images/dataflow.svg: how data moves through oled-sim, and where plug-ins attach."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

CORE, PLUGIN, DATA = "#dbe9f6", "#fde5c8", "#e4f1dc"

BOXES = [
    # x, y, width, text, colour
    (-0.4, 1.0, 2.0, "model\nnative LLaDA2 or\na live runtime", CORE),
    (2.1, 1.0, 1.3, "collector\ncollectors/", PLUGIN),
    (4.0, 1.0, 1.4, "trace\nmanifest.json\n+ Parquet", DATA),
    (6.0, 1.0, 1.4, "engine\npools, lanes,\nmetrics", CORE),
    (8.0, 1.0, 1.4, "results\ntable, JSON,\nParquet", DATA),
    (10.0, 1.0, 1.4, "figures\nexperiments/\nnotebooks/", PLUGIN),
    (5.2, 2.5, 1.3, "policy\npolicies/", PLUGIN),
    (6.9, 2.5, 1.3, "lane costs\nprofile.toml", DATA),
]

ARROWS = [
    ((1.6, 1.45), (2.1, 1.45)),
    ((3.4, 1.45), (4.0, 1.45)),
    ((5.4, 1.45), (6.0, 1.45)),
    ((7.4, 1.45), (8.0, 1.45)),
    ((9.4, 1.45), (10.0, 1.45)),
    ((5.85, 2.5), (6.45, 1.9)),
    ((7.55, 2.5), (6.95, 1.9)),
]


def main() -> None:
    """Write the picture beside this file."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "oled-sim", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(9.2, 2.7))
    for x, y, width, text, colour in BOXES:
        shape = FancyBboxPatch(
            (x, y), width, 0.9, boxstyle="round,pad=0.02", facecolor=colour, edgecolor="#444"
        )
        axes.add_patch(shape)
        axes.text(x + width / 2, y + 0.45, text, ha="center", va="center")
    for start, end in ARROWS:
        axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color="#444")
        )
    labels = [(-0.4, CORE, "core"), (0.9, PLUGIN, "plug-in, loaded by name"), (4.6, DATA, "data")]
    for x, colour, text in labels:
        axes.add_patch(
            FancyBboxPatch((x, 0.25), 0.25, 0.2, boxstyle="round,pad=0.02", facecolor=colour)
        )
        axes.text(x + 0.4, 0.35, text, va="center")
    axes.set(xlim=(-0.5, 11.6), ylim=(0.1, 3.5))
    axes.axis("off")
    path = Path(__file__).with_name("dataflow.svg")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
