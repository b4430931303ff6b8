"""For teams whose training is a step of an Azure ML pipeline: the job that isthmus would submit, as azure-ai-ml's node."""

from __future__ import annotations

from typing import Any

from isthmus.backends.azure.client import load
from isthmus.backends.azure.document import yaml_form
from isthmus.backends.azure.errors import azure_errors
from isthmus.backends.azure.render import render
from isthmus.backends.spec import Job


def to_command(job: Job) -> Any:
    """An `azure.ai.ml.entities.Command` equal in meaning to what `isthmus launch` submits.

    Its input `isthmus` is the job's folder in the run directory: `isthmus.backends.payload.put(backend.render(job))` fills
    it. Its image is written out, and registered by the SDK.

    Raises:
        UsageError: the settings do not suffice for a job; NotInstalled: the extra `azure` is missing.
    """
    with azure_errors("build the command node"):
        return load(yaml_form(render(job), inline_environment=True))
