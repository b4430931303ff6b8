"""The backends that come with isthmus, announced like any other plugin's."""

from __future__ import annotations

from isthmus.backends.hooks import BackendEntry, hookimpl


@hookimpl
def isthmus_backends() -> list[BackendEntry]:
    """`local`, and the clouds."""
    return [
        ("azure", "isthmus.backends.azure.backend:AzureBackend", "azure"),
        ("local", "isthmus.backends.local.backend:LocalBackend", None),
        ("sagemaker", "isthmus.backends.sagemaker.backend:SageMakerBackend", "sagemaker"),
    ]
