"""What the service refuses, as a list that a program can read: each entry names the service's rule and where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.emulators.sagemaker.errors import ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One rule of the service."""

    id: str
    code: str
    """The error's code."""
    rule: str
    """What the service says."""
    source: str
    """Where: the model that botocore ships (with its documentation), or a page of the developer guide."""
    words: Literal["service", "ours"]
    """Whose words the error's message is: the service's own, or ours where these are not known."""

    def error(self, message: str) -> ServiceError:
        """The error of a request that breaks the rule."""
        return ServiceError(self.code, message)


V = "ValidationException"
MODEL = "botocore's model of SageMaker"

SHAPE = Refusal(
    id="shape",
    code=V,
    rule="Every field is known, of its type, within its length, count, range, pattern and enumeration.",
    source=f"{MODEL}, CreateTrainingJobRequest",
    words="service",
)
DUPLICATE = Refusal(
    id="duplicate",
    code="ResourceInUse",
    rule="A training job's name is unique within an account and a region, for ever.",
    source=f"{MODEL}, TrainingJobName",
    words="service",
)
QUOTA = Refusal(
    id="quota",
    code="ResourceLimitExceeded",
    rule="The instances of a type that train at once, on demand and as spot, stay within the account's quota.",
    source=f"{MODEL}, ResourceLimitExceeded; Service Quotas, `ml.X for training job usage`",
    words="service",
)
WARM_QUOTA = Refusal(
    id="warm-pool-quota",
    code="ResourceLimitExceeded",
    rule="Warm pools have a quota of their own, 0 until it is raised.",
    source="Developer guide, Train Using SageMaker Managed Warm Pools, Warm pool resource limits",
    words="service",
)
ROLE = Refusal(
    id="role",
    code=V,
    rule="The role exists and trusts sagemaker.amazonaws.com.",
    source=f"{MODEL}, RoleArn; developer guide, SageMaker Roles",
    words="service",
)
IMAGE = Refusal(
    id="image",
    code=V,
    rule="The training image exists and the role may pull it.",
    source=f"{MODEL}, TrainingImage",
    words="service",
)
INPUT = Refusal(
    id="input",
    code=V,
    rule="A channel's S3 prefix has objects, in a bucket of the job's region, which the role may list.",
    source=f"{MODEL}, S3DataSource.S3Uri: 'Your input bucket must be located in same region as your training job'",
    words="service",
)
OUTPUT = Refusal(
    id="output",
    code=V,
    rule="The buckets for output and checkpoints exist, in the job's region.",
    source=f"{MODEL}, OutputDataConfig.S3OutputPath, CheckpointConfig.S3Uri",
    words="ours",
)
CHANNELS = Refusal(
    id="channel-names",
    code=V,
    rule="Channel names are unique within a job.",
    source=f"{MODEL}, Channel.ChannelName",
    words="ours",
)
FAST_FILE = Refusal(
    id="fast-file-prefix",
    code=V,
    rule="FastFile reads an S3Prefix; neither a manifest nor an augmented manifest, and no other source than S3.",
    source=f"{MODEL}, TrainingInputMode: 'Augmented manifest files aren't supported'; developer guide, Access Training Data",
    words="ours",
)
SPOT_WAIT = Refusal(
    id="spot-wait",
    code=V,
    rule="With managed spot training MaxWaitTimeInSeconds is given and is at least MaxRuntimeInSeconds.",
    source=f"{MODEL}, StoppingCondition.MaxWaitTimeInSeconds",
    words="ours",
)
WAIT_WITHOUT_SPOT = Refusal(
    id="wait-without-spot",
    code=V,
    rule="MaxWaitTimeInSeconds belongs to managed spot training only.",
    source=f"{MODEL}, StoppingCondition.MaxWaitTimeInSeconds",
    words="ours",
)
SPOT_WARM = Refusal(
    id="spot-warm-pool",
    code=V,
    rule="A warm pool cannot be kept of spot instances.",
    source="Developer guide, Train Using SageMaker Managed Warm Pools, Considerations",
    words="ours",
)
RUNTIME = Refusal(
    id="runtime",
    code=V,
    rule="MaxRuntimeInSeconds is at most 28 days.",
    source=f"{MODEL}, StoppingCondition.MaxRuntimeInSeconds: 'The maximum value is 28 days'",
    words="ours",
)
PREFERENCES = Refusal(
    id="instance-preferences",
    code=V,
    rule="InstancePreferences excludes InstanceType, InstanceGroups, InstancePlacementConfig and EnableManagedSpotTraining.",
    source=f"{MODEL}, ResourceConfig.InstancePreferences",
    words="ours",
)
READ_ONLY = Refusal(
    id="read-only-fields",
    code=V,
    rule="SelectedInstanceType and SelectedInstanceCount are answers, not accepted in a request.",
    source=f"{MODEL}, ResourceConfig.SelectedInstanceType",
    words="ours",
)
RESOURCES = Refusal(
    id="resources",
    code=V,
    rule="An instance type and count (or groups, or preferences) are given.",
    source=f"{MODEL}, ResourceConfig",
    words="ours",
)
VOLUME = Refusal(
    id="volume",
    code=V,
    rule="An instance type without local storage needs VolumeSizeInGB of at least 1.",
    source=f"{MODEL}, ResourceConfig.VolumeSizeInGB: 'you must define the size of EBS volume'",
    words="ours",
)
VOLUME_KEY = Refusal(
    id="volume-key",
    code=V,
    rule="VolumeKmsKeyId cannot be given for an instance type with local storage.",
    source=f"{MODEL}, ResourceConfig.VolumeKmsKeyId",
    words="ours",
)
CHECKPOINT_PATH = Refusal(
    id="checkpoint-path",
    code=V,
    rule="CheckpointConfig.LocalPath is none of the folders that the service itself uses.",
    source="Developer guide, Use Checkpoints in Amazon SageMaker",
    words="ours",
)
TAGS = Refusal(
    id="tags",
    code=V,
    rule="At most 50 tags, each key once, none that begins with aws:.",
    source=f"{MODEL}, TagList; AWS tagging restrictions",
    words="ours",
)
VPC = Refusal(
    id="vpc",
    code=V,
    rule="The VPC's subnets and security groups exist.",
    source=f"{MODEL}, VpcConfig",
    words="ours",
)
SOURCE = Refusal(
    id="algorithm",
    code=V,
    rule="Exactly one of TrainingImage and AlgorithmName is given.",
    source=f"{MODEL}, AlgorithmSpecification",
    words="ours",
)
STOPPED_ALREADY = Refusal(
    id="stop-ended",
    code=V,
    rule="A job that has ended or is ending cannot be stopped.",
    source="Answer of the service to StopTrainingJob",
    words="service",
)
NOT_FOUND = Refusal(
    id="not-found",
    code=V,
    rule="The job exists in this account and region.",
    source="Answer of the service to DescribeTrainingJob (the model's ResourceNotFound comes from other operations)",
    words="service",
)

REFUSALS: tuple[Refusal, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Refusal)
)
