"""The environment of the container: the fabric's settings by instance family, caches on the large disk, the price.

EFA: of what AWS's EFA cheatsheet lists, libfabric >= 1.18 with aws-ofi-nccl >= 1.7 needs FI_EFA_USE_HUGE_PAGE=0 alone;
RDMAV_FORK_SAFE and FI_EFA_USE_DEVICE_RDMA are of older ones, and AWS's own toolkits set them from a list of instance
types that lacks p5en and p6. So we set them ourselves, and have NCCL say which provider it chose.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.backends.sagemaker import skus
from isthmus.backends.sagemaker.settings import SageMakerSettings
from isthmus.backends.spec import Job

CACHE = "/tmp/isthmus"
"""On the machine's large disk; `/` of a training container is small."""
SMDDP = "smdistributed.dataparallel.torch.torch_smddp:smddp"
"""The module that registers SMDDP with torch, and the name that it registers."""


def environment(job: Job, settings: SageMakerSettings, types: Sequence[str]) -> dict[str, str]:
    """Variables of the container, sorted by name.

    Args:
        types: the instance types that it may run on.
    """
    found = {
        "HF_HOME": f"{CACHE}/huggingface",
        "ISTHMUS_CACHE_DIR": f"{CACHE}/shards",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": "/tmp",
        "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
        "TRITON_CACHE_DIR": f"{CACHE}/triton",
        "XDG_CACHE_HOME": f"{CACHE}/cache",
    }
    if job.recipe.compute.nodes > 1 and any(skus.has_efa(name) for name in types):
        found |= {
            "FI_EFA_USE_HUGE_PAGE": "0",  # or a fork fails with ENOMEM
            # So that the log tells whether EFA was found; otherwise NCCL falls back to sockets without a word.
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT",
        }
    if job.recipe.compute.nodes > 1 and job.recipe.compute.gpu != "none":
        # The container has interfaces that reach no other node.
        found["NCCL_SOCKET_IFNAME"] = "^docker,lo,veth"
    if settings.network_isolation:
        found["HF_HUB_OFFLINE"] = "1"
    if settings.smddp:
        found["ISTHMUS_COLLECTIVES"] = SMDDP
    price = usd_per_hour(job, settings)
    if price is not None:
        found["ISTHMUS_USD_PER_HOUR"] = f"{price:.10g}"
    return dict(sorted({**found, **settings.environment}.items()))


def usd_per_hour(job: Job, settings: SageMakerSettings) -> float | None:
    """Of all nodes: the team's own price, else the launcher's."""
    return settings.usd_per_hour if settings.usd_per_hour is not None else job.usd_per_hour
