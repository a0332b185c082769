"""The scoreboard of a reproduction: claims, intervals, and the rule that judges them.

It knows no claim. Claims are data with small functions over experiment tables, in
``experiments/claims_*.py``. The rule of :mod:`oled_sim.scoreboard.verdict` was written before the
experiments were run in full.
"""
