"""``oled-sim profiles``: which hardware profiles there are, and what each is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim profiles
  oled-sim profiles paper-testbed-llada2.0-mini
  oled-sim profiles mine.toml --json
"""


@click.command(epilog=EPILOG)
@click.argument("name", required=False, metavar="[NAME_OR_FILE]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def profiles(name: str | None, as_json: bool) -> None:
    """List the bundled hardware profiles: of which machine and model size, measured or estimated.

    With NAME_OR_FILE that one alone, and what it says of how it was made. Without --profile,
    commands take the measured profile of their geometry; an estimate is used only by name.
    """
    from oled_sim.costs.store import bundled_profiles

    found = [describe(each) for each in (bundled_profiles() if name is None else [name])]
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"profiles": found}).decode())
    else:
        _print(found, whole=name is not None)


def describe(name_or_path: str) -> dict[str, Any]:
    """Return what a profile is of, as plain data but for the date.

    Args:
        name_or_path: as after ``--profile``.

    Raises:
        UsageError, ProfileError: there is none, or none that can be read.
    """
    from oled_sim.costs.store import load_profile

    profile = load_profile(name_or_path)
    origin, hardware = profile.origin, profile.hardware
    return {
        "name": profile.name,
        "status": profile.status,
        "provisional": profile.provisional,
        "geometry": profile.geometry.name,
        "gpu": hardware.gpu,
        "cpu": hardware.cpu,
        "workers": hardware.workers,
        "pcie_generation": hardware.pcie_generation,
        "pcie_width": hardware.pcie_width,
        "date": origin.date,
        "script": origin.script,
        "note": origin.note,
    }


def _print(found: Sequence[dict[str, Any]], *, whole: bool) -> None:
    from oled_sim.cli.tables import print_notes, print_table, table_console

    console = table_console()
    columns = ["profile", "status", "geometry", "date", "GPU", "PCIe", "CPU", "workers"]
    rows = [
        (p["name"], _status(p), p["geometry"], str(p["date"]), p["gpu"],
         f"{p['pcie_generation']} ×{p['pcie_width']}", p["cpu"], str(p["workers"]))
        for p in found
    ]  # fmt: skip
    print_table(console, columns, rows, left=columns[:-1])
    if whole:
        print_notes(console, [f"Made by {p['script']}. {p['note']}".strip() for p in found])


def _status(profile: dict[str, Any]) -> str:
    return profile["status"] + (", provisional" if profile["provisional"] else "")
