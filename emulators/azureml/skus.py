"""Machines that the emulated regions offer: VM sizes as `locations/L/vmSizes` lists them, and families as `usages` counts them.

Written down from Azure's pages of each series, apart from what the backend knows: two readings of the same pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sku:
    """A VM size. Memory and temporary disk in GB."""

    name: str
    family: str
    vcpus: int
    gpus: int
    memory_gb: float
    disk_gb: int
    rdma: bool = False
    low_priority: bool = True

    @property
    def key(self) -> str:
        """Sizes are compared without case."""
        return self.name.lower()

    def to_json(self) -> dict[str, Any]:
        """As the service lists it."""
        return {
            "name": self.name,
            "family": self.family,
            "vCPUs": self.vcpus,
            "gpus": self.gpus,
            "osVhdSizeMB": 131072,
            "maxResourceVolumeMB": self.disk_gb * 1024,
            "memoryGB": self.memory_gb,
            "lowPriorityCapable": self.low_priority,
            "premiumIO": True,
            "supportedComputeTypes": ["AmlCompute", "ComputeInstance"],
        }


SKUS: dict[str, Sku] = {
    sku.key: sku
    for sku in (
        Sku("Standard_DS2_v2", "standardDSv2Family", 2, 0, 7, 14),
        Sku("Standard_DS3_v2", "standardDSv2Family", 4, 0, 14, 28),
        Sku("Standard_DS4_v2", "standardDSv2Family", 8, 0, 28, 56),
        Sku("Standard_D4ds_v5", "standardDDSv5Family", 4, 0, 16, 150),
        Sku("Standard_D8ds_v5", "standardDDSv5Family", 8, 0, 32, 300),
        Sku("Standard_D16ds_v5", "standardDDSv5Family", 16, 0, 64, 600),
        Sku("Standard_D32ds_v5", "standardDDSv5Family", 32, 0, 128, 1200),
        Sku("Standard_D64ds_v5", "standardDDSv5Family", 64, 0, 256, 2400),
        Sku("Standard_D4s_v3", "standardDSv3Family", 4, 0, 16, 32),
        Sku("Standard_D16s_v3", "standardDSv3Family", 16, 0, 64, 128),
        Sku("Standard_F4s_v2", "standardFSv2Family", 4, 0, 8, 32),
        Sku("Standard_E4s_v3", "standardESv3Family", 4, 0, 32, 64),
        Sku("Standard_NC4as_T4_v3", "standardNCASv3_T4Family", 4, 1, 28, 180),
        Sku("Standard_NC16as_T4_v3", "standardNCASv3_T4Family", 16, 1, 110, 360),
        Sku("Standard_NC64as_T4_v3", "standardNCASv3_T4Family", 64, 4, 440, 2880),
        Sku("Standard_NC6s_v3", "standardNCSv3Family", 6, 1, 112, 736),
        Sku("Standard_NC24rs_v3", "standardNCSv3Family", 24, 4, 448, 2948, rdma=True),
        Sku("Standard_NV36ads_A10_v5", "standardNVADSA10v5Family", 36, 1, 440, 1440),
        Sku("Standard_NV72ads_A10_v5", "standardNVADSA10v5Family", 72, 2, 880, 2880),
        Sku("Standard_NC24ads_A100_v4", "StandardNCADSA100v4Family", 24, 1, 220, 958),
        Sku("Standard_NC48ads_A100_v4", "StandardNCADSA100v4Family", 48, 2, 440, 1916),
        Sku("Standard_NC96ads_A100_v4", "StandardNCADSA100v4Family", 96, 4, 880, 3832),
        Sku("Standard_NC40ads_H100_v5", "StandardNCadsH100v5Family", 40, 1, 320, 3576),
        Sku("Standard_NC80adis_H100_v5", "StandardNCadsH100v5Family", 80, 2, 640, 7152),
        Sku("Standard_ND40rs_v2", "standardNDRSv2Family", 40, 8, 672, 2948, rdma=True),
        Sku("Standard_ND96asr_v4", "standardNDASv4_A100Family", 96, 8, 900, 6000, rdma=True),
        Sku("Standard_ND96amsr_A100_v4", "standardNDAMSv4_A100Family", 96, 8, 1900, 6400, rdma=True),
        Sku("Standard_ND96isr_H100_v5", "standardNDSH100v5Family", 96, 8, 1900, 28000, rdma=True),
        Sku("Standard_ND96isr_H200_v5", "standardNDISRH200V5Family", 96, 8, 1850, 28000, rdma=True),
        Sku("Standard_ND96isr_MI300X_v5", "standardNDISRMI300XV5Family", 96, 8, 1850, 28000, rdma=True),
    )
}

EVERYWHERE = frozenset(
    [
        "eastus",
        "eastus2",
        "westus2",
        "westus3",
        "southcentralus",
        "northcentralus",
        "centralus",
        "canadacentral",
        "westeurope",
        "northeurope",
        "uksouth",
        "francecentral",
        "germanywestcentral",
        "italynorth",
        "swedencentral",
        "switzerlandnorth",
        "japaneast",
        "southeastasia",
        "australiaeast",
    ]
)
"""Regions of the emulator."""

_RARE = {
    "standard_nd96amsr_a100_v4": "eastus southcentralus westus2 westus3 canadacentral westeurope italynorth swedencentral japaneast",
    "standard_nd96asr_v4": "eastus southcentralus westus2 northeurope westeurope japaneast",
    "standard_nd96isr_h100_v5": "eastus southcentralus westus3 canadacentral francecentral italynorth swedencentral uksouth australiaeast",
    "standard_nd96isr_h200_v5": "eastus2 southcentralus westus3 francecentral swedencentral australiaeast",
    "standard_nd96isr_mi300x_v5": "westus francecentral swedencentral uksouth",
    "standard_nd40rs_v2": "eastus southcentralus westus2 westeurope",
}


def offered_by_default() -> dict[str, set[str]]:
    """Which regions offer which size, by its key: an example to be changed by whoever tests, not Azure's own list of today."""
    regions = {key: set(EVERYWHERE) for key in SKUS}
    return regions | {key: set(text.split()) for key, text in _RARE.items()}


def usage_name(family: str, *, low_priority: bool = False) -> str:
    """A family's name among the usages: standardNDAMSv4_A100Family is "Standard NDAMSv4_A100 Family Cluster Dedicated vCPUs"."""
    middle = family[len("standard") :].removesuffix("Family")
    return f"Standard {middle} Family Cluster {'LowPriority' if low_priority else 'Dedicated'} vCPUs"
