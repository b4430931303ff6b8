"""`backends.sagemaker` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.recipe.stages import Section
from isthmus.core.recipe.units import Duration

DEFAULT_IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023-sagemaker"
"""torch 2.13, CUDA 13.3, NCCL 2.30, EFA 1.49."""
DEFAULT_MAX_RUNTIME = 5 * 86400.0
"""Seconds: what an account's quota of running time allows when nobody has raised it."""

Text = Annotated[str, Field(min_length=1)]


class SageMakerSettings(Section):
    """`backends.sagemaker` of a recipe. Whatever a `compute.offers` entry names goes before `region`, `sku` and `tier`."""

    region: Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")] | None = None
    """Such as `us-east-1`; absent: the environment's (AWS_REGION, or the profile's)."""
    role_arn: Text | None = None
    """The role that the job runs as: `arn:aws:iam::<account>:role/<name>`. It reads the data and writes the run directory."""
    account_id: Annotated[str, Field(pattern=r"^\d{12}$")] | None = None
    """The account that the launch must land in; the preflight compares it with the credentials' account."""
    image: Text | None = None
    """The container's image, by tag or digest; absent: AWS's PyTorch training image. Isthmus itself comes with the job."""
    wheels: str | None = None
    """A folder of wheels beside the recipe that the image lacks; they are installed at start, offline."""

    sku: Text | None = None
    """The instance type, such as `ml.p4de.24xlarge`; absent: the one with `compute.gpus_per_node` of `compute.gpu`."""
    instance_preferences: Annotated[list[Text], Field(max_length=5)] = []  # noqa: RUF012
    """Instance types in order; SageMaker takes the first that it has capacity for. In place of `sku`; not with spot."""
    tier: Literal["on_demand", "spot", "reserved"] = "on_demand"
    """spot: managed spot training; reserved: a training plan's capacity."""
    training_plan: Text | None = None
    """ARN of the training plan whose capacity a reserved job uses."""
    volume_gb: Annotated[int, Field(gt=0, le=16384)] | None = None
    """Size of the EBS volume of a node; absent: 100. Only for machines without disks of their own."""

    max_runtime: Duration | None = None
    """How long the job may run, its own restarts included, up to 28 d; absent: 5 d, or a little over `budget.max_hours`. A run that is not done by then goes on as another job."""
    max_wait: Duration | None = None
    """spot: running and waiting together; absent: a day more than it may run."""
    max_pending: Duration | None = None
    """How long it may wait for GPUs that are not there, 30 min to 28 d; absent: as long as SageMaker waits."""
    keep_alive: Duration | None = None
    """Warm pool: how long the machines stay, paid, for the next job, up to 6 h. Not with spot."""
    retries: Annotated[int, Field(ge=0, le=30)] = 3
    """How often SageMaker starts the job again after an internal error of its own."""
    infra_check: bool = True
    """Test the GPUs and the fabric before the job starts."""

    subnets: Annotated[list[Text], Field(max_length=16)] = []  # noqa: RUF012
    """Of the VPC that the containers are in; together with `security_groups`."""
    security_groups: Annotated[list[Text], Field(max_length=5)] = []  # noqa: RUF012
    """Of the containers; they must admit each other's traffic."""
    encrypt_traffic: bool = False
    """Encrypt what the nodes send to each other; slows the exchange of gradients."""
    network_isolation: bool = False
    """No network from inside, not even to S3: needs data.access mount or download, `checkpoint_mirror`, and one node."""
    checkpoint_mirror: bool = False
    """The run directory is /opt/ml/checkpoints in the container, which SageMaker copies to and from S3, instead of S3 itself; one node."""
    output_kms_key: Text | None = None
    """KMS key for what SageMaker itself writes to `output`."""
    volume_kms_key: Text | None = None
    """KMS key of the EBS volume. Machines with disks of their own encrypt those in hardware, and refuse a key."""

    output: Text | None = None
    """S3 prefix for what SageMaker itself keeps of a job (what is in /opt/ml/model); absent: `output/` in the run directory."""
    environment: dict[str, str] = {}  # noqa: RUF012
    """Further environment variables; over the ones set here."""
    tags: dict[str, str] = {}  # noqa: RUF012
    """Further tags, such as a cost centre."""
    usd_per_hour: Annotated[float, Field(gt=0)] | None = None
    """What an hour of all nodes costs you, where it is not the list price; charged against `budget.max_usd`."""
    smddp: bool = False
    """Use SageMaker's own collective library in place of NCCL. Only on ml.p4d and ml.p4de, in an image that has it."""
