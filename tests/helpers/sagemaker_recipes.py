"""Jobs for tests of the SageMaker backend: a recipe with overrides, resolved, under a fixed run id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.backends.prepare import backend_settings
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.spec import Job
from isthmus.core.recipe import load_recipe, resolve
from isthmus.core.recipe.schema import Offer

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = ("pixart-512", "quickstart", "sd3-medium", "sdxl-progressive")
ROLE = "arn:aws:iam::123456789012:role/isthmus-training"
USUAL = (f"backends.sagemaker.role_arn={ROLE}", "backends.sagemaker.region=us-east-1")
ON_S3 = (
    "data.sources.0.uri=s3://example-bucket/quickstart",
    "validation.sources.0.uri=s3://example-bucket/heldout",
    "run_directory=s3://example-bucket/runs",
)
"""What the quickstart's recipe needs to run in a cloud."""


def make_job(
    *overrides: str,
    recipe: str = "quickstart",
    usual: bool = True,
    run_id: str | None = None,
    attempt: int = 1,
    offer: Offer | None = None,
    usd_per_hour: float | None = None,
    run_uri: str | None = None,
) -> Job:
    """A job as the launcher makes it. Overrides without a section of their own are settings of the backend's."""
    words = [*(ON_S3 if recipe == "quickstart" else ()), *(USUAL if usual else ()), *overrides]
    loaded = load_recipe(RECIPES / f"{recipe}.yaml", overrides=words)
    resolved = resolve(loaded.recipe, "sagemaker")
    name = run_id or f"{recipe}-20261130-4f2a"
    settings: Any = backend_settings(SageMakerBackend(), loaded)
    return Job(
        recipe=resolved,
        source=loaded.recipe,
        backend="sagemaker",
        run_id=name,
        run_uri=run_uri or f"{resolved.run_directory}/{name}",
        settings=settings,
        attempt=attempt,
        offer=offer,
        usd_per_hour=usd_per_hour,
    )


def sm(**settings: Any) -> list[str]:
    """Overrides of `backends.sagemaker`."""
    import json

    return [
        f"backends.sagemaker.{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in settings.items()
    ]
