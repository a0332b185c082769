"""With which settings a measured point was run, and in which it differs from what is asked for."""

from __future__ import annotations

from typing import Any

import msgspec

from oled_sim.validation.measured import About


def difference(found: About, asked: About) -> str | None:
    """Return the first setting in which two points of one name differ, or None.

    A point may have more repetitions than are asked for. Which machine of a kind measured it is
    compared where repetitions are still to come: a run may go on on another machine, a point not.

    Args:
        found: the point that is there. asked: the one that would be measured.

    Returns:
        What follows "was measured with": the option and both values, as in "--passes 6, not 7".
    """
    there, wanted = _settings(found), _settings(asked)
    if found.repetitions < asked.repetitions:
        there, wanted = there | _begun_on(found), wanted | _begun_on(asked)
    for name in dict.fromkeys([*there, *wanted]):
        a, b = there.get(name), wanted.get(name)
        if a != b:
            return f"{name} {_word(a)}, not {_word(b)}"
    return None


def _settings(about: About) -> dict[str, Any]:
    """Return settings by option, or by what they are where ``replay`` has no option for them.

    Names come before what they stand for: a policy before its parameters.
    """
    rules, hardware = about.rules, about.machine.hardware
    policy, geometry = about.policy, about.geometry
    return {
        "--policy": policy.spec,
        f"--policy {policy.spec} of checksum": policy.file_sha256 and policy.file_sha256[:12],
        **{f"--policy {policy.spec} with {k}": v for k, v in policy.parameters.items()},
        "--cache": about.cache,
        "--passes": sorted({cut.decode_passes or 0 for cut in about.measured}),
        "requests": [cut.request for cut in about.measured],
        "--layers": "(all)" if about.layers is None else about.layers,
        "--scope": rules.scope,
        "--staging": rules.staging,
        "--extrapolate": rules.extrapolate,
        "cold caches": rules.cold,
        "confidence": rules.confidence,
        "--geometry": geometry.name,
        **{
            f"--geometry {geometry.name} with {k}": v
            for k, v in msgspec.structs.asdict(geometry).items()
        },
        "--profile": about.profile.name,
        f"--profile {about.profile.name} of checksum": about.profile.sha256[:12],
        "--trace": about.trace.name,
        f"--trace {about.trace.name} of checksum": about.trace.sha256[:12],
        "history requests": list(about.history),
        "warm-up requests": [cut.request for cut in about.warmup],
        "--workers": hardware.workers,
        "GPU": hardware.gpu,
    }


def _begun_on(about: About) -> dict[str, Any]:
    """Return what may not change between repetitions of a point."""
    software = msgspec.structs.asdict(about.software)
    return {"machine": about.machine.identity, **software}


def _word(value: Any) -> str:
    """Return a value as a sentence has it."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "(none)" if value is None else str(value)
