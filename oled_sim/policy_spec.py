"""What users write after ``--policy``: a name, a variant, parameters.

=============================  ==================================================================
``oled``                       a registered policy with its defaults
``oled:priority+adapt``        a variant: a named set of parameters
``lfu:count=tokens``           parameters, several separated by commas
``./mine.py:layers=0/1/5``     a parameter with several values
``oled:priority,psi=square``   a variant, then parameters
``mine.policies:Best:decay=2`` a class of an importable module
``./mine.py:decay=2``          the one class of a file; ``./mine.py:Best`` if there are several
``grid.toml``                  every policy of a file (:mod:`oled_sim.policy_file`)
``grid.toml:slow``             the one with that label
=============================  ==================================================================
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Mapping, Set
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from oled_sim import plugins
from oled_sim.errors import OledSimError, PolicyError, UsageError, one_line
from oled_sim.policy import Policy, parameters
from oled_sim.trace.schema import SIGNALS

SEVERAL = (list, tuple)
"""Types of parameters with several values, separated by slashes on the command line."""

__all__ = ["build_policy", "kind_of", "load_policy", "parse_policies", "parse_policy", "split_spec"]


def parse_policies(specs: Iterable[str]) -> dict[str, Policy]:
    """Return the policies that specifications describe, by label, in the order given.

    The label of a policy is its specification, or what a TOML file calls it.

    Raises:
        UsageError: as :func:`parse_policy`; there is none; a TOML file is wrong; two policies
            share a label.
    """
    from oled_sim.policy_file import named_in, policies_of_file

    specs = list(specs)
    if not specs:
        raise UsageError("no policy to run: give at least one, such as --policy oled")
    found: dict[str, Policy] = {}
    for spec in dict.fromkeys(specs):
        new = policies_of_file(spec) if named_in(spec) else {spec: parse_policy(spec)}
        for label in new.keys() & found.keys():
            raise UsageError(f"two policies are called {label!r}: give one a label of its own")
        found |= new
    return found


def parse_policy(spec: str) -> Policy:
    """Return the policy that ``spec`` describes.

    Raises:
        UsageError: unknown policy, variant or parameter (with the nearest known one), or a value
            that the parameter cannot take.
    """
    return build_policy(spec, {})


def build_policy(spec: str, values: Mapping[str, Any]) -> Policy:
    """Return the policy that ``spec`` describes, with further parameters of their own types.

    Raises:
        UsageError: as :func:`parse_policy`.
    """
    name, options = split_spec(spec)
    policy = load_policy(name)
    chosen: dict[str, Any] = {}
    for option in options:
        key, is_value, text = option.partition("=")
        if is_value:
            chosen[key.strip()] = _value(name, policy, key.strip(), text.strip(), strict=False)
        else:
            chosen.update(_variant(name, policy, option.strip()))
    for key, value in values.items():
        chosen[key] = _value(name, policy, key, value, strict=True)
    return _create(name, policy, chosen)


def load_policy(name: str) -> type[Policy]:
    """Return the policy class of that name.

    Raises:
        UsageError: no such policy, or something else.
        PluginError: it does not import.
        PolicyError: it is no dataclass, needs what no trace has, or hides a hook.
    """
    found = plugins.load(plugins.POLICIES, name)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UsageError(
            f"{name!r} is not a policy: it must be a dataclass derived from oled_sim.policy.Policy"
        )
    if any(isinstance(value, Field) for value in vars(found).values()):
        raise PolicyError(f"{name!r} has parameters but is no dataclass: write @dataclass above it")
    for which, signals in (("needs", found.needs), ("wants", found.wants)):
        if not isinstance(signals, Set):
            raise PolicyError(f"{name!r} has {which} = {signals!r}: write frozenset({{'ids', …}})")
        for signal in sorted(signals - {*SIGNALS, "future"}):
            known = _known(signal, [*SIGNALS, "future"], "signals")
            raise PolicyError(
                f"{name!r} {which} the signal {signal!r}, which no trace has: {known}"
            )
    _refuse_hidden_hooks(name, found)
    return found


def _refuse_hidden_hooks(name: str, policy: type[Policy]) -> None:
    """Refuse a parameter that has taken a hook's name: the hook could never be called."""
    for field in fields(policy):
        if field.init and callable(getattr(Policy, field.name, None)):
            raise PolicyError(
                f"{name!r} has a parameter called {field.name!r}, which is a hook: write"
                f" {field.name}_by: … = param(…, name={field.name!r})"
            )


def split_spec(spec: str) -> tuple[str, list[str]]:
    """Split a specification into the name of a policy and its options.

    Raises:
        UsageError: too many colons, or an empty option.
    """
    parts = spec.split(":")
    # After a file or a module comes a class, unless it is a parameter.
    has_class = len(parts) > 1 and "=" not in parts[1] and not _is_name(parts[0])
    has_class |= len(parts) > 1 and parts[1][:1].isupper() and parts[0] not in _registered()
    taken = 1 + int(has_class)
    if len(parts) > taken + 1:
        raise UsageError(f"policy {spec!r} has too many colons: write name:variant,parameter=value")
    options = parts[taken].split(",") if len(parts) > taken else []
    if any(not option.strip() for option in options):
        raise UsageError(f"policy {spec!r} has an empty option: write name:variant,parameter=value")
    return ":".join(parts[:taken]), options


def kind_of(policy: type[Policy], field: Field[Any]) -> Any:
    """Return the type of a parameter.

    Raises:
        UsageError: its annotation cannot be resolved.
    """
    try:
        return get_type_hints(policy)[field.name]
    except Exception as error:
        raise UsageError(
            f"policy {policy.__name__!r} has an annotation that means nothing: {one_line(error)}"
        ) from error


def _is_name(word: str) -> bool:
    """Whether a word is a policy's name, right or misspelt, rather than a module or a file."""
    if word in _registered():
        return True
    return "." not in word and importlib.util.find_spec(word) is None


@cache
def _registered() -> frozenset[str]:
    return frozenset(plugins.names(plugins.POLICIES))


def _create(name: str, policy: type[Policy], values: Mapping[str, Any]) -> Policy:
    known = parameters(policy)
    for key, field in known.items():
        if key not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"policy {name!r} needs a value for {key!r}: write {name}:{key}=value")
    try:
        return policy(**{known[key].name: value for key, value in values.items()})
    except OledSimError as error:
        if name in str(error):
            raise
        raise type(error)(f"policy {name!r}: {error}") from error
    except Exception as error:
        raise UsageError(f"policy {name!r} refuses its parameters: {one_line(error)}") from error


def _variant(name: str, policy: type[Policy], variant: str) -> dict[str, Any]:
    if variant in policy.variants:
        return dict(policy.variants[variant])
    variants = _known(variant, policy.variants, "variants")
    known = _known(variant, parameters(policy), "parameters")
    raise UsageError(f"policy {name!r} has no variant {variant!r}: {variants}; {known}")


def _value(name: str, policy: type[Policy], key: str, given: Any, *, strict: bool) -> Any:
    """Return a parameter's value; unless ``strict``, what is given is text that stands for it."""
    known = parameters(policy)
    if key not in known:
        raise UsageError(
            f"policy {name!r} has no parameter {key!r}: {_known(key, known, 'parameters')}"
        )
    kind = kind_of(policy, known[key])
    if not strict and get_origin(kind) in SEVERAL:
        given = given.split("/") if given else []
    try:
        return msgspec.convert(given, kind, strict=strict)
    except (msgspec.ValidationError, TypeError):
        help = known[key].metadata.get("help", "no help")
        text = "/".join(given) if not strict and isinstance(given, list) else given
        raise UsageError(
            f"policy {name!r} cannot take {key}={text} ({help}): give {_wanted(kind)}"
        ) from None


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in SEVERAL:
        return f"values such as {_example(kind)}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, str(kind))


def _example(kind: Any) -> str:
    """Return how values of a list or a tuple are written on the command line."""
    examples = {int: ("1", "2"), float: ("0.5", "2"), bool: ("true", "false")}
    kinds = [k for k in get_args(kind) if k is not Ellipsis] or [str]
    pair = kinds if len(kinds) > 1 else kinds * 2
    return "/".join(examples.get(k, ("one", "two"))[i % 2] for i, k in enumerate(pair))


def _known(wrong: str, names: Any, noun: str) -> str:
    near = difflib.get_close_matches(wrong, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}{noun} are {', '.join(names) or 'none'}"
