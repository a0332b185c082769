"""Figures: functions from tables to matplotlib figures, in one look.

Nothing here computes: the tables come from :mod:`oled_sim.analysis` and the experiments.
"""

from oled_sim.plotting.style import STYLE, by_trace, image_bytes, page_figure, save, styled

__all__ = ["STYLE", "by_trace", "image_bytes", "page_figure", "save", "styled"]
