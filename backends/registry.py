"""Backends by name. Plugins are looked for only when a backend is needed, and loaded only when it is theirs."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from functools import cache
from typing import Any

from isthmus.backends.hooks import BackendEntry
from isthmus.backends.spec import Backend
from isthmus.core.plugins import installed, one_line
from isthmus.errors import NotInstalled, PluginError, UsageError

_METHODS = ("render", "lint", "preflight", "submit", "status", "logs", "stop", "offers")


class _Known:
    """What the installed plugins announce, and which of them are broken."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[BackendEntry, str]] = {}
        self.broken: dict[str, str] = {}


@cache
def _scan() -> _Known:
    known, plugins = _Known(), installed()
    known.broken.update(plugins.broken)
    for plugin, module in plugins.modules.items():
        announce = getattr(module, "isthmus_backends", None)
        try:
            for name, target, extra in announce() if announce is not None else ():
                # The first one wins, and the built-in ones are never shadowed.
                if name not in known.entries or plugin == "builtin":
                    known.entries[name] = ((name, target, extra), plugin)
        except Exception as error:  # noqa: BLE001 - a plugin may fail in any way; isthmus goes on without it
            known.broken[plugin] = one_line(error)
    return known


_reported: set[str] = set()


def _report(broken: dict[str, str], *, but: str | None = None) -> None:
    for plugin, cause in broken.items():
        if plugin not in _reported and plugin != but:
            _reported.add(plugin)
            print(f"warning: plugin {plugin} is broken and was skipped: {cause}", file=sys.stderr)


def backend_names() -> list[str]:
    """Names of the backends that are announced, sorted. Broken plugins are reported on stderr, once."""
    known = _scan()
    _report(known.broken)
    return sorted(known.entries)


def get_backend(name: str) -> Backend:
    """The backend of that name, loaded.

    Raises:
        UsageError: there is none; says which are near.
        PluginError: its plugin is broken. Other broken plugins are reported on stderr, once, and skipped.
        NotInstalled: its extra is missing.
    """
    known = _scan()
    if name not in known.entries:
        # A plugin that broke before it could announce anything is asked for by its own name.
        if name in known.broken:
            raise PluginError(
                f"backend {name} cannot be loaded: {known.broken[name]}",
                hint=f"update or uninstall the plugin {name}",
            )
        _report(known.broken)
        raise _unknown(name, sorted(known.entries))
    (_, target, extra), plugin = known.entries[name]
    _report(known.broken, but=plugin)
    return _load(name, target, extra, plugin)


def _unknown(name: str, names: list[str]) -> UsageError:
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
    return UsageError(f"no backend {name!r}", hint=hint)


def _load(name: str, target: str, extra: str | None, plugin: str) -> Backend:
    module, _, attribute = target.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)()
    except ModuleNotFoundError as error:
        missing = error.name or "a module"
        if extra is not None and not module.startswith(missing):
            raise NotInstalled(f"the {name} backend", extra=extra, module=missing) from error
        raise _broken(name, plugin, one_line(error)) from error
    except Exception as error:
        raise _broken(name, plugin, one_line(error)) from error
    lacks = [word for word in ("capabilities", "settings", *_METHODS) if not hasattr(found, word)]
    if lacks:
        raise _broken(name, plugin, f"{target} lacks {', '.join(lacks)}")
    if getattr(found, "name", None) != name:
        raise _broken(name, plugin, f"{target} calls itself {getattr(found, 'name', None)!r}")
    backend: Backend = found
    return backend


def _broken(name: str, plugin: str, cause: str) -> PluginError:
    return PluginError(
        f"backend {name} of plugin {plugin} cannot be loaded: {cause}",
        hint=f"update or uninstall the plugin {plugin}",
    )
