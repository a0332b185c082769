"""What users write after ``--policy``: a name, a variant, parameters.

=============================  ==================================================================
``oled``                       a registered policy with its defaults
``oled:priority+adapt``        a variant: a named set of parameters
``lfu:count=tokens``           parameters, several separated by commas
``oled:priority,psi=square``   a variant, then parameters
``mine.policies:Best:decay=2`` a class of an importable module
``./mine.py:decay=2``          the one class of a file; ``./mine.py:Best`` if there are several
=============================  ==================================================================
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from oled_sim import plugins
from oled_sim.errors import UsageError
from oled_sim.policy import Policy, parameters

__all__ = ["load_policy", "parse_policy"]


def parse_policy(spec: str) -> Policy:
    """Return the policy that ``spec`` describes.

    Raises:
        UsageError: unknown policy, variant or parameter (with the nearest known one), or a value
            that the parameter cannot take.
    """
    name, options = _split(spec)
    policy = load_policy(name)
    values: dict[str, Any] = {}
    for option in options:
        key, is_value, text = option.partition("=")
        if is_value:
            values[key.strip()] = _value(name, policy, key.strip(), text.strip())
        else:
            values.update(_variant(name, policy, option.strip()))
    known = parameters(policy)
    return policy(**{known[key].name: value for key, value in values.items()})


def load_policy(name: str) -> type[Policy]:
    """Return the policy class of that name.

    Raises:
        UsageError: no such policy, or something else.
    """
    found = plugins.load(plugins.POLICIES, name)
    if not (isinstance(found, type) and issubclass(found, Policy) and is_dataclass(found)):
        raise UsageError(
            f"{name!r} is not a policy: it must be a dataclass derived from oled_sim.policy.Policy"
        )
    return found


def _split(spec: str) -> tuple[str, list[str]]:
    """Split a specification into the name of a policy and its options."""
    parts = spec.split(":")
    # After a file or a module comes a class, unless it is a parameter.
    has_class = len(parts) > 1 and "=" not in parts[1] and not _is_name(parts[0])
    taken = 1 + int(has_class)
    if len(parts) > taken + 1:
        raise UsageError(f"policy {spec!r} has too many colons: write name:variant,parameter=value")
    options = parts[taken].split(",") if len(parts) > taken else []
    if any(not option.strip() for option in options):
        raise UsageError(f"policy {spec!r} has an empty option: write name:variant,parameter=value")
    return ":".join(parts[:taken]), options


def _is_name(word: str) -> bool:
    """Whether a word is a policy's name, right or misspelt, rather than a module or a file."""
    if word in _registered():
        return True
    return "." not in word and importlib.util.find_spec(word) is None


@cache
def _registered() -> frozenset[str]:
    return frozenset(plugins.names(plugins.POLICIES))


def _variant(name: str, policy: type[Policy], variant: str) -> dict[str, Any]:
    if variant in policy.variants:
        return dict(policy.variants[variant])
    variants = _known(variant, policy.variants, "variants")
    known = _known(variant, parameters(policy), "parameters")
    raise UsageError(f"policy {name!r} has no variant {variant!r}: {variants}; {known}")


def _value(name: str, policy: type[Policy], key: str, text: str) -> Any:
    known = parameters(policy)
    if key not in known:
        raise UsageError(
            f"policy {name!r} has no parameter {key!r}: {_known(key, known, 'parameters')}"
        )
    kind = get_type_hints(policy)[known[key].name]
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        help = known[key].metadata["help"]
        raise UsageError(
            f"policy {name!r} cannot take {key}={text} ({help}): give {_wanted(kind)}"
        ) from None


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    return words.get(kind, str(kind))


def _known(wrong: str, names: Any, noun: str) -> str:
    near = difflib.get_close_matches(wrong, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}{noun} are {', '.join(names) or 'none'}"
