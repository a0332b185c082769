"""Plug-ins by name: entry point, ``module:attr``, or ``./file.py``.

The core never imports a policy or a collector; it asks here. A third party's plug-in is loaded
exactly as a built-in one.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
import zlib
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from oled_sim.errors import PluginError, UsageError, one_line

POLICIES = "oled_sim.policies"
COLLECTORS = "oled_sim.collectors"
LIVE_COLLECTORS = "oled_sim.live_collectors"
IMPORTERS = "oled_sim.importers"
EXPORTERS = "oled_sim.exporters"
CLAIMS = "oled_sim.claims"
EXPERIMENTS = "oled_sim.experiments"


def names(group: str) -> list[str]:
    """Return the sorted names registered in an entry-point ``group``."""
    return sorted(_registered(group).names)


def package_of(group: str, name: str) -> str | None:
    """Return name and version of the package that registered a plug-in; None if none did."""
    for entry in _registered(group).select(name=name):
        if entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
    return None


def load(group: str, name: str) -> Any:
    """Load a plug-in.

    Args:
        group: an entry-point group such as :data:`POLICIES`.
        name: an entry-point name, ``package.module:attr``, ``path/to/file.py`` (which must hold
            exactly one candidate), or ``path/to/file.py:attr``.

    Raises:
        UsageError: nothing by that name.
        PluginError: it does not import, or its file holds no class.
    """
    found = {e.name: e for e in _registered(group)}
    if name in found:
        return _load_entry(found[name])
    if ".py" in name:
        return _load_file(name)
    if ":" in name:
        return _attribute(*name.split(":", 1))
    if group == COLLECTORS and name in names(LIVE_COLLECTORS):
        raise UsageError(
            f"collector {name!r} records a model that you run yourself: put"
            " `with oled_sim.record(model, out=...)` around the run"
        )
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown {_noun(group)} {name!r}: {hint}known are {', '.join(sorted(found))}")


_content_sha256: dict[str, str] = {}
"""Of files that were imported by path, by the name of their module."""


def content_sha256(plugin: type) -> str | None:
    """Return the SHA-256 of the file that defines a plug-in, as it was when it was loaded.

    None for a class of an installed or importable module: there the file was not what was named.
    """
    return _content_sha256.get(plugin.__module__)


def _registered(group: str) -> EntryPoints:
    """Return the entry points of a group; what is installed meanwhile is found."""
    return _read(group, tuple((folder, _changed_ns(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=64)
def _read(group: str, folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Read the entry points of every installed package, which takes milliseconds.

    ``folders``: the module search path and when each folder last changed, ns: what decides about
    the answer.
    """
    return entry_points(group=group)


def _changed_ns(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns  # "" is the current folder
    except OSError:  # a path entry need not exist
        return 0


def _noun(group: str) -> str:
    return {
        POLICIES: "policy",
        COLLECTORS: "collector",
        LIVE_COLLECTORS: "collector",
        IMPORTERS: "importer",
        EXPORTERS: "exporter",
        CLAIMS: "list of claims",
        EXPERIMENTS: "experiment",
    }.get(group, group)


def _load_entry(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plug-in {entry.name!r} ({entry.value}) does not import: {one_line(error)}"
        ) from error


def _attribute(module: str, attribute: str) -> Any:
    if not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(
            f"{module!r} is no name of a module: write package.module:{attribute}, or the path of"
            f" a Python file, as in ./mine.py:{attribute}"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"module {module!r} is not found ({one_line(error)}): install it, put its folder on"
            f" PYTHONPATH, or give the file itself, as in ./{module.split('.')[0]}.py:{attribute}"
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"module {module!r} does not import: {one_line(error)}") from error
    if not hasattr(found, attribute):
        raise UsageError(f"module {module!r} has no attribute {attribute!r}")
    return getattr(found, attribute)


def _load_file(name: str) -> Any:
    path, _, attribute = name.partition(".py")
    module = _import_path(Path(path + ".py"))
    if attribute:
        return _named(module, attribute.removeprefix(":"), name)
    return _single_class(module, name)


def _import_path(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no file {path}: give the path of a Python file")
    # Files of one name in two folders are two modules.
    name = f"oled_sim_plugin_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        # The loader would take bytecode of before, if size and second of the file are the same.
        content = path.read_bytes()
        source = spec.origin or str(path)  # as `__file__` has it, by which errors find their line
        exec(compile(content, source, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        raise PluginError(f"{path} does not import: {one_line(error)}") from error
    _content_sha256[name] = hashlib.sha256(content).hexdigest()
    return module


def _named(module: ModuleType, attribute: str, name: str) -> Any:
    if not hasattr(module, attribute):
        raise UsageError(f"{name}: the file has no {attribute!r}")
    return getattr(module, attribute)


def _single_class(module: ModuleType, name: str) -> Any:
    own = [
        v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__
    ]
    if not own:
        raise PluginError(f"{name} defines no class")
    if len(own) != 1:
        raise UsageError(f"{name} defines {len(own)} classes: say which, as in {name}:ClassName")
    return own[0]
