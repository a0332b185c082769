"""Timelines of runs as Perfetto traces, for https://ui.perfetto.dev and its trace processor.

- :mod:`packets` encodes tracks, slices and counters, and knows nothing of the engine;
- :mod:`drawing` says what of a run becomes which slice;
- :mod:`file` writes the file while the run goes on.
"""

from oled_sim.timeline_export.file import TimelineFile

__all__ = ["TimelineFile"]
