"""Several traces named on a command line."""

from __future__ import annotations

from collections.abc import Sequence

from oled_sim.errors import UsageError
from oled_sim.trace.reader import Trace, open_trace


def one_way(arguments: Sequence[str], options: Sequence[str]) -> Sequence[str]:
    """Return the traces of a command line, given as arguments or after ``--trace``.

    Raises:
        UsageError: both ways are used.
    """
    if arguments and options:
        raise UsageError(
            f"traces are given as arguments ({', '.join(arguments)}) and with --trace"
            f" ({', '.join(options)}): name all of them in one way"
        )
    return arguments or options


def open_traces(sources: Sequence[str]) -> dict[str, Trace]:
    """Return the traces by short name: the directory's, or what was typed where those clash.

    Raises:
        UsageError: one is given twice. TraceError: one is none.
    """
    opened = {source: open_trace(source) for source in sources}
    if len(opened) < len(sources):
        twice = next(s for s in sources if list(sources).count(s) > 1)
        raise UsageError(f"the trace {twice} is given twice: name each once")
    short = [trace.path.resolve().name for trace in opened.values()]
    return {
        name if short.count(name) == 1 else source: trace
        for name, (source, trace) in zip(short, opened.items(), strict=True)
    }
