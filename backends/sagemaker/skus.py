"""The machines of SageMaker training that isthmus knows: what is in them, and which one a recipe means.

Sources: Amazon EC2's pages of instance types, and botocore's list of training instance types (`shapes.py` checks a name
against that list, so a type that is missing here can still be named, with a warning).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.core.recipe.schema import Compute

Fabric = Literal["efa", "ethernet"]


@dataclass(frozen=True, slots=True)
class Sku:
    """One instance type."""

    name: str
    gpu: str
    """The recipe's word for its GPU; `none` of a machine without."""
    gpus: int
    vcpus: int
    nvme_gb: int
    """Local NVMe disks, GB in all; 0 of a machine whose disk is EBS."""
    fabric: Fabric = "ethernet"
    gbps: int = 0
    """Of the network, all cards together."""

    @property
    def family(self) -> str:
        """`p4d` of `ml.p4d.24xlarge`."""
        return self.name.split(".")[1]

    @property
    def ec2(self) -> str:
        """EC2's name of the same machine."""
        return self.name.removeprefix("ml.")

    @property
    def quota(self) -> str:
        """Service Quotas' name of the on-demand quota."""
        return f"{self.name} for training job usage"


def _table() -> tuple[Sku, ...]:
    found = [
        Sku("ml.p4d.24xlarge", "a100-40gb", 8, 96, 8_000, "efa", 400),
        Sku("ml.p4de.24xlarge", "a100-80gb", 8, 96, 8_000, "efa", 400),
        Sku("ml.p5.48xlarge", "h100-80gb", 8, 192, 30_720, "efa", 3200),
        Sku("ml.p5.4xlarge", "h100-80gb", 1, 16, 3_840, "efa", 100),
        Sku("ml.p5en.48xlarge", "h200-141gb", 8, 192, 30_720, "efa", 3200),
        Sku("ml.p5e.48xlarge", "h200-141gb", 8, 192, 30_720, "efa", 3200),
        Sku("ml.p6-b200.48xlarge", "b200-180gb", 8, 192, 30_720, "efa", 3200),
    ]
    # Sizes of the G families: (suffix, GPUs, vCPUs, NVMe GB of g5, of g6e, Gbit/s of g5, of g6e).
    for suffix, gpus, vcpus, g5_disk, g6e_disk, g5_net, g6e_net in (
        ("2xlarge", 1, 8, 450, 450, 10, 20),
        ("xlarge", 1, 4, 250, 250, 10, 20),
        ("4xlarge", 1, 16, 600, 600, 25, 20),
        ("8xlarge", 1, 32, 900, 900, 25, 25),
        ("16xlarge", 1, 64, 1_900, 1_900, 25, 35),
        ("12xlarge", 4, 48, 3_800, 3_800, 40, 100),
        ("24xlarge", 4, 96, 3_800, 3_800, 50, 200),
        ("48xlarge", 8, 192, 7_600, 7_600, 100, 400),
    ):
        found.append(Sku(f"ml.g5.{suffix}", "a10g-24gb", gpus, vcpus, g5_disk, "ethernet", g5_net))
        found.append(Sku(f"ml.g6e.{suffix}", "l40s-48gb", gpus, vcpus, g6e_disk, "ethernet", g6e_net))
    for suffix, vcpus in (("xlarge", 4), ("2xlarge", 8), ("4xlarge", 16), ("12xlarge", 48), ("24xlarge", 96)):
        found.append(Sku(f"ml.m5.{suffix}", "none", 0, vcpus, 0, "ethernet", 10))
    return tuple(found)


SKUS = _table()
"""In order of preference: the first one with a GPU and a count is the default for them."""
_BY_NAME = {sku.name: sku for sku in SKUS}

LOCAL_DISK_FAMILIES = frozenset(
    {
        "p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300", "p6e-gb200", "g4dn", "g5", "g6", "g6e",
        "g7", "g7e", "trn1", "trn1n", "trn2",
    }
)  # fmt: skip
"""Families with an instance store: no EBS volume is provisioned for them, and no key of ours encrypts it."""
EFA_FAMILIES = frozenset(
    {"p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300", "p6e-gb200", "trn1", "trn1n", "trn2"}
)


def find(name: str) -> Sku | None:
    """The machine of that name, if it is known here."""
    return _BY_NAME.get(name)


def family_of(name: str) -> str:
    """`p4d` of `ml.p4d.24xlarge`, known or not; empty where the name has no such form."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def has_local_disk(name: str) -> bool:
    """Whether its disks are its own, so that no EBS volume is made."""
    return family_of(name) in LOCAL_DISK_FAMILIES


def has_efa(name: str) -> bool:
    """Whether its nodes talk over EFA."""
    return family_of(name) in EFA_FAMILIES


def default(compute: Compute) -> Sku | None:
    """The machine that a recipe's GPU and count mean; None when SageMaker has none with just that many.

    Without GPUs: the smallest one with two cores for each process.
    """
    if compute.gpu == "none":
        fitting = [
            sku for sku in SKUS if sku.gpu == "none" and sku.vcpus >= min(96, 2 * compute.gpus_per_node)
        ]
        return min(fitting, key=lambda sku: sku.vcpus, default=None)
    return next((sku for sku in SKUS if (sku.gpu, sku.gpus) == (compute.gpu, compute.gpus_per_node)), None)


def counts(gpu: str) -> list[int]:
    """GPUs of a node that SageMaker has with that GPU, ascending."""
    return sorted({sku.gpus for sku in SKUS if sku.gpu == gpu})
