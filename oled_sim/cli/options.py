"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

DEFAULT_TRACE = "mini-gsm8k"

F = TypeVar("F", bound=Callable[..., Any])


def options(*wanted: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options, listed by ``--help`` in the order given."""

    def add(command: F) -> F:
        for option in reversed(wanted):
            command = option(command)
        return command

    return add


class FloatRange(click.FloatRange):
    """A number in a range. click takes NaN for one of any range, as it compares as false."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; refuse text, NaN and what lies outside the range."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is not a number.", param, ctx)
        return number


traces_option = click.option(
    "--trace",
    "named",
    multiple=True,
    metavar="PATH_OR_NAME",
    help="The same as a TRACE; repeatable.",
)
"""Traces of a command that takes them as arguments, too, as ``named``."""

policy_option = options(
    click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="SPEC",
        help="name, name:variant, name:key=value,…, module:Class, ./file.py, or a .toml file with"
        " policies; repeatable. `oled-sim policies` lists names and keys.",
    ),
)
"""Policies to run, as ``policies``."""

cache_option = click.option(
    "--cache",
    "caches",
    multiple=True,
    metavar="C",
    help="Average number of resident experts per MoE layer: 8, 8,16,32 or 8:128:8; repeatable.",
)

cache_bytes_option = click.option(
    "--cache-bytes",
    "sizes",
    multiple=True,
    metavar="SIZE",
    help="Bytes of resident experts in all: 4000MiB or 800MB,1.5GB; repeatable.",
)

grid_options = options(
    cache_option,
    click.option(
        "--h2d-gbs",
        "links",
        metavar="GB/S",
        help="Bandwidths of the host-to-GPU link, such as 12,25,50. Default: the profile's.",
    ),
    click.option(
        "--batch",
        "batches",
        default="1",
        show_default=True,
        metavar="B",
        help="Numbers of requests that run together, such as 1,2,4.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        metavar="N",
        help="Combinations that run at the same time. Default: as many as cores.",
    ),
)
"""What a grid is made of, and on how many cores it runs."""

batch_option = click.option(
    "--batch",
    type=int,
    default=1,
    show_default=True,
    metavar="B",
    help="Requests that run together.",
)

cost_options = options(
    click.option(
        "--profile",
        metavar="NAME_OR_FILE",
        help="Hardware profile: a bundled name (`oled-sim profiles`) or a .toml file. Default: the"
        " geometry's.",
    ),
    click.option(
        "--geometry",
        metavar="NAME",
        help="Model size that costs are for. Default: what the trace stands for, else"
        " llada2.0-mini.",
    ),
    click.option("--extrapolate", is_flag=True, help="Allow counts outside the profiled range."),
)
"""Hardware and model size, as ``profile``, ``geometry`` and ``extrapolate``."""

rule_options = options(
    click.option(
        "--scope",
        type=click.Choice(["layer", "global"]),
        default="layer",
        show_default=True,
        help="One pool per layer, or one for all.",
    ),
    click.option(
        "--batch-mode",
        type=click.Choice(["lockstep", "barrier", "refill"]),
        default="lockstep",
        show_default=True,
        help="Finished requests leave; or all blocks start together; or the next request moves up.",
    ),
    click.option(
        "--staging",
        type=click.IntRange(max=1_000_000),
        default=16,
        show_default=True,
        metavar="N",
        help="Slots where transfers land, on top of the cache.",
    ),
    click.option(
        "--warmup",
        type=int,
        metavar="N",
        help="Requests that come first and are not counted. Default: 1, but 0 if it is the only"
        " one.",
    ),
    click.option(
        "--history",
        type=int,
        metavar="N",
        help="Requests that policies may learn from, not counted. Default: the first third.",
    ),
    click.option("--cold", is_flag=True, help="Empty the cache before every request."),
    click.option(
        "--confidence",
        type=click.Choice(["previous", "end", "current"]),
        default="previous",
        show_default=True,
        help="Which confidence a policy sees; 'current' is not causal.",
    ),
    click.option("--requests", type=int, metavar="N", help="Use only the first N requests."),
)
"""Fields of :class:`~oled_sim.engine.rules.Rules` but the batch, by their names."""
