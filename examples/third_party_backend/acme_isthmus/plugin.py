"""Announces the backend; imported whenever isthmus looks for backends, so it imports nothing else."""

from __future__ import annotations

from isthmus.backends.hooks import BackendEntry, hookimpl


@hookimpl
def isthmus_backends() -> list[BackendEntry]:
    """`acme`, which needs nothing that isthmus does not bring."""
    return [("acme", "acme_isthmus.backend:AcmeBackend", None)]
