"""Environment variables of the container: InfiniBand and NCCL by machine, mounts, identity. All values are texts."""

from __future__ import annotations

from isthmus.backends.azure.settings import AzureSettings
from isthmus.backends.azure.skus import Sku
from isthmus.backends.azure.target import Target, settings_of
from isthmus.backends.spec import Job


def text(value: str | bool | int | float) -> str:
    """As an environment variable has it: a JSON boolean would reach the service as one, and be refused there."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def variables(job: Job, target: Target) -> dict[str, str]:
    """Sorted by name. The user's own go before ours."""
    settings = settings_of(job)
    made = {
        **_fabric(target.sku, job.recipe.compute.nodes),
        **_mount(settings, target.sku),
        **_identity(settings),
        **_mscclpp(settings),
    }
    if job.usd_per_hour is not None:
        made["ISTHMUS_USD_PER_HOUR"] = f"{job.usd_per_hour:g}"
    made |= {name: text(value) for name, value in settings.environment_variables.items()}
    return dict(sorted(made.items()))


def _fabric(sku: Sku, nodes: int) -> dict[str, str]:
    """What Microsoft ships for its HPC images. The topology file's path is known only in the command line."""
    if sku.gpu == "none":
        return {}
    made = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_SOCKET_IFNAME": "eth0"}
    if sku.rdma:
        made |= {"NCCL_IB_PCI_RELAXED_ORDERING": "1", "UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp"}
        if nodes > 1:
            # Without a device NCCL falls back to sockets and says so in these lines alone.
            made |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    return made


def mount_cache(settings: AzureSettings, sku: Sku) -> int:
    """Bytes of a node's disk that mounts may fill."""
    return settings.mount.cache or sku.temp_disk_gib * 2**30 // 2


def _mount(settings: AzureSettings, sku: Sku) -> dict[str, str]:
    """For shards that are read once an epoch: read ahead in memory, keep nothing on disk, and never without a limit.

    Set whatever the access is, since a mount may come by an input of the user's own.
    """
    return {
        "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "true",
        "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "false",
        "DATASET_MOUNT_CACHE_SIZE": str(mount_cache(settings, sku)),
        "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
        "DATASET_MOUNT_READ_BUFFER_BLOCK_COUNT": str(settings.mount.read_buffer_blocks),
        "DATASET_MOUNT_READ_THREADS": str(settings.mount.read_threads or 4 * sku.vcpus),
    }


def _identity(settings: AzureSettings) -> dict[str, str]:
    """Whom azure-identity in the container acts as, and the account of URIs without one. No secret is among them."""
    made = {}
    if settings.client_id is not None and settings.identity == "managed":
        made["AZURE_CLIENT_ID"] = settings.client_id
    if settings.storage_account is not None:
        made["AZURE_STORAGE_ACCOUNT_NAME"] = settings.storage_account
    return made


def _mscclpp(settings: AzureSettings) -> dict[str, str]:
    if settings.mscclpp is None:
        return {}
    return {
        "LD_PRELOAD": settings.mscclpp.library,
        "MSCCLPP_ENABLE_NCCL_FALLBACK": "TRUE",
        "MSCCLPP_NCCL_LIB_PATH": settings.mscclpp.nccl,
    }
