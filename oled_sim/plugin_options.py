"""Options of a command that only one plug-in takes, declared by the plug-in itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from oled_sim.errors import UsageError

P = TypeVar("P", bound=Callable[..., Any])

MOST_NUMBER = (1 << 31) - 1
"""The highest whole number of an option: positions and counts of a trace have 32 bits."""


@dataclass(frozen=True, slots=True)
class PluginOption:
    """One option of the command line.

    Attributes:
        flag: such as ``--prompt-tokens``; the plug-in is given the keyword ``prompt_tokens``.
        metavar: what ``--help`` calls the value.
        help: one sentence.
        parse: makes the keyword's value of the text; raises :class:`UsageError`.
    """

    flag: str
    metavar: str
    help: str
    parse: Callable[[str], Any] = str

    @property
    def keyword(self) -> str:
        """Name of the plug-in's argument."""
        return self.flag.removeprefix("--").replace("-", "_")


def takes(*options: PluginOption, examples: Sequence[str] = ()) -> Callable[[P], P]:
    """Return a decorator that declares what a plug-in takes, as its ``options``.

    ``examples``: command lines that ``--help`` shows.
    """

    def declare(plugin: P) -> P:
        plugin.options = options  # type: ignore[attr-defined]
        plugin.examples = examples  # type: ignore[attr-defined]
        return plugin

    return declare


def options_of(plugin: Any) -> tuple[PluginOption, ...]:
    """Return what a plug-in declares; nothing if it declares nothing."""
    return tuple(getattr(plugin, "options", ()))


def number(flag: str, low: int, high: int = MOST_NUMBER) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``low`` to ``high``.

    Raises:
        UsageError: by the parser, naming ``flag``.
    """

    def parse(text: str) -> int:
        digits = text.strip()
        if not (digits.isascii() and digits.isdigit()):
            raise UsageError(f"{flag} is {text!r}: give a whole number from {low} on")
        digits = digits.lstrip("0") or "0"
        if len(digits) > len(str(high)) or int(digits) > high:  # int() refuses thousands of digits
            raise UsageError(f"{flag} is {text!r}: give at most {high}")
        if int(digits) < low:
            raise UsageError(f"{flag} is {text!r}: give a whole number from {low} on")
        return int(digits)

    return parse
