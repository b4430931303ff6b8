"""`backends.azure` of a recipe. Strict; what is absent comes from the launcher's environment or is a documented default."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from isthmus.core.recipe.stages import Positive, Section
from isthmus.core.recipe.units import Duration, Size

GUID = r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
Guid = Annotated[str, Field(pattern=GUID)]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1024)]
"""Text without line breaks or control characters."""
Tier = Literal["dedicated", "low_priority", "spot"]


def _from_environment(*names: str) -> Callable[[], str | None]:
    return lambda: next((os.environ[name] for name in names if os.environ.get(name)), None)


def _variable(value: Any) -> Any:
    if isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError("a text, a number, true or false")


Variable = Annotated[str | bool | int | float, BeforeValidator(_variable)]


class BuildContext(Section):
    """An image that Azure ML builds from a Dockerfile, once for its content."""

    path: Line
    """The folder with the Dockerfile; uploaded when the environment of its content does not exist yet."""
    dockerfile: Line = "Dockerfile"
    """Within the folder."""


class EnvironmentSettings(Section):
    """The container's image: exactly one of the three."""

    image: Line | None = None
    """An image in ACR, ACPT (mcr.microsoft.com/aifx/acpt/...) or another registry; best by digest: `registry/name@sha256:...`."""
    build: BuildContext | None = None
    """Built by Azure ML at the first start."""
    registered: Line | None = None
    """A registered environment with its version: `name:3`, or `azureml://registries/R/environments/NAME/versions/3`."""


class ClusterSettings(Section):
    """The AmlCompute cluster that `compute` names, for a launch that may create it."""

    create: bool = False
    """Create it when it is not there."""
    min_nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that stay when idle, and cost; 0: scale to zero."""
    max_nodes: Positive | None = None
    """null: what the recipe needs."""
    idle: Duration = 600.0
    """How long a node stays idle before it goes. Longer than a restart takes, so that a resumed run finds its nodes."""
    subnet: Line | None = None
    """Full ARM id of a subnet."""
    identity: Line | None = None
    """Full ARM id of a user-assigned managed identity for its nodes; null: one of the cluster's own."""
    ssh: bool = False
    """Open port 22 of the nodes."""


class MountSettings(Section):
    """`data.access: mount`. The defaults are for shards that are read once an epoch, in large ranges."""

    cache: Size | None = None
    """Bytes of the node's local disk that a mount may fill; null: half of it. Azure ML's own default is without limit."""
    read_threads: Positive | None = None
    """Threads that read ahead; null: four for each vCPU."""
    read_buffer_blocks: Positive = 80
    """Blocks that are read ahead of a sequential reader."""


class SshSettings(Section):
    """A shell in the running containers, through Azure ML's studio."""

    public_key: Line
    """`ssh-ed25519 AAAA...`; of all nodes."""


class TensorboardSettings(Section):
    """TensorBoard beside the job, through Azure ML's studio. Needs `trackers: [tensorboard]`."""

    log_dir: Line | None = None
    """null: `tensorboard/` of the run directory."""


class MscclppSettings(Section):
    """MSCCL++, the living successor of MSCCL, in front of NCCL. Built from source: only in an image that has it."""

    library: Line
    """Path of libmscclpp_nccl.so in the image."""
    nccl: Line
    """Path of the NCCL library in the image that it falls back to."""


class QueueSettings(Section):
    """The job's place in a shared queue."""

    tier: Literal["basic", "standard", "premium"] | None = None
    """Of a serverless or shared queue; interruptible tiers are `tier`."""
    priority: Literal["low", "medium", "high"] | None = None
    """Among the jobs of the queue."""


class Place(Section):
    """What is different in another region: an Azure ML workspace belongs to one."""

    resource_group: Line | None = None
    """null: the same."""
    workspace: Line | None = None
    """null: the same, whose clusters may stand in other regions."""
    compute: Line | None = None
    """null: the same name."""
    spot_compute: Line | None = None
    """null: the same name."""


class AzureSettings(Section):
    """`backends.azure` of a recipe."""

    subscription: Guid | None = Field(default_factory=_from_environment("AZURE_SUBSCRIPTION_ID"))
    """Subscription id; absent: $AZURE_SUBSCRIPTION_ID."""
    resource_group: Line | None = Field(default_factory=_from_environment("AZUREML_RESOURCE_GROUP"))
    """Absent: $AZUREML_RESOURCE_GROUP."""
    workspace: Line | None = Field(default_factory=_from_environment("AZUREML_WORKSPACE"))
    """Azure ML workspace; absent: $AZUREML_WORKSPACE."""
    region: Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{2,40}$")] | None = None
    """Of the workspace, such as `italynorth`. Without it limits that differ by region are not checked offline."""
    regions: dict[str, Place] = {}  # noqa: RUF012
    """Region -> what is different there, for `compute.offers` that name it."""
    compute: Annotated[str, Field(pattern=r"^[a-zA-Z][a-zA-Z0-9-]{1,31}$")] = "serverless"
    """Name of an AmlCompute cluster, or `serverless`."""
    spot_compute: Annotated[str, Field(pattern=r"^[a-zA-Z][a-zA-Z0-9-]{1,31}$")] | None = None
    """Name of the low-priority cluster for offers of tier spot: a cluster has one tier."""
    cluster: ClusterSettings = ClusterSettings.model_construct()
    """How a missing cluster is created."""
    sku: Annotated[str, Field(pattern=r"^Standard_[A-Za-z0-9_]+$")] | None = None
    """Virtual machine size; absent: by `compute.gpu` and `compute.gpus_per_node`."""
    tier: Tier = "dedicated"
    """dedicated; or interruptible: `low_priority` clusters, `spot` on serverless. An offer's tier goes before it."""
    identity: Literal["managed", "user"] = "managed"
    """managed: the compute's identity reads data and writes the run. user: yours, for inputs alone, while your token lasts."""
    client_id: Guid | None = None
    """Client id of a user-assigned managed identity; absent: the cluster's only one."""
    environment: EnvironmentSettings | None = None
    """The image."""
    experiment: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}$")] | None = None
    """Azure ML's experiment; absent: the recipe's name."""
    tags: dict[Line, Line] = {}  # noqa: RUF012
    """Of the job, beside isthmus' own."""
    environment_variables: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Variable] = {}  # noqa: RUF012
    """Of the container; true and numbers become texts. They go before those that isthmus sets."""
    storage_account: Annotated[str, Field(pattern=r"^[a-z0-9]{3,24}$")] | None = None
    """Of `az://container/path` without an account."""
    storage_egress_gbps: Annotated[float, Field(gt=0)] | None = None
    """What one of the storage accounts gives, in gigabits per second, where Azure has raised it; absent: the region's default."""
    shm_size: Size = 8 * 2**30
    """/dev/shm of the container; isthmus reads with threads, so NCCL alone needs it."""
    memlock: bool = True
    """Unlimited locked memory, which RDMA needs."""
    docker_args: list[Line] = []  # noqa: RUF012
    """Further arguments of `docker run`."""
    timeout: Duration | None = None
    """After which Azure ML cancels the job; absent: the tier's longest, 21 days, 7 days where interruptible."""
    grace: Duration = 30.0
    """From SIGTERM to SIGKILL. Azure gives a preempted machine 30 s."""
    mount: MountSettings = MountSettings.model_construct()
    """How mounted data is read."""
    ssh: SshSettings | None = None
    """A shell in the containers."""
    tensorboard: TensorboardSettings | None = None
    """TensorBoard in the studio."""
    mscclpp: MscclppSettings | None = None
    """MSCCL++ in front of NCCL."""
    queue: QueueSettings | None = None
    """Place in a shared queue."""
    wheels: Line | None = None
    """A folder of wheels that the image lacks, installed offline at the start."""
