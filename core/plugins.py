"""Plugins: packages that announce backends or denoisers through a pluggy hook, and how they are found.

In a package's pyproject.toml::

    [project.entry-points.isthmus]
    acme = "acme_isthmus.plugin"

and in that module::

    from isthmus.core.plugins import hookimpl

    @hookimpl
    def isthmus_denoisers():
        return [("acme-dit", "acme_isthmus.dit:AcmeDiT")]

A recipe's own `code` needs no package: its `isthmus_plugin.py` is such a module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pluggy

PROJECT = "isthmus"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

BackendEntry = tuple[str, str, str | None]
"""(name, import string `module:class`, the extra that brings what it needs or None)."""
DenoiserEntry = tuple[str, str]
"""(name, import string `module:class`)."""


class Hooks:
    """The hooks that a plugin may implement."""

    @hookspec
    def isthmus_backends(self) -> list[BackendEntry]:
        """The backends of this plugin. Imports nothing heavy: an entry is loaded when it is asked for."""
        raise NotImplementedError

    @hookspec
    def isthmus_denoisers(self) -> list[DenoiserEntry]:
        """The denoisers of this plugin, by the name that `model.family` gives. Imports nothing heavy either."""
        raise NotImplementedError


@dataclass(slots=True)
class Plugins:
    """What is installed."""

    modules: dict[str, Any] = field(default_factory=dict)
    """Entry point's name -> module, by name."""
    broken: dict[str, str] = field(default_factory=dict)
    """Entry point's name -> why it could not be loaded, one line."""


@cache
def installed() -> Plugins:
    """The plugins of the entry-point group `isthmus`, loaded once; one that is broken does not disturb the others."""
    from importlib import metadata

    found = Plugins()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    for point in sorted(metadata.entry_points(group=PROJECT), key=lambda point: point.name):
        if manager.get_plugin(point.name) is not None:
            continue  # the same distribution found twice, as with an editable install beside a wheel
        try:
            manager.register(point.load(), point.name)
            manager.check_pending()
        except Exception as error:  # noqa: BLE001 - a plugin may fail in any way; isthmus goes on without it
            found.broken[point.name] = one_line(error)
            if manager.has_plugin(point.name):
                manager.unregister(name=point.name)
            continue
        found.modules[point.name] = manager.get_plugin(point.name)
    return found


def one_line(error: BaseException) -> str:
    """Kind and message of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())
