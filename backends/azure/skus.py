"""Azure's machines by the recipe's words: which SKU has eight A100-80GB, and what else it has."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sku:
    """A virtual machine size. Sources: Microsoft's size pages of the ND, NC and Ddsv5 series."""

    name: str
    """As ARM writes it, such as `Standard_ND96amsr_A100_v4`."""
    gpu: str
    """The recipe's word, or `none`."""
    gpus: int
    vcpus: int
    memory_gib: int
    temp_disk_gib: int
    """Local disk (temporary SSD or NVMe): what a mount's cache and a download may fill."""
    family: str
    """Of the quota, as `vmSizes` names it."""
    ethernet_gbps: float
    """What storage is read through, in gigabits per second, of the whole machine."""
    infiniband_gbps: float = 0.0
    """Sum over the HCAs, in giga*bits* per second; 0: no RDMA. 1600 Gb/s are 200 gigabytes per second."""
    hcas: int = 0
    """InfiniBand adapters, one a GPU."""
    fabric: str = "ethernet"
    """What joins nodes: `infiniband-hdr`, `infiniband-ndr`, `ethernet`."""
    topology: str | None = None
    """Name of the NCCL topology file that goes along with a job: the hypervisor hides the PCIe tree from the guest."""

    @property
    def rdma(self) -> bool:
        """Whether its nodes are joined by InfiniBand."""
        return self.infiniband_gbps > 0


def _nd(name: str, gpu: str, memory: int, disk: int, family: str, ethernet: float, fabric: str) -> Sku:
    hdr = fabric == "infiniband-hdr"
    return Sku(
        name=name, gpu=gpu, gpus=8, vcpus=96, memory_gib=memory, temp_disk_gib=disk, family=family,
        ethernet_gbps=ethernet, infiniband_gbps=8 * (200 if hdr else 400), hcas=8, fabric=fabric,
        topology="ndv4-topo.xml" if hdr else None,
    )  # fmt: skip


def _nc(count: int) -> Sku:
    return Sku(
        name=f"Standard_NC{24 * count}ads_A100_v4", gpu="a100-80gb", gpus=count, vcpus=24 * count,
        memory_gib=220 * count, temp_disk_gib=64 * count, family="StandardNCADSA100v4Family",
        ethernet_gbps=20.0 * count,
    )  # fmt: skip


def _cpu(vcpus: int, ethernet: float) -> Sku:
    return Sku(
        name=f"Standard_D{vcpus}ds_v5", gpu="none", gpus=0, vcpus=vcpus, memory_gib=4 * vcpus,
        temp_disk_gib=75 * vcpus // 2, family="standardDDSv5Family", ethernet_gbps=ethernet,
    )  # fmt: skip


SKUS: tuple[Sku, ...] = (
    _nd("Standard_ND96amsr_A100_v4", "a100-80gb", 1900, 6400, "standardNDAMSv4_A100Family", 24, "infiniband-hdr"),
    _nd("Standard_ND96asr_v4", "a100-40gb", 900, 6000, "standardNDASv4_A100Family", 24, "infiniband-hdr"),
    _nd("Standard_ND96isr_H100_v5", "h100-80gb", 1900, 28000, "standardNDSH100v5Family", 80, "infiniband-ndr"),
    _nd("Standard_ND96isr_H200_v5", "h200-141gb", 1850, 28000, "standardNDISRH200V5Family", 80, "infiniband-ndr"),
    _nc(1), _nc(2), _nc(4),
    _cpu(4, 12.5), _cpu(8, 12.5), _cpu(16, 12.5), _cpu(32, 16.0), _cpu(64, 30.0),
)  # fmt: skip
"""Of several with the same GPU and count the first is the default."""
_BY_NAME = {sku.name.lower(): sku for sku in SKUS}


def find(name: str) -> Sku | None:
    """The SKU of that name, in any case."""
    return _BY_NAME.get(name.lower())


def fits(sku: Sku, gpu: str, per_node: int) -> bool:
    """Whether a machine has exactly these GPUs; for `none`, a vCPU for each process."""
    if gpu == "none":
        return sku.gpu == "none" and sku.vcpus >= per_node
    return sku.gpu == gpu and sku.gpus == per_node


def choose(gpu: str, per_node: int) -> Sku:
    """The default machine for a recipe's `compute`; on CPU the smallest with two vCPUs for each process.

    Raises:
        UsageError: Azure ML has none.
    """
    wanted = 2 * per_node if gpu == "none" else per_node
    for sku in SKUS:
        if fits(sku, gpu, wanted):
            return sku
    if gpu == "none" and per_node <= max(sku.vcpus for sku in SKUS if sku.gpu == "none"):
        return next(sku for sku in SKUS if fits(sku, gpu, per_node))
    counts = sorted({sku.gpus for sku in SKUS if sku.gpu == gpu})
    offered = ", ".join(sorted({sku.gpu for sku in SKUS if sku.gpu != "none"}))
    raise UsageError(
        f"Azure ML has no machine with {per_node} x {gpu}",
        where="compute",
        hint=f"it has {gpu} by {' or '.join(map(str, counts))}" if counts else f"it has {offered}",
    )
