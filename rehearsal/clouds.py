"""The emulated clouds with one face: where data and runs go there, which settings of the recipe hold, what strikes a job."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from isthmus.core.recipe import Recipe
from isthmus.core.recipe.schema import Offer
from isthmus.errors import NotInstalled, UsageError
from isthmus.rehearsal.shrink import Place, Tier, nodes_of

if TYPE_CHECKING:
    from isthmus.emulators.azureml import AzureMLEmulator
    from isthmus.emulators.sagemaker.cloud import SageMakerEmulator

NEEDS = {
    "azure": (("azure.ai.ml", "azure"), ("adlfs", "azure"), ("cryptography", "rehearse")),
    "sagemaker": (("moto", "rehearse"), ("boto3", "sagemaker"), ("s3fs", "sagemaker")),
}
"""Backend -> modules that its rehearsal imports, and the extra that brings each."""
_GUID = "00000000-0000-0000-0000-0000000000aa"
_IMAGE = "rehearsal.azurecr.io/train@sha256:" + "0" * 64


class Cloud(Protocol):
    """An emulated cloud that is open."""

    @property
    def note(self) -> str:
        """What it cannot do as the service does; empty: nothing."""

    def place(self, recipe: Recipe, tier: Tier | None) -> Place:
        """Where the recipe's things go here; makes buckets, clusters and the like. `tier` None: the recipe's."""

    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""

    def evict(self, job: str) -> None:
        """Takes a spot job's machines back: SIGTERM, the grace, SIGKILL."""

    def kill_node(self, job: str, node: int) -> None:
        """A machine dies."""

    def close(self) -> None:
        """Ends all jobs and servers."""


def check_installed(backend: str) -> None:
    """Raises NotInstalled when a module is missing that the rehearsal of that backend needs, UsageError for another backend."""
    if backend not in NEEDS:
        raise UsageError(
            f"{backend or 'no backend'} cannot be rehearsed",
            where="--backend",
            hint=" or ".join(sorted(NEEDS)),
        )
    for module, extra in (("torch", "train"), *NEEDS[backend]):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            extras = ",".join(dict.fromkeys(("rehearse", *([extra] if extra == "azure" else []))))
            raise NotInstalled(f"a rehearsal on {backend}", extra=extras, module=module)


def open_cloud(backend: str, recipe: Recipe, folder: Path, variables: Mapping[str, str]) -> Cloud:
    """The emulated cloud of a backend.

    Args:
        folder: the emulator's own.
        variables: of every container.
    """
    return (SageMaker if backend == "sagemaker" else Azure)(recipe, folder, variables)


def offer_of(recipe: Recipe, backend: str) -> Offer | None:
    """The first of the recipe's offers that is of the backend."""
    return next((offer for offer in recipe.compute.offers if offer.backend == backend), None)


def roots(recipe: Recipe, backend: str, part: str) -> list[str | None]:
    """What the recipe names for a backend: the first root of each source (`data`, `validation`), or the runs (`runs`)."""
    if part == "runs":
        listed: list[Any] = [recipe.run_directory]
    else:
        listed = [source.uri for source in (recipe.data if part == "data" else recipe.validation).sources]
    chosen = [place.get(backend) if isinstance(place, dict) else place for place in listed]
    return [place[0] if isinstance(place, list) else place for place in chosen]


class SageMaker:
    """An account with a role; its buckets are called as in the recipe."""

    _KEPT = (
        "image", "wheels", "retries", "infra_check", "encrypt_traffic", "network_isolation", "checkpoint_mirror",
        "environment", "tags",
    )  # fmt: skip
    """Of the recipe's section. The others are about machines, money and networks that are not here."""

    def __init__(self, recipe: Recipe, folder: Path, variables: Mapping[str, str]) -> None:
        from isthmus.emulators.image import Image
        from isthmus.emulators.sagemaker.cloud import SageMakerEmulator

        settings = recipe.backends.get("sagemaker", {})
        offer = offer_of(recipe, "sagemaker")
        self.region = str((offer and offer.region) or settings.get("region") or "us-east-1")
        self.emulator: SageMakerEmulator = SageMakerEmulator(
            folder,
            images={"*": Image(python=sys.executable, env=dict(variables))},
            region=self.region,
        )
        self._buckets: set[str] = set()

    @property
    def note(self) -> str:
        """See `Cloud`."""
        return self.emulator.note

    def place(self, recipe: Recipe, tier: Tier | None) -> Place:
        """See `Cloud`."""
        offer, settings = offer_of(recipe, "sagemaker"), recipe.backends.get("sagemaker", {})
        wanted = str((offer and offer.tier) or settings.get("tier") or "on_demand")
        kept = {name: settings[name] for name in self._KEPT if name in settings}
        return Place(
            sources=tuple(
                self._uri(uri, f"data{n}") for n, uri in enumerate(roots(recipe, "sagemaker", "data"))
            ),
            held_out=tuple(
                self._uri(uri, f"held-out{n}")
                for n, uri in enumerate(roots(recipe, "sagemaker", "validation"))
            ),
            runs=self._uri(roots(recipe, "sagemaker", "runs")[0], "runs"),
            settings={**kept, "role_arn": self.emulator.role, "region": self.region},
            offer={
                "backend": "sagemaker",
                "region": self.region,
                "tier": tier or ("spot" if wanted == "spot" else "on_demand"),
            },
        )

    def _uri(self, uri: str | None, name: str) -> str:
        found = uri.rstrip("/") if uri and uri.startswith("s3://") else f"s3://isthmus-rehearsal/{name}"
        bucket = found.removeprefix("s3://").partition("/")[0]
        if bucket not in self._buckets:
            self._buckets.add(bucket)
            self.emulator.bucket(bucket)
        return found

    def environment(self) -> dict[str, str]:
        """See `Cloud`."""
        return self.emulator.environment()

    def evict(self, job: str) -> None:
        """See `Cloud`."""
        self.emulator.evict(job)

    def kill_node(self, job: str, node: int) -> None:
        """See `Cloud`."""
        self.emulator.kill_node(job, node)

    def close(self) -> None:
        """See `Cloud`."""
        self.emulator.close()


class Azure:
    """A workspace called as the recipe's, with its clusters; the storage account is the emulator's."""

    _KEPT = (
        "identity", "client_id", "environment", "experiment", "tags", "environment_variables", "shm_size", "memlock",
        "docker_args", "mount", "grace", "wheels",
    )  # fmt: skip

    def __init__(self, recipe: Recipe, folder: Path, variables: Mapping[str, str]) -> None:
        from isthmus.emulators.azureml import AzureMLEmulator
        from isthmus.emulators.image import Image

        settings = recipe.backends.get("azure", {})
        offer = offer_of(recipe, "azure")
        self.region = str((offer and offer.region) or settings.get("region") or "italynorth")
        named: dict[str, Any] = {
            name: str(settings[name])
            for name in ("subscription", "resource_group", "workspace")
            if settings.get(name)
        }
        self.emulator: AzureMLEmulator = AzureMLEmulator(
            folder,
            images={"*": Image(python=sys.executable, env=dict(variables))},
            region=self.region,
            **named,
        )
        for regions in self.emulator.offered.values():
            regions.add(self.region)

    @property
    def note(self) -> str:
        """See `Cloud`."""
        return self.emulator.note

    def place(self, recipe: Recipe, tier: Tier | None) -> Place:
        """See `Cloud`."""
        offer, settings = offer_of(recipe, "azure"), recipe.backends.get("azure", {})
        wanted = (offer.tier == "spot") if offer else settings.get("tier", "dedicated") != "dedicated"
        spot = tier == "spot" if tier else wanted
        world = self.emulator.world
        section = {
            "subscription": world.subscription,
            "resource_group": world.resource_group,
            "workspace": world.workspace,
            "region": self.region,
            **{name: settings[name] for name in self._KEPT if name in settings},
            **self._compute(recipe, settings, spot=spot),
        }
        section.setdefault("environment", {"image": _IMAGE})
        self._environment(section["environment"])
        return Place(
            sources=tuple(self._uri(uri, f"data{n}") for n, uri in enumerate(roots(recipe, "azure", "data"))),
            held_out=tuple(
                self._uri(uri, f"held-out{n}") for n, uri in enumerate(roots(recipe, "azure", "validation"))
            ),
            runs=self._uri(roots(recipe, "azure", "runs")[0], "runs"),
            settings=section,
            offer={"backend": "azure", "region": self.region, "tier": "spot" if spot else "on_demand"},
        )

    def _compute(self, recipe: Recipe, settings: Mapping[str, Any], *, spot: bool) -> dict[str, Any]:
        """A cluster as the recipe names it, or serverless."""
        compute = settings.get("compute", "serverless")
        if compute == "serverless" and not settings.get("spot_compute"):
            return {"compute": "serverless", "client_id": settings.get("client_id") or _GUID}
        low = settings.get("spot_compute") or f"{compute[:20]}-low"
        for name, low_priority in ((compute, False), (low, True)):
            if name != "serverless" and low_priority == spot:
                self.emulator.add_compute(
                    name, "Standard_D4ds_v5", nodes=nodes_of(recipe), low_priority=low_priority
                )
        return {"compute": compute, "spot_compute": low}

    def _environment(self, section: Mapping[str, Any]) -> None:
        registered = section.get("registered")
        if registered and not str(registered).startswith("azureml://"):
            name, _, version = str(registered).partition(":")
            self.emulator.add_environment(name, version, _IMAGE)

    def _uri(self, uri: str | None, name: str) -> str:
        if uri and uri.startswith("az://"):
            container, _, path = uri.removeprefix("az://").partition("/")
            return self.emulator.container_uri(container.partition("@")[0], path.rstrip("/"))
        return self.emulator.container_uri("isthmus-rehearsal", name)

    def environment(self) -> dict[str, str]:
        """See `Cloud`."""
        return self.emulator.environment()

    def evict(self, job: str) -> None:
        """See `Cloud`."""
        self.emulator.evict(job)

    def kill_node(self, job: str, node: int) -> None:
        """See `Cloud`."""
        self.emulator.kill_node(job, node)

    def close(self) -> None:
        """See `Cloud`."""
        self.emulator.close()
