"""A command with one subcommand per plug-in, each with the options that the plug-in declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from oled_sim import plugins
from oled_sim.errors import UsageError
from oled_sim.plugin_options import options_of


class PluginGroup(click.Group):
    """Subcommands are the plug-ins of an entry-point group, loaded when they are called.

    Attributes:
        entry_points: name of the group.
        build: makes the subcommand of a name and its plug-in.
    """

    def __init__(
        self,
        *args: Any,
        entry_points: str,
        build: Callable[[str, Any], click.Command],
        **rest: Any,
    ) -> None:
        super().__init__(*args, subcommand_metavar="FORMAT ...", **rest)
        self.entry_points = entry_points
        self.build = build

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the plug-ins."""
        return plugins.names(self.entry_points)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a plug-in and return its subcommand.

        Raises:
            UsageError: nothing by that name, or it does not import.
        """
        return self.build(cmd_name, plugins.load(self.entry_points, cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List names without loading anything, so that ``--help`` stays fast."""
        names = ", ".join(self.list_commands(ctx))
        with formatter.section("Formats"):
            formatter.write_text(f"{names}, or a plug-in as module:attribute or ./file.py:name")


class PluginCommand(click.Command):
    """The subcommand of one plug-in; says which options there are when given another."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse.

        Raises:
            UsageError: an option that this plug-in does not take.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            taken = [flag for p in self.params if isinstance(p, click.Option) for flag in p.opts]
            raise UsageError(
                f"the format {self.name} takes no {error.option_name}: it takes {', '.join(taken)}"
            ) from None


def plugin_parameters(plugin: Any) -> list[click.Parameter]:
    """Return a click option per option that a plug-in declares."""
    return [
        click.Option([o.flag], metavar=o.metavar, help=o.help, default=None)
        for o in options_of(plugin)
    ]


def plugin_arguments(plugin: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a plug-in's own options, those that were given, parsed.

    Raises:
        UsageError: a value that is none.
    """
    found = {}
    for option in options_of(plugin):
        text = given.get(option.keyword)
        if text is not None:
            found[option.keyword] = option.parse(text)
    return found


def examples_of(plugin: Any, default: str) -> str:
    """Return the epilog of a subcommand's help: what the plug-in shows, else ``default``."""
    lines = getattr(plugin, "examples", ()) or (default,)
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
