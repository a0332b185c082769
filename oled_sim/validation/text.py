"""A validation as tables of text: for the screen, and as ``summary.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from oled_sim.validation.measured import About
from oled_sim.validation.report import Report
from oled_sim.validation.speed import SAME
from oled_sim.validation.statistics import Comparison, Errors
from oled_sim.validation.times import PERCENTILES, Times

VERDICTS = {True: "pass", False: "MISS", None: "not judged"}


@dataclass(frozen=True)
class Section:
    """A table with a title. ``left``: columns of text, the others are figures. ``note``: below."""

    title: str
    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[str, ...]
    note: str = ""


def sections(report: Report) -> list[Section]:
    """Return the tables of a report, the most important first."""
    return [
        _targets(report),
        _points(report.comparisons),
        _passes(report.comparisons),
        _errors("Errors by regime", "regime", report.by_regime, report.errors),
        _errors("Errors by policy", "policy", report.by_policy, report.errors),
        _states(report),
        _lanes(report),
        _rankings(report),
        _decisions(report.comparisons),
    ]


def facts(report: Report) -> dict[str, str]:
    """Return what was compared and where it was measured."""
    abouts = [c.point.about for c in report.comparisons]
    about = abouts[0]
    hardware, software = about.machine.hardware, about.software
    link = f" (PCIe {hardware.pcie_generation} ×{hardware.pcie_width})"
    link = link if hardware.pcie_width else ""
    points = len(report.comparisons)
    runs = sorted({a.repetitions for a in abouts})
    traces = sorted({a.trace_name for a in abouts})
    dates = sorted({a.date.isoformat() for a in abouts})
    machines = _counted([a.machine.identity[:16] for a in abouts])
    profiles = _counted([f"{a.profile.name} [{a.profile.sha256[:16]}]" for a in abouts])
    repeated = " to ".join(str(n) for n in dict.fromkeys((runs[0], runs[-1])))
    return {
        "Machine": f"{hardware.gpu}{link}, {hardware.cpu}, {hardware.cores} cores,"
        f" {hardware.workers} CPU workers [{machines}]",
        "Software": f"{software.os}, Python {software.python}, torch {software.torch}, CUDA"
        f" {software.cuda}, driver {hardware.driver}",
        "Profile": profiles,
        "Geometry": about.geometry.name + _layers(about),
        "Points": f"{points}, run {repeated} times each, measured {' to '.join(_ends(dates))}",
        "Traces": ", ".join(traces),
        **({"Unranked": report.unranked} if report.unranked else {}),
    }


def _layers(about: About) -> str:
    if about.layers is None:
        return ""
    whole = about.geometry.layers - about.geometry.dense_layers
    return f", the first {about.layers} of {whole} MoE layers alone"


def _counted(values: Sequence[str]) -> str:
    """Return different values in order of appearance, with the number of points of each."""
    numbers = Counter(values)
    if len(numbers) == 1:
        return values[0]
    return ", ".join(f"{v} ({n} point{'s' * (n > 1)})" for v, n in numbers.items())


def _ends(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((values[0], values[-1])))


def markdown(report: Report) -> str:
    """Return a report as a Markdown document."""
    lines = ["# Predicted and measured", ""]
    lines += [f"- {name}: {value}" for name, value in facts(report).items()]
    for section in sections(report):
        if section.rows:
            lines += ["", *_markdown(section)]
    return "\n".join(lines) + "\n"


def _markdown(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield ""
    yield _line(section.names)
    yield "|" + "|".join("---" if n in section.left else "---:" for n in section.names) + "|"
    yield from (_line(row) for row in section.rows)
    if section.note:
        yield ""
        yield section.note


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _targets(report: Report) -> Section:
    return Section(
        "Targets",
        ("target", "limit", "found", "verdict"),
        tuple((t.name, t.limit, t.found, VERDICTS[t.met]) for t in report.targets),
        ("target", "limit", "found", "verdict"),
        f"Pearson's r over all points: {_number(report.correlation.linear)}, of logarithms"
        f" {_number(report.correlation.logarithmic)}.",
    )


KEYS = ("policy", "cache", "trace", "requests")
_TEXT = ("policy", "trace", "requests", "regime")


def _key(about: About) -> tuple[str, ...]:
    requests = ", ".join(map(str, about.requests))
    return about.policy.label, str(about.cache), about.trace_name, requests


def _points(comparisons: Sequence[Comparison]) -> Section:
    return Section(
        "Time per output token",
        (*KEYS, "regime", "predicted", "measured", "error", "spread", "drift", "decide", "passes"),
        tuple(_point(c) for c in comparisons),
        _TEXT,
        "predicted, measured, decide: ms; measured is the median run. error: (predicted -"
        " measured) / measured. spread: slowest run - fastest, over the median. drift: how much"
        " longer a fixed job of the CPU lane took than in the profile, just before. decide: mean"
        " time of the policy's own decisions per decode pass, part of neither side. regime: the"
        " lane with most of the predicted critical path.",
    )


def _point(comparison: Comparison) -> tuple[str, ...]:
    times = comparison.times
    return (
        *_key(comparison.point.about),
        times.regime,
        _ms(times.predicted.tpot_us),
        _ms(times.measured.tpot_us),
        _signed(times.error),
        _share(times.spread),
        "-" if comparison.speed is None else _signed(comparison.speed.cpu_job),
        _ms(times.decide_us[0]),
        str(times.decode_passes),
    )


def _passes(comparisons: Sequence[Comparison]) -> Section:
    return Section(
        "Time of a pass",
        (*KEYS, *(f"p{q}" for q in PERCENTILES), "prefill"),
        tuple((*_key(c.point.about), *_percentiles(c.times)) for c in comparisons),
        _TEXT,
        "ms, predicted / measured. Percentiles: over decode passes. prefill: all prefill passes of"
        " a request.",
    )


def _percentiles(times: Times) -> list[str]:
    said, seen = times.predicted, times.measured
    pairs = zip((*said.pass_us, said.prefill_us), (*seen.pass_us, seen.prefill_us), strict=True)
    return [f"{_ms(ours)} / {_ms(theirs)}" for ours, theirs in pairs]


def _errors(title: str, key: str, groups: dict[str, Errors], overall: Errors) -> Section:
    rows = [(name, *_figures(errors)) for name, errors in groups.items()]
    return Section(
        title,
        (key, "points", "median", "MAPE", "worst", "signed mean", "spread", "worst spread"),
        (*rows, ("all", *_figures(overall))),
        (key,),
        "median, MAPE, worst: of |error| of TPOT. spread: of the hardware from run to run, median"
        " over points.",
    )


def _states(report: Report) -> Section:
    """Errors by what the machine was like; nothing to tell where no point says."""
    known = set(report.by_state) != {"not measured"}
    found = _errors("Errors by state of the machine", "state", report.by_state, report.errors)
    return replace(
        found,
        rows=found.rows if known else (),
        note="Before every repetition a fixed job of the CPU lane is timed, which the profile has,"
        f" too. as profiled: all within {SAME:.0%}; faster, slower: the median beyond that;"
        " changing: single ones. Nothing is calibrated by it.",
    )


def _figures(errors: Errors) -> tuple[str, ...]:
    return (
        str(errors.points),
        _share(errors.median_abs),
        _share(errors.mean_abs),
        _share(errors.worst_abs),
        _signed(errors.signed_mean),
        _share(errors.median_spread),
        _share(errors.worst_spread),
    )


def _lanes(report: Report) -> Section:
    rows = []
    for column, errors in report.lanes.items():
        if errors.points:
            lane, what, _ = column.split("_")
            rows.append(
                (
                    f"{lane} {what}",
                    str(errors.points),
                    _ms(errors.predicted_us),
                    _ms(errors.measured_us),
                    _share(errors.median_abs),
                    _share(errors.worst_abs),
                    _signed(errors.signed_mean),
                )
            )
    return Section(
        "Lanes",
        ("lane", "points", "predicted", "measured", "median", "worst", "signed mean"),
        tuple(rows),
        ("lane",),
        "predicted, measured: ms per decode pass, over points where the lane was measured and"
        " worked. median, worst: of |error|.",
    )


def _rankings(report: Report) -> Section:
    rows = tuple(
        (
            r.where,
            _number(r.pearson),
            _number(r.spearman),
            _number(r.kendall),
            f"{r.separated - len(r.swapped)} of {r.separated}",
            str(r.unknown),
            " < ".join(contest.policy for contest in r.contests),
        )
        for r in report.rankings
    )
    swapped = [f"{r.where}: {text}." for r in report.rankings for text in r.swapped]
    note = (
        "same order: pairs of policies that hardware separates by more than the larger of their"
        " spreads, and that the simulator puts in the same order. unknown: pairs run once only."
        " r: Pearson's, ρ: Spearman's, τ: Kendall's τ-b, of predicted and measured TPOT."
    )
    return Section(
        "Ranking of policies",
        ("group", "r", "ρ", "τ", "same order", "unknown", "order on hardware"),
        rows,
        ("group", "order on hardware"),
        "\n\n".join([note, *swapped]),
    )


def _decisions(comparisons: Sequence[Comparison]) -> Section:
    return Section(
        "Decisions",
        (*KEYS, "events", "differing", "hits", "bytes", "late", "in order", "first difference"),
        tuple(_decided(c) for c in comparisons),
        (*_TEXT, "in order", "first difference"),
        "hits, bytes: (predicted - measured) / measured. late: prefetches in flight when needed, as"
        " a share of activated experts, predicted / measured; such points are not expected to agree"
        " event by event. in order: whether they do in the recorded order of arrivals.",
    )


def _decided(comparison: Comparison) -> tuple[str, ...]:
    found = comparison.decisions
    late = f"{_share(found.late_predicted)} / {_share(found.late_measured)}"
    return (
        *_key(comparison.point.about),
        str(found.events),
        str(found.differing),
        _signed(found.hits_error),
        _signed(found.bytes_error),
        late if found.prefetching else "-",
        {None: "-", True: "yes", False: found.first_out_of_order}[found.in_order],
        found.first_difference or "none",
    )


def _ms(time_us: float) -> str:
    return "-" if time_us != time_us else f"{time_us / 1e3:#.4g}".rstrip(".")


def _share(value: float) -> str:
    return "-" if value != value else f"{value:.2%}"


def _signed(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:+.2%}" if abs(value) >= 5e-5 else "0.00%"


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.4f}"
