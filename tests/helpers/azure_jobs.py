"""Jobs for tests of the Azure backend: a recipe with overrides, resolved, under a fixed run id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.backends.azure.backend import AzureBackend
from isthmus.backends.prepare import backend_settings
from isthmus.backends.spec import Job
from isthmus.core.recipe import load_recipe, resolve
from isthmus.core.recipe.schema import Offer

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = ("pixart-512", "quickstart", "sd3-medium", "sdxl-progressive")
SUBSCRIPTION = "00000000-0000-0000-0000-000000000001"
IDENTITY = "00000000-0000-0000-0000-0000000000aa"
IMAGE = "exampleregistry.azurecr.io/train@sha256:" + "0123456789abcdef" * 4
USUAL: dict[str, Any] = {
    "subscription": SUBSCRIPTION,
    "resource_group": "training",
    "workspace": "images",
    "region": "italynorth",
    "compute": "nd-a100",
    "spot_compute": "nd-a100-low",
    "environment": {"image": IMAGE},
}
ACCOUNT = "exampleaccount.blob.core.windows.net"
IN_BLOB = (
    f"data.sources.0.uri=az://latents@{ACCOUNT}/quickstart",
    f"validation.sources.0.uri=az://latents@{ACCOUNT}/heldout",
    f"run_directory=az://runs@{ACCOUNT}/quickstart",
)
"""What the quickstart's recipe needs to run in a cloud."""


def az(**settings: Any) -> list[str]:
    """Overrides of `backends.azure`."""
    return [
        f"backends.azure.{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()
    ]


def make_job(
    *overrides: str,
    recipe: str = "quickstart",
    usual: bool = True,
    without: tuple[str, ...] = (),
    run_id: str | None = None,
    attempt: int = 1,
    offer: Offer | None = None,
    usd_per_hour: float | None = None,
    run_uri: str | None = None,
) -> Job:
    """A job as the launcher makes it.

    Args:
        without: of the usual settings.
    """
    settings = {name: value for name, value in USUAL.items() if usual and name not in without}
    # The recipes that ship name an example's place, too.
    absent = [f"backends.azure.{name}=null" for name in (USUAL if not usual else without)]
    absent = [] if recipe == "quickstart" else absent
    words = [*(IN_BLOB if recipe == "quickstart" else ()), *az(**settings), *absent, *overrides]
    loaded = load_recipe(RECIPES / f"{recipe}.yaml", overrides=words)
    resolved = resolve(loaded.recipe, "azure")
    name = run_id or f"{recipe}-20261130-4f2a"
    return Job(
        recipe=resolved,
        source=loaded.recipe,
        backend="azure",
        run_id=name,
        run_uri=run_uri or f"{resolved.run_directory}/{name}",
        settings=backend_settings(AzureBackend(), loaded),
        attempt=attempt,
        offer=offer,
        usd_per_hour=usd_per_hour,
    )


def offer(tier: str, **more: Any) -> Offer:
    """An offer of azure."""
    return Offer.model_validate({"backend": "azure", "tier": tier, **more})


CASES = [
    (recipe, tier, access)
    for recipe in SHIPPED
    for tier in ("on_demand", "spot")
    for access in ("mount", "stream", "download")
]
CASE_STUDY = [
    (f"case-study.{tier}.{compute}", tier, compute)
    for tier in ("on_demand", "spot")
    for compute in ("cluster", "serverless")
]


def shipped(recipe: str, tier: str, access: str) -> Job:
    """A shipped recipe on a cluster in Italy North."""
    return make_job(f"data.access={access}", recipe=recipe, offer=offer(tier, region="italynorth"))


def case_study(tier: str, compute: str) -> Job:
    """16 nodes of 8 A100-80GB, three stages, in Italy North, on a cluster that scales to zero or serverless."""
    cluster = {"create": True, "min_nodes": 0, "max_nodes": 16, "idle": "15 min"}
    kind = (
        {"compute": "serverless", "client_id": IDENTITY} if compute == "serverless" else {"cluster": cluster}
    )
    without = ("compute", "spot_compute") if compute == "serverless" else ()
    return make_job(
        *az(**kind, ssh={"public_key": "ssh-ed25519 AAAAC3NzaC1lZDI1 team"}),
        *az(tags={"team": "images"}, tensorboard={}),
        "trackers=[tensorboard]",
        recipe="sdxl-progressive",
        without=without,
        offer=offer(tier, region="italynorth"),
        usd_per_hour=351.0 if tier == "on_demand" else 105.5,
        run_id="sdxl-progressive-20261130-4f2a",
    )
