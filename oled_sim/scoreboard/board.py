"""Judging claims by the tables of experiments and of replays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import pandas as pd

from oled_sim import plugins
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.scoreboard.claim import REPLAYS, Claim, Evidence, Judged, Reading, read
from oled_sim.scoreboard.estimate import MissingSettingError, estimate

Tables = Mapping[str, pd.DataFrame]
"""Tidy tables of experiments by name, and of replays as :data:`~.claim.REPLAYS`."""


def load_claims() -> list[Claim]:
    """Return the claims of every registered list, in the order of their names.

    Raises:
        UsageError: something else is registered, or two claims have one key.
    """
    found: list[Claim] = []
    for name in plugins.names(plugins.CLAIMS):
        claims = plugins.load(plugins.CLAIMS, name)
        if not all(isinstance(claim, Claim) for claim in claims):
            raise UsageError(f"plug-in {name!r} is no list of claims")
        found += claims
    keys = [claim.key for claim in found]
    if len(set(keys)) < len(keys):
        raise UsageError(f"two claims are called {next(k for k in keys if keys.count(k) > 1)!r}")
    return found


def judge_all(claims: Iterable[Claim], tables: Tables, *, seed: int) -> list[Judged]:
    """Judge claims by what tables hold.

    Args:
        claims: in the order wanted.
        tables: those that there are; a claim whose table is missing has no reading.
        seed: of the intervals.
    """
    return [Judged(claim, tuple(_readings(claim, tables, seed))) for claim in claims]


def _readings(claim: Claim, tables: Tables, seed: int) -> Iterator[Reading]:
    if claim.experiment is None:
        return
    if claim.experiment in tables:
        for evidence, machine, rows in _parts(tables[claim.experiment]):
            yield from _reading(claim, evidence, machine, rows, seed)
    if claim.replayed and REPLAYS in tables and claim.experiment != REPLAYS:
        for _, machine, rows in _parts(tables[REPLAYS]):
            yield from _reading(claim, "measured", machine, rows, seed)


def _parts(table: pd.DataFrame) -> Iterator[tuple[Evidence, str, pd.DataFrame]]:
    """Yield the rows of each evidence under each machine's costs."""
    machine = machine_of(table)
    for (origin, name), rows in table.groupby([table["origin"], machine], sort=False):
        evidence = "real" if origin == "imported" else str(origin)
        yield cast(Evidence, evidence), str(name), rows


def machine_of(table: pd.DataFrame) -> pd.Series:
    """Return the machine of each row: the profile's name without the model's; else nothing."""
    if "profile" not in table:
        return pd.Series("", index=table.index)
    names = table["profile"].fillna("")
    return names.str.replace(r"-llada.*$", "", regex=True)


def _reading(
    claim: Claim, evidence: Evidence, machine: str, rows: pd.DataFrame, seed: int
) -> Iterator[Reading]:
    """Yield the figure of some rows; none where a setting is missing that the claim is about."""
    needed = {*claim.names, *claim.columns}
    try:
        chosen = claim.rows(rows)
        if chosen.empty or not needed <= set(chosen.columns):
            return
        found = estimate(chosen, claim.names, claim.columns, claim.statistic, seed=seed)
    except MissingSettingError:
        return
    if found.value == found.value:
        yield read(claim, evidence, machine, found)


def replay_table(files: Sequence[tuple[str, pd.DataFrame]]) -> pd.DataFrame:
    """Return replayed points in the form of an experiment's table.

    The replays of a data set count as one request: they are short, and repeat the same passes.

    Args:
        files: by profile name the points that ``oled-sim validate`` wrote.

    Raises:
        MeasurementError: a column is missing.
    """
    parts = []
    for profile, points in files:
        try:
            rows = points[["policy", "cache", "decide_mean_us", "decode_passes", "output_tokens"]]
            rows = rows.assign(
                tpot_us=points["measured_tpot_us"],
                data_set=points["trace"].str.split("-").str[-1],
            )
        except KeyError as error:
            raise MeasurementError(f"replayed points have no column {error}") from None
        model = "llada" + profile.partition("-llada")[2]
        parts.append(rows.assign(profile=profile, model=model))
    table = pd.concat(parts, ignore_index=True)
    request = table["data_set"].astype("category").cat.codes
    return table.assign(request=request, trace="replay", origin="measured")
