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

from isthmus.core.plugins import PROJECT, BackendEntry, Hooks, hookimpl, hookspec

__all__ = ["PROJECT", "BackendEntry", "Hooks", "hookimpl", "hookspec"]
