"""Every rule of the SageMaker lint and preflight. `docs/lint.md` is made from RULES; the checks are in `lint.py` and
`lint_settings.py` (offline) and `preflight.py` (online)."""

from __future__ import annotations

from isthmus.backends.rules import Rule
from isthmus.backends.sagemaker.rules_online import ONLINE

_MODEL = "botocore's model of CreateTrainingJob"
_GUIDE = "Amazon SageMaker developer guide"


def _rule(id: str, level: str, title: str, why: str, fix: str, source: str, exit_code: int = 2) -> Rule:
    return Rule(
        id=f"sagemaker.{id}",
        level=level,  # type: ignore[arg-type]
        title=title,
        why=why,
        fix=fix,
        source=source,
        exit_code=exit_code,
    )


REQUEST = _rule(
    "request", "error", "The request does not pass the service's own model.",
    "SageMaker checks lengths, counts, enumerations, patterns and bounds that its client lets pass, and answers with a "
    "ValidationException.",
    "change what the message names", _MODEL,
)  # fmt: skip
MODEL_MISSING = _rule(
    "model-missing", "warning", "The request could not be checked against the service's model.",
    "The model comes with botocore, which is not installed here; the service will check when the job is submitted.",
    "pip install 'isthmus[sagemaker]'", _MODEL,
)  # fmt: skip
ROLE = _rule(
    "role", "error", "No execution role, or not the ARN of one.",
    "The job reads its data and writes its run directory as a role of the account; CreateTrainingJob requires its ARN.",
    "--set backends.sagemaker.role_arn=arn:aws:iam::<account>:role/<name>", _MODEL,
)  # fmt: skip
REGION = _rule(
    "region", "note", "The recipe names no region.",
    "The job goes wherever AWS_REGION or the profile of whoever launches it points, which may not be where the data is.",
    "--set backends.sagemaker.region=us-east-1", _GUIDE,
)  # fmt: skip
REGION_UNKNOWN = _rule(
    "region-unknown", "warning", "No region of that name is known here.",
    "The SDK makes an address of whatever name it is given, and only its connection fails. A region that is newer than the "
    "installed botocore is one that it does not know, either.",
    "correct the name, or pip install -U botocore", "botocore's partitions.json",
)  # fmt: skip
RUN_DIRECTORY = _rule(
    "run-directory", "error", "The run directory is not on S3, or its URI is too long.",
    "The container's disk is gone when the job ends. The URI is an argument of the container and a tag of the job, 256 "
    "characters at most.",
    "run_directory: {sagemaker: s3://bucket/prefix}", _MODEL,
)  # fmt: skip
DATA_PLACE = _rule(
    "data-place", "error", "Data that the container cannot read.",
    "A training job's channels are S3 prefixes, and what it streams it opens with its own role: paths of this machine and "
    "another cloud's storage are out of its reach.",
    "copy the data to S3 and name it: uri: {sagemaker: s3://bucket/prefix}", _GUIDE,
)  # fmt: skip
CHANNELS = _rule(
    "channels", "error", "More than 20 input channels.",
    "Each root of a source that is mounted or downloaded is a channel; 20 are allowed, and one carries the recipe.",
    "put several datasets below one prefix, or data.access: stream", _MODEL,
)  # fmt: skip
PREFIX = _rule(
    "prefix-slash", "error", "An S3 prefix without a slash at its end.",
    "S3 prefixes are text: ASHA-1 without its slash brings the files of ASHA-10, into the data or the checkpoints.",
    "end it with /", "issues of fast file mode and of checkpoint restore",
)  # fmt: skip
COMPRESSION = _rule(
    "compression", "error", "The model's output would be compressed.",
    "SageMaker then packs /opt/ml/model into one model.tar.gz on one core, for hours where weights are large.",
    "OutputDataConfig.CompressionType: NONE", _GUIDE,
)  # fmt: skip
HYPERPARAMETERS = _rule(
    "hyperparameters", "error", "The request carries hyperparameters.",
    "They are text: true becomes \"true\", numbers lose their type, and a quote in one ends the job of the SDK's own driver "
    "with an empty reason. The recipe is a file in a channel instead.",
    "leave them out", "issues of the SageMaker SDK",
)  # fmt: skip
ENVIRONMENT = _rule(
    "environment", "error", "An environment variable that SageMaker does not take.",
    "At most 100 variables; names of letters, digits and underscores; values of at most 512 characters.",
    "put a long value into a file of the recipe's `code`, and name the file", _MODEL,
)  # fmt: skip
ENVIRONMENT_RESERVED = _rule(
    "environment-reserved", "error", "A variable that the worker or torchrun sets itself.",
    "Hosts, ranks and the attempt come from the cluster and the run directory; a fixed value would be wrong on all nodes "
    "but one.",
    "leave it out", "core/worker.py",
)  # fmt: skip
EFA_ENVIRONMENT = _rule(
    "efa-environment", "error", "A variable that harms EFA.",
    "RDMAV_FORK_SAFE and FI_EFA_USE_HUGE_PAGE=1 end in ENOMEM at a fork with current libfabric, and another FI_PROVIDER "
    "or NCCL_NET sends gradients over sockets at a twentieth of the speed.",
    "leave it out: isthmus sets what the instance family needs", "AWS's EFA cheatsheet",
)  # fmt: skip
TAGS = _rule(
    "tags", "error", "A tag that AWS does not take.",
    "At most 50 tags; keys of 1 to 128 and values of at most 256 letters, digits, spaces and _ . : / = + - @; keys that "
    "begin with aws: are AWS's own, and isthmus- ours.",
    "change backends.sagemaker.tags", _MODEL,
)  # fmt: skip
RUNTIME = _rule(
    "max-runtime", "error", "Longer than a training job may run.",
    "28 days are the most, for all attempts of one job together. A run that needs longer goes on as another job.",
    "--set backends.sagemaker.max_runtime='28 d'", _MODEL,
)  # fmt: skip
RUNTIME_QUOTA = _rule(
    "max-runtime-quota", "warning", "Longer than an account may let a training job run.",
    "The quota \"Longest run time for a training job\" is 5 days until somebody has it raised; beyond it the request is "
    "refused with ResourceLimitExceeded.",
    "have the quota raised, or leave max_runtime out: a run goes on as another job", "Service Quotas of SageMaker",
)  # fmt: skip
WAIT = _rule(
    "max-wait", "error", "Waiting and running time of a spot job contradict each other.",
    "MaxWaitTimeInSeconds is for managed spot alone, counts the running time, too, and must not be below it.",
    "raise max_wait above max_runtime, or leave it out", _MODEL,
)  # fmt: skip
PENDING = _rule(
    "max-pending", "error", "A pending time that SageMaker does not take.",
    "MaxPendingTimeInSeconds is 1800 to 2419200.",
    "--set backends.sagemaker.max_pending='2 h'", _MODEL,
)  # fmt: skip
PENDING_CPU = _rule(
    "max-pending-cpu", "warning", "A pending time has no effect on machines without GPU.",
    "MaxPendingTimeInSeconds counts only for accelerated instance types.",
    "leave max_pending out", _MODEL,
)  # fmt: skip
CAPACITY = _rule(
    "capacity", "note", "The job waits for one instance type, in one region, without a limit.",
    "Large GPU machines are often not there: a job is pending for hours, or fails with CapacityError.",
    "give instance_preferences, max_pending, or further compute.offers", "issues of DIAGNijmegen/rse-grand-challenge",
)  # fmt: skip
WARM_POOL = _rule(
    "warm-pool", "error", "A warm pool that SageMaker does not make.",
    "KeepAlivePeriodInSeconds is at most 21600, and managed spot training has no warm pools.",
    "keep_alive up to 6 h with tier on_demand, or leave it out", _MODEL,
)  # fmt: skip
WARM_POOL_COST = _rule(
    "warm-pool-cost", "note", "Machines that are kept warm are paid for.",
    "They cost as much as in use, and need a quota of their own (\"for training warm pool usage\"), 0 until it is raised.",
    "leave keep_alive out unless jobs follow one another", _GUIDE,
)  # fmt: skip
PREFERENCES = _rule(
    "preferences", "error", "Instance preferences that SageMaker does not take.",
    "InstancePreferences excludes InstanceType and managed spot, and a type may appear only once; the recipe's ranks need "
    "the same number of GPUs on each.",
    "list up to 5 types with compute.gpus_per_node GPUs, without sku and with tier on_demand", _MODEL,
)  # fmt: skip
PREFERENCE_GPU = _rule(
    "preference-gpu", "warning", "A preference has another GPU than the recipe's.",
    "Memory and speed differ; the batch that fits one may not fit the other, and the price is another.",
    "leave it out, or choose micro_batch_size for the smaller one", "backends/sagemaker/skus.py",
)  # fmt: skip
TRAINING_PLAN = _rule(
    "training-plan", "error", "Reserved capacity and the training plan do not go together.",
    "tier reserved means the capacity of a training plan, which the request names by its ARN; nothing else uses it.",
    "give both training_plan and tier: reserved, or neither", _MODEL,
)  # fmt: skip
SKU_NONE = _rule(
    "sku-none", "error", "No instance type has that GPU and that count.",
    "SageMaker has each GPU in a few machine sizes only; the ranks of a node share one machine.",
    "choose another compute.gpu or compute.gpus_per_node", "Amazon EC2 instance types", 3,
)  # fmt: skip
SKU_UNKNOWN = _rule(
    "sku-unknown", "error", "No such instance type.",
    "The name is not in the service's list of training instance types.",
    "a name such as ml.p4de.24xlarge", _MODEL,
)  # fmt: skip
SKU_UNVERIFIED = _rule(
    "sku-unverified", "warning", "An instance type that isthmus knows nothing of.",
    "SageMaker has it, but its GPUs, their count and its fabric are not in isthmus' table, so that nothing compares them "
    "with the recipe.",
    "see that it has compute.gpus_per_node GPUs", "backends/sagemaker/skus.py",
)  # fmt: skip
SKU_GPU = _rule(
    "sku-gpu", "error", "The instance type does not have the recipe's GPUs.",
    "The worker starts compute.gpus_per_node ranks on each node, one for each GPU; fewer GPUs fail at the start, more are "
    "paid and idle.",
    "leave sku out, or change compute.gpu and compute.gpus_per_node", "backends/sagemaker/skus.py",
)  # fmt: skip
VOLUME_KEY = _rule(
    "volume-key", "error", "A volume key on a machine with disks of its own.",
    "SageMaker refuses VolumeKmsKeyId for instance types with local storage, which their hardware encrypts.",
    "leave volume_kms_key out", _MODEL,
)  # fmt: skip
VOLUME_SIZE = _rule(
    "volume-size", "warning", "A volume size on a machine with disks of its own.",
    "No EBS volume is made for it; what there is, is the machine's NVMe.",
    "leave volume_gb out", _MODEL,
)  # fmt: skip
DISK = _rule(
    "disk", "warning", "Downloaded data on a volume of the default size.",
    "A full disk can end a job as if it had succeeded. Data that is downloaded needs its own size, on every node.",
    "--set backends.sagemaker.volume_gb=<size of the data and 50 more>, or data.access: stream",
    "issues of the SageMaker SDK",
)  # fmt: skip
DOWNLOAD = _rule(
    "download", "note", "The data is copied to every node before the job begins.",
    "File channels are downloaded again by every restart, and that time is billed. The recipe in the job reads the copy as "
    "a mount.",
    "data.access: stream or mount begins at once", _GUIDE,
)  # fmt: skip
VPC = _rule(
    "vpc", "error", "Half of a VPC.",
    "VpcConfig needs subnets and security groups both.",
    "give subnets and security_groups", _MODEL,
)  # fmt: skip
ISOLATION = _rule(
    "isolation", "error", "A network-isolated job that needs the network.",
    "Network isolation leaves the container no network, not even to S3 and not even in a VPC: data must come by channels "
    "(mount or download) and checkpoints must go through /opt/ml/checkpoints, which SageMaker copies, on one node.",
    "data.access: mount, checkpoint_mirror: true, compute.nodes: 1", _MODEL,
)  # fmt: skip
ISOLATION_HUB = _rule(
    "isolation-hub", "warning", "A network-isolated job names a model of a hub.",
    "Without network there are no sample grids unless the autoencoder is on S3, from where it comes as a channel.",
    "copy it to S3: encoders.autoencoder.source: s3://bucket/vae/", "core/train/validation.py",
)  # fmt: skip
MIRROR = _rule(
    "mirror", "error", "The checkpoint mirror is for one node.",
    "Every instance copies its own /opt/ml/checkpoints to the same prefix: files of one name overwrite one another, and a "
    "deletion on one deletes for all.",
    "leave checkpoint_mirror out: the run directory is written to S3 directly", _GUIDE,
)  # fmt: skip
MIRROR_SYNC = _rule(
    "mirror-sync", "warning", "Checkpoints reach S3 only when SageMaker copies them.",
    "The copy has stopped, or taken only the first checkpoint, in jobs of others; events and stop requests of a launcher do "
    "not reach the job, and the lease cannot see another attempt.",
    "leave checkpoint_mirror out unless the job is network-isolated", "aws/sagemaker-python-sdk#3062",
)  # fmt: skip
IMAGE_TORCH = _rule(
    "image-torch", "error", "The image's torch or CUDA is too old.",
    "Isthmus needs torch >= 2.13 in the image, and Blackwell GPUs need CUDA >= 12.8; another pairing of NCCL and EFA "
    "plugin costs the fabric its speed.",
    "leave image out, or build on a current AWS training image", "pyproject.toml; release notes of AWS's images",
)  # fmt: skip
IMAGE_REGION = _rule(
    "image-region", "error", "The image is in another region's registry.",
    "SageMaker pulls a private ECR image only from the region that the job runs in.",
    "push the image to the job's region", _GUIDE,
)  # fmt: skip
IMAGE_TAG = _rule(
    "image-tag", "warning", "The image can change under a run.",
    "A restart that pulls `latest` may get another image than the run was begun with.",
    "name it by digest: registry/repository@sha256:...", _GUIDE,
)  # fmt: skip
SMDDP = _rule(
    "smddp", "error", "SMDDP does not work there.",
    "Its last release, 2.5.0 of October 2024, is for PyTorch 2.4.1 on ml.p4d and ml.p4de; AWS's images of today do not have "
    "it, nor does the current SDK. NCCL over EFA is the default.",
    "leave smddp out", "release notes of the SageMaker distributed data parallel library",
)  # fmt: skip
EFA = _rule(
    "efa", "warning", "Several nodes without EFA.",
    "Gradients cross Ethernet, at a small share of what EFA carries; steps wait for them.",
    "use ml.p4d or newer, or one node with more GPUs", "Amazon EC2 instance types",
)  # fmt: skip
ENCRYPT = _rule(
    "encrypt-traffic", "warning", "Encrypted traffic between nodes slows training.",
    "Every gradient exchange is encrypted and decrypted; distributed training takes longer, and costs more.",
    "leave encrypt_traffic out unless it is required", _GUIDE,
)  # fmt: skip
PRICE = _rule(
    "price", "warning", "budget.max_usd needs a price.",
    "Nobody knows what an hour of these machines costs, so that neither the job nor the supervisor can keep the cap.",
    "--set backends.sagemaker.usd_per_hour=<of all nodes>, a row in --prices FILE (docs/cost.md), or budget.max_hours",
    "core/train/control.py",
)  # fmt: skip

OFFLINE = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
RULES: tuple[Rule, ...] = (*OFFLINE, *ONLINE)
"""All of them, in the order of the documentation."""
