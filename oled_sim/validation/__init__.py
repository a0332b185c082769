"""Predictions of the simulator beside measurements on hardware.

A **point** is one policy with one cache size over some requests of a trace, executed on hardware
(:mod:`~oled_sim.validation.measured`). The simulator runs the same thing
(:mod:`~oled_sim.validation.predicted`) and the two are compared: what was decided, event by event
(``decisions``), how long it took (``times``), and which policy is faster (``ranking``).
"""
