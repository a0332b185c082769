"""``oled-sim policies``: which policies there are, what they need, what they can be told."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from oled_sim.policy import Policy

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim policies
  oled-sim policies oled
  oled-sim policies ./mine.py --json
"""


@click.command(epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def policies(name: str | None, as_json: bool) -> None:
    """List the policies that are installed, with parameters, defaults and needs.

    With NAME (a policy's name, module:Class or ./file.py) also all that its author says about it.
    """
    found = list(_installed()) if name is None else [describe(name)]
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"policies": found}, enc_hook=str).decode())
    else:
        _print(found, whole=name is not None)


def _installed() -> Iterator[dict[str, Any]]:
    """Yield a description of every registered policy; one that does not load says why."""
    from oled_sim import plugins
    from oled_sim.errors import OledSimError

    for name in plugins.names(plugins.POLICIES):
        try:
            yield describe(name)
        except OledSimError as error:
            yield {"name": name, "error": str(error)}


def describe(name: str) -> dict[str, Any]:
    """Return what there is to say about a policy, as plain data.

    Args:
        name: a registered name, ``module:Class``, ``./file.py`` or ``./file.py:Class``.

    Raises:
        UsageError: no such policy, or one that cannot be used; ``name`` says more than a name.
    """
    from oled_sim import plugins
    from oled_sim.errors import UsageError
    from oled_sim.policy_spec import load_policy, split_spec

    bare, options = split_spec(name)
    if options:
        raise UsageError(f"{name!r} is more than a policy's name: give {bare!r} alone")
    policy = load_policy(bare)
    text = _docstring(policy)
    return {
        "name": bare,
        "summary": text.split("\n\n")[0].replace("\n", " "),
        "package": plugins.package_of(plugins.POLICIES, bare),
        "class": policy.__qualname__,
        "needs": sorted(policy.needs - {"future"}),
        "wants": sorted(policy.wants),
        "clairvoyant": "future" in policy.needs,
        "learns": policy.learns,
        "variants": {variant: dict(values) for variant, values in policy.variants.items()},
        "parameters": list(_parameters(policy)),
        "doc": text,
    }


def _docstring(policy: type[Policy]) -> str:
    """Return what the author wrote; a dataclass without a docstring gets its signature as one."""
    text = inspect.cleandoc(policy.__doc__ or "")
    return "" if text.startswith(f"{policy.__name__}(") else text


def _parameters(policy: type[Policy]) -> Iterator[dict[str, Any]]:
    from dataclasses import MISSING

    from oled_sim.policy import parameters
    from oled_sim.policy_spec import kind_of

    for name, field in parameters(policy).items():
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield {
            "name": name,
            "type": _type(kind_of(policy, field)),
            "default": None if default is MISSING else default,
            "required": default is MISSING,
            "help": field.metadata.get("help", ""),
        }


def _type(kind: Any) -> str:
    """Return a parameter's type for people: a name, or the choices."""
    from typing import Literal, get_args, get_origin

    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)


def _print(found: list[dict[str, Any]], *, whole: bool) -> None:
    from rich.text import Text

    from oled_sim.cli.tables import print_whole, prose_console

    blocks: list[RenderableType] = []
    for i, policy in enumerate(found):
        blocks += [""] if i > 0 else []
        blocks += _blocks(policy, whole=whole)
    if not whole:
        blocks += ["", Text("All about one: oled-sim policies NAME", style="dim")]
    print_whole(prose_console(), blocks)


def _blocks(policy: dict[str, Any], *, whole: bool) -> Iterator[RenderableType]:
    """Yield the paragraphs about one policy."""
    from rich.text import Text

    yield Text(policy["name"], style="bold")
    if "error" in policy:
        yield _indented(Text(policy["error"], style="red"))
        return
    text = policy["doc"] if whole else policy["summary"]
    yield _indented(Text(text or "Its author says nothing about it."), below=int(whole))
    for line in _facts(policy):
        yield _indented(Text(line, style="dim"))
    if policy["parameters"]:
        yield _indented(_parameter_table(policy), above=int(whole))


def _indented(block: RenderableType, *, above: int = 0, below: int = 0) -> RenderableType:
    from rich.padding import Padding

    return Padding(block, (above, 0, below, 2), expand=False)


def _facts(policy: dict[str, Any]) -> Iterator[str]:
    package = policy["package"]
    if package is not None and not package.startswith("oled-sim "):
        yield f"from {package}"
    yield f"needs {', '.join(policy['needs']) or 'nothing'}"
    if policy["wants"]:
        yield f"uses {', '.join(policy['wants'])} where the trace holds them"
    if policy["clairvoyant"]:
        yield "clairvoyant: sees the future, so a bound and not achievable"
    if policy["learns"]:
        yield "learns from the requests of the history split"
    for variant, values in policy["variants"].items():
        told = ", ".join(f"{key}={value}" for key, value in values.items()) or "the defaults"
        yield f"{policy['name']}:{variant} is {told}"


def _parameter_table(policy: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for parameter in policy["parameters"]:
        default = "…" if parameter["required"] else _text(parameter["default"])
        table.add_row(
            Text(f"{parameter['name']}={default}"),
            Text(f"{parameter['help']} ({parameter['type']})"),
        )
    return table


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
