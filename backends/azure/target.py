"""Where a job goes: workspace, compute, tier and machine, from the settings and the offer."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from isthmus.backends.azure import skus
from isthmus.backends.azure.settings import AzureSettings
from isthmus.backends.azure.skus import Sku
from isthmus.backends.spec import Job
from isthmus.errors import UsageError

DAY = 86400.0
LONGEST = {False: 21 * DAY, True: 7 * DAY}
"""Seconds that Azure ML lets a job run, by whether its machines are interruptible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """An Azure ML workspace."""

    subscription: str
    resource_group: str
    name: str

    @property
    def arm_id(self) -> str:
        """Its resource id."""
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.name}"
        )

    def to_json(self) -> dict[str, str]:
        """As a handle keeps it."""
        return {
            "subscription": self.subscription,
            "resource_group": self.resource_group,
            "workspace": self.name,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a job goes."""

    workspace: Workspace
    region: str | None
    """As written; the workspace's own region may be asked online."""
    compute: str | None
    """Name of an AmlCompute cluster; None: serverless."""
    interruptible: bool
    """Low priority on a cluster, spot on serverless."""
    sku: Sku

    @property
    def compute_id(self) -> str | None:
        """ARM id of the cluster; None: serverless."""
        return None if self.compute is None else f"{self.workspace.arm_id}/computes/{self.compute}"

    @property
    def tier(self) -> str:
        """Azure's word: `dedicated`, `low priority` or `spot`."""
        if not self.interruptible:
            return "dedicated"
        return "spot" if self.compute is None else "low priority"


def settings_of(job: Job) -> AzureSettings:
    """The job's section."""
    assert isinstance(job.settings, AzureSettings)
    return job.settings


def interruptible(job: Job) -> bool:
    """Whether its machines may be taken away: by the offer's tier, else by the settings'."""
    if job.offer is not None:
        return job.offer.tier == "spot"
    return settings_of(job).tier != "dedicated"


def sku_of(job: Job) -> Sku:
    """The machine: the offer's, the settings', or the default for the GPUs.

    Raises:
        UsageError: nobody knows it, or no machine has these GPUs.
    """
    wanted = (job.offer.sku if job.offer else None) or settings_of(job).sku
    if wanted is None:
        return skus.choose(job.recipe.compute.gpu, job.recipe.compute.gpus_per_node)
    found = skus.find(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, [sku.name for sku in skus.SKUS], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sku.name for sku in skus.SKUS)}"
        raise UsageError(f"no machine {wanted}", where="backends.azure.sku", hint=hint)
    return found


def workspace_of(job: Job) -> Workspace:
    """The workspace, of the offer's region.

    Raises:
        UsageError: one of its three names is given nowhere.
    """
    settings = settings_of(job)
    place = settings.regions.get(job.offer.region or "") if job.offer else None
    names = {
        "subscription": settings.subscription,
        "resource_group": (place and place.resource_group) or settings.resource_group,
        "workspace": (place and place.workspace) or settings.workspace,
    }
    missing = [name for name, value in names.items() if not value]
    if missing:
        raise UsageError(
            f"no {', '.join(missing)}",
            where="backends.azure",
            hint="name it there, or set AZURE_SUBSCRIPTION_ID, AZUREML_RESOURCE_GROUP and AZUREML_WORKSPACE",
        )
    return Workspace(
        subscription=str(names["subscription"]),
        resource_group=str(names["resource_group"]),
        name=str(names["workspace"]),
    )


def target_of(job: Job) -> Target:
    """Where the job goes. Raises UsageError, see `workspace_of` and `sku_of`."""
    settings = settings_of(job)
    region = (job.offer.region if job.offer else None) or settings.region
    place = settings.regions.get(region or "")
    spot = interruptible(job)
    compute = (place and place.compute) or settings.compute
    if spot:
        compute = (place and place.spot_compute) or settings.spot_compute or compute
    return Target(
        workspace=workspace_of(job),
        region=region,
        compute=None if compute == "serverless" else compute,
        interruptible=spot,
        sku=sku_of(job),
    )
