"""The pluggy hook by which a package announces its backends.

In the package's pyproject.toml::

    [project.entry-points.isthmus]
    acme = "acme_isthmus.plugin"

and in that module::

    from isthmus.backends.hooks import hookimpl

    @hookimpl
    def isthmus_backends():
        return [("acme", "acme_isthmus.backend:AcmeBackend", None)]
"""

from __future__ import annotations

import pluggy

PROJECT = "isthmus"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

BackendEntry = tuple[str, str, str | None]
"""(name, import string `module:class`, the extra that brings what it needs or None)."""


class Hooks:
    """The hooks that a plugin may implement."""

    @hookspec
    def isthmus_backends(self) -> list[BackendEntry]:
        """The backends of this plugin. Imports nothing heavy: an entry is loaded when it is asked for."""
        raise NotImplementedError
