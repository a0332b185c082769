"""What ``oled-sim plan`` prints."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from oled_sim.cli.run_table import milliseconds, print_facts
from oled_sim.cli.tables import PROSE_WIDTH, Row, print_notes, print_table, table_console
from oled_sim.planning.accuracy import OFTEN, Accuracy
from oled_sim.planning.answer import Answer
from oled_sim.planning.search import Candidate

PARTS = {
    "experts": "experts",
    "staging": "staging slots",
    "kv_cache": "KV cache",
    "layers": "attention, dense layers, shared experts, routers",
    "embedding": "embedding",
    "lm_head": "LM head",
    "activations": "activations and logits (estimate)",
    "reserve": "driver, workspaces, allocator (--reserve)",
}
"""What the parts of a bill are called."""


def print_answer(found: Answer) -> None:
    """Print the question, the answer, the bill, the policies, and how sure it is; to stdout."""
    console = table_console()
    print_facts(console, found.header, ("Trace", "Routing", "Profile", "Rules"))
    _line(console, f"{'Target':<9}{_target(found)}")
    console.print()
    for paragraph in (_verdict(found), *_uncertainty(found)):
        for line in textwrap.wrap(paragraph, min(console.width, PROSE_WIDTH)):
            _line(console, line)
    console.print()
    _print_bill(console, found)
    console.print()
    _print_policies(console, found)
    console.print()
    _print_contexts(console, found)
    print_notes(console, [_legend(found)])


def _line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _target(found: Answer) -> str:
    return (
        f"TPOT ≤ {milliseconds(found.question.target_us)} ms within"
        f" {gib(found.gpu_memory_bytes)} GiB of GPU memory, contexts of"
        f" {found.question.context:,} tokens"
    )


def _verdict(found: Answer) -> str:
    """Return the answer in a sentence or two."""
    choice, best = found.choice, found.found.fastest
    if choice is not None:
        return (
            f"Keep {choice.cache} experts per layer with {choice.policy}: {_time(choice)} ms per"
            f" token in {gib(found.bill(choice).total)} GiB. It is the smallest cache tried that"
            f" meets the target; at most {found.largest} fit."
        )
    return (
        f"Not to be had: with up to {found.largest} experts per layer, the most that fit, no policy"
        f" meets the target. The best is {best.policy} with {best.cache}: {_time(best)} ms per"
        f" token in {gib(found.bill(best).total)} GiB."
    )


def _uncertainty(found: Answer) -> list[str]:
    """Return what the answer does not know, a paragraph each."""
    advised = found.advised
    lines = [_about_interval(found, advised), _about_profile(found)]
    accuracy = found.accuracy.get(advised.policy)
    if accuracy is not None:
        lines.append(_about_accuracy(accuracy))
        lines.append(_about_safety(found))
    if found.synthetic:
        lines.append(
            "Routing: synthetic, made for this model's size after a small model's traces; how far"
            " it is from the model's own is not known. Record one with `oled-sim collect`."
        )
    elif found.stands_in:
        lines.append(
            "Routing: recorded from a small model with this routing geometry, not from"
            f" {found.question.model.name} itself."
        )
    return lines


def _about_interval(found: Answer, advised: Candidate) -> str:
    tpot = advised.tpot_us
    if tpot.low != tpot.low:
        return "Requests: one is counted, so there is no interval."
    target = found.question.target_us
    side = "" if found.choice is None or tpot.high <= target else "; it reaches beyond the target"
    return (
        f"Requests: the 95 % interval over {tpot.requests} requests is {milliseconds(tpot.low)} to"
        f" {milliseconds(tpot.high)} ms{side}."
    )


def _about_profile(found: Answer) -> str:
    profile = found.header["profile"]
    if profile["status"] != "measured":
        return (
            f"Costs: {profile['name']} is {profile['status']}, not measured, so times may be far"
            " off; measure the machine with `oled-sim profile`."
        )
    mark = ", but provisional" if profile["provisional"] else ""
    rest = "" if found.accuracy else "; no validation of its predictions is at hand"
    return f"Costs: {profile['name']} is measured{mark}{rest}."


def _about_accuracy(accuracy: Accuracy) -> str:
    whose = accuracy.policy or "all policies, this one not among them"
    return (
        f"Hardware: over {accuracy.points} replayed points of {whose}, predictions were off by"
        f" {accuracy.median:.1%} (median), {accuracy.bias:+.1%} on average and"
        f" {accuracy.worst:.1%} at worst ({accuracy.source})."
    )


def _about_safety(found: Answer) -> str:
    safe = found.found.safe
    margin = f"the interval's upper end and the error that {OFTEN:.0%} of those points stay within"
    if safe is None:
        return f"Safe side: with {margin}, no cache that fits meets the target."
    return (
        f"Safe side: with {margin}, keep {safe.cache} per layer with {safe.policy}"
        f" ({milliseconds(safe.tpot_us.value)} ms, {gib(found.bill(safe).total)} GiB)."
    )


def _print_bill(console: Console, found: Answer) -> None:
    advised = found.advised
    bill = found.bill(advised)
    rows: list[Row] = []
    for part, name in PARTS.items():
        size = getattr(bill, part)
        label = f"{advised.cache} experts per layer" if part == "experts" else name
        rows.append([label, gib(size), f"{size / bill.total:.1%}"])
    rows += [None, ["total", gib(bill.total), ""]]
    print_table(console, ["GPU memory", "GiB", "share"], rows, left=("GPU memory",))


def _print_policies(console: Console, found: Answer) -> None:
    rows: list[Row] = []
    for policy in found.found.policies:
        smallest = found.found.smallest_of(policy)
        best = min(found.found.of(policy), key=lambda c: (c.mean_us, c.cache))
        meets = ["none", "", ""]
        if smallest is not None:
            meets = [str(smallest.cache), _time(smallest), gib(found.bill(smallest).total)]
        rows.append([policy, *meets, _time(best), str(best.cache)])
    names = ["policy", "smallest cache", "TPOT", "GiB", "best TPOT", "with cache"]
    print_table(console, names, rows, left=("policy",))


def _print_contexts(console: Console, found: Answer) -> None:
    rows: list[Row] = [
        [f"{row['context']:,}", gib(row["kv_bytes"]), str(row["largest_cache"] or "none")]
        for row in found.contexts
    ]
    print_table(console, ["context", "KV GiB", "experts that fit"], rows)


def _legend(found: Answer) -> str:
    knee = found.found.knee
    bend = "" if knee is None else f" Knee: {knee.cache} experts per layer ({_time(knee)} ms)."
    return (
        "cache: experts per MoE layer. TPOT: ms, mean and 95 % interval over requests. GiB: all GPU"
        f" memory. experts that fit: per layer, in {gib(found.gpu_memory_bytes)} GiB.{bend}"
    )


def _time(candidate: Candidate) -> str:
    tpot = candidate.tpot_us
    if tpot.low != tpot.low:
        return milliseconds(tpot.value)
    return f"{milliseconds(tpot.value)} ({milliseconds(tpot.low)}–{milliseconds(tpot.high)})"


def gib(size_bytes: int) -> str:
    """Return bytes as GiB with two digits."""
    return f"{size_bytes / 2**30:.2f}"
