"""Locality of traces: how large, how alike and how predictable the expert sets of passes are.

Every function reads requests once, one at a time, and returns tidy tables (pandas). The figures of
the paper that they correspond to stand in their docstrings; :mod:`oled_sim.plotting` draws them.
"""

from oled_sim.analysis.activation import activation_ratio
from oled_sim.analysis.footprint import block_footprint, footprint
from oled_sim.analysis.locality import locality
from oled_sim.analysis.paper import beside_paper
from oled_sim.analysis.popularity import popularity
from oled_sim.analysis.report import analyze, analyze_trace, analyze_traces, describe, side_by_side
from oled_sim.analysis.reuse import reuse
from oled_sim.analysis.stability import confidence_stability
from oled_sim.analysis.tally import pooled

__all__ = [
    "activation_ratio",
    "analyze",
    "analyze_trace",
    "analyze_traces",
    "beside_paper",
    "block_footprint",
    "confidence_stability",
    "describe",
    "footprint",
    "locality",
    "pooled",
    "popularity",
    "reuse",
    "side_by_side",
]
