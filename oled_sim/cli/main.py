"""The ``oled-sim`` command: a group whose commands are imported only when they run."""

from __future__ import annotations

import difflib
import importlib
import keyword
import sys
from collections.abc import Sequence
from typing import Any

import click

from oled_sim import __version__
from oled_sim.cli.stopping import Stop, keeping, signals_interrupt
from oled_sim.cli.streams import abandon, as_far_as_taken, flush_stdout, refusal_of_stdout
from oled_sim.errors import OledSimError, StoppedError

COMMANDS = {
    "analyze": ("oled_sim.cli.analyze", "Report and plot the locality of traces."),
    "bounds": ("oled_sim.cli.bounds", "Show what no policy can do better, and the gaps to it."),
    "collect": ("oled_sim.cli.collect", "Record a trace from a running model."),
    "compare": ("oled_sim.cli.compare", "Policies relative to a bound, with intervals."),
    "curve": ("oled_sim.cli.curve", "Hit rates with every cache size, in one pass."),
    "experiment": ("oled_sim.cli.experiment", "Reproduce figures of the paper."),
    "export": ("oled_sim.cli.export", "Turn a trace into a file for other tools."),
    "generate": ("oled_sim.cli.generate", "Generate with offloaded experts, under a policy."),
    "import": ("oled_sim.cli.import_", "Turn another tool's recording into a trace."),
    "plan": ("oled_sim.cli.plan", "Say how much expert cache meets a target."),
    "policies": ("oled_sim.cli.policies", "List policies, their parameters and needs."),
    "profile": ("oled_sim.cli.profile", "Measure what every lane of this machine costs."),
    "profiles": ("oled_sim.cli.profiles", "List hardware profiles, measured or estimated."),
    "replay": ("oled_sim.cli.replay", "Run policies on this machine with a trace's routing."),
    "reproduce": ("oled_sim.cli.reproduce", "Judge the paper's claims by our experiments."),
    "run": ("oled_sim.cli.run", "Simulate policies on a trace."),
    "sweep": ("oled_sim.cli.sweep", "Simulate a grid of policies and capacities."),
    "synth": ("oled_sim.cli.synth", "Generate synthetic traces at the paper's scale."),
    "trace": ("oled_sim.cli.trace", "Look into a trace, or check it."),
    "validate": ("oled_sim.cli.validate", "Compare measured replays with their predictions."),
}
"""Command name: (module that holds a click command of that name, one line of help)."""


class LazyGroup(click.Group):
    """Lists commands without importing them, so that ``--help`` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        name = cmd_name.replace("-", "_")
        if keyword.iskeyword(name):
            name += "_"
        return getattr(importlib.import_module(module), name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a name, suggesting the nearest for an unknown one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; one that can say no better what is kept when it is stopped says this."""
        with keeping(lambda: "what was not finished is left out"):
            result = super().invoke(ctx)
            if isinstance(ctx.obj, Stop):
                ctx.obj.over = True
            return result

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from :data:`COMMANDS` alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


EPILOG = """\b
Examples:
  oled-sim run --policy lru --policy oled --cache 40
  oled-sim collect --limit 4 --out my-trace
  oled-sim trace info my-trace
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oled-sim")
def cli() -> None:
    """Expert offloading for mixture-of-experts diffusion LLMs: collect, simulate, replay."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exit codes are 0, 1 (failed), 2 (usage), 130 (Ctrl-C) and 143 (SIGTERM): docs/exit-codes.md.

    Args:
        argv: without the program's name. None: those of this process, which ends afterwards.
    """
    with signals_interrupt(process_ends=argv is None) as stop:
        try:
            _main(argv, stop)
        except KeyboardInterrupt:  # it came while another end was being said
            sys.exit(stop.exit_code)


def _main(argv: Sequence[str] | None, stop: Stop) -> None:
    try:
        cli.main(args=argv, prog_name="oled-sim", standalone_mode=False, obj=stop)
        flush_stdout()
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.ClickException as error:
        with as_far_as_taken():
            error.show()
        sys.exit(error.exit_code)
    except StoppedError as error:
        _fail(error, stop.exit_code)
    except OledSimError as error:
        _fail(error, error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        if not stop.over:
            _fail("stopped before anything was done", stop.exit_code)
    except MemoryError:
        _fail("out of memory: use a smaller trace, fewer capacities or a smaller batch", 1)
    except BrokenPipeError:
        abandon(sys.stdout)  # the reader (head, less) went away
        sys.exit(1)
    except OSError:
        if (refusal := refusal_of_stdout()) is None:
            raise
        abandon(sys.stdout)
        _fail(f"standard output takes no more ({refusal.strerror}): send it elsewhere", 1)
    except Exception as error:
        if (message := _torch_memory_message(error)) is None:
            raise
        _fail(message, 1)


def _torch_memory_message(error: Exception) -> str | None:
    """Return a sentence when ``error`` is torch's out-of-memory error (torch may be absent)."""
    if type(error).__name__ != "OutOfMemoryError":
        return None
    return "out of GPU memory: use a smaller --batch, fewer --max-new-tokens, or --device cpu"


def _fail(message: Any, code: int) -> None:
    with as_far_as_taken():
        click.echo(f"Error: {message}", err=True)
    sys.exit(code)
