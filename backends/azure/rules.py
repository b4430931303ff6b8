"""The rules of Azure ML: one for each trap and limit that a recipe or its settings can step into."""

from __future__ import annotations

from isthmus.backends.azure import body, rules_data
from isthmus.backends.rules import Rule

_LIMITS = "Azure ML: manage and increase quotas"
_NCCL = "Microsoft: azhpc-images and azurehpc-health-checks"

SETTINGS = Rule(
    id="azure.settings",
    level="error",
    title="settings that do not suffice for a job: workspace, machine, image, or a place",
    why="Without them there is no request to send.",
    fix="backends.azure: {subscription, resource_group, workspace, environment}",
    exit_code=2,
)
SKU = Rule(
    id="azure.sku-gpu",
    level="error",
    title="a machine that does not have the recipe's GPUs",
    why="The ranks would be fewer or more than compute says, on another GPU than the plan and its price are for.",
    fix="leave backends.azure.sku out, or change compute.gpu and compute.gpus_per_node",
    source="Microsoft: sizes of the ND, NC and D series",
    exit_code=2,
)
IMAGE_TAG = Rule(
    id="azure.image-tag",
    level="warning",
    title="an image by tag",
    why="A tag may mean another image tomorrow: a resumed run would go on with other software than it began with.",
    fix="image: registry/name@sha256:...  (docker buildx imagetools inspect NAME shows it)",
)
IMAGE_BUILD = Rule(
    id="azure.image-build",
    level="warning",
    title="an image that Azure ML builds",
    why="Builds run on a compute of the workspace, take tens of minutes and are known to hang; the job waits without a word.",
    fix="build and push it yourself, and name it by digest",
    source="Azure ML users' issues",
)
REGION = Rule(
    id="azure.region-unknown",
    level="note",
    title="no region is named",
    why="Limits that differ by region (storage egress, quota) and prices cannot be looked up offline.",
    fix="backends.azure.region: italynorth",
)
REGION_NAME = Rule(
    id="azure.region-name",
    level="warning",
    title="no region of that name is known here",
    why="A workspace, quota and prices are looked up by it, and the offer would never be found. A region that is newer than this "
    "version of isthmus is one that it does not know, either.",
    fix="correct the name: backends.azure.region, backends.azure.regions, compute.offers",
    source="Microsoft's list of Azure regions",
)
REGION_OTHER = Rule(
    id="azure.region-other",
    level="error",
    title="an offer in a region that the settings know nothing of",
    why="A workspace belongs to one region: the job would start where the settings' workspace is, not where the offer says.",
    fix="backends.azure.regions: {REGION: {workspace: ..., compute: ...}}",
    exit_code=2,
)
NODES_FABRIC = Rule(
    id="azure.fabric-nodes",
    level="error",
    title="more than 100 nodes in one InfiniBand cluster",
    why="An AmlCompute cluster of RDMA machines is one placement group of at most 100 nodes.",
    fix="compute.nodes of at most 100",
    source=_LIMITS,
)
NO_FABRIC = Rule(
    id="azure.no-fabric",
    level="warning",
    title="several nodes without InfiniBand between them",
    why="Gradients cross the machines' Ethernet: 20 to 80 Gb/s a machine instead of 1600 to 3200.",
    fix="an ND machine (8 GPUs), or one node",
    source="Microsoft: sizes of the ND and NC series",
)
MEMLOCK = Rule(
    id="azure.memlock",
    level="error",
    title="InfiniBand without unlimited locked memory",
    why="ibv_reg_mr fails with `Cannot allocate memory`, and NCCL ends or falls back to sockets.",
    fix="backends.azure.memlock: true",
    source=_NCCL,
)
SHM_LARGE = Rule(
    id="azure.shm-memory",
    level="error",
    title="more shared memory than the machine has",
    why="docker takes it; the first that fills it is killed for want of memory.",
    fix="a smaller backends.azure.shm_size",
)
DOCKER = Rule(
    id="azure.docker-args",
    level="error",
    title="a docker argument that a setting of its own says",
    why="The argument would be given twice, and the later one wins silently.",
    fix="backends.azure.shm_size and backends.azure.memlock",
)
MSCCLPP_IMAGE = Rule(
    id="azure.mscclpp-image",
    level="error",
    title="MSCCL++ with an image that does not have it",
    why="It is built from source; Microsoft's ACPT and Azure ML images hold no libmscclpp_nccl.so, and a missing LD_PRELOAD is only a warning.",
    fix="an image of your own with MSCCL++ built in, or leave mscclpp out",
    source="microsoft/mscclpp 0.9: quick start",
)
MSCCLPP = Rule(
    id="azure.mscclpp",
    level="warning",
    title="MSCCL++ in front of NCCL",
    why="It takes over all-reduce for the sizes it knows; what it does not know falls back to NCCL. Results may differ in the last bit.",
    fix="measure with it and without",
    source="microsoft/mscclpp 0.9",
)
IDENTITY_SERVERLESS = Rule(
    id="azure.identity-serverless",
    level="error",
    title="serverless compute without a user-assigned identity",
    why="Serverless machines have no system-assigned identity: the job could read no data and write no run.",
    fix="backends.azure.client_id of a user-assigned identity of the workspace, or a cluster with an identity",
    source="Azure ML: serverless compute",
)
IDENTITY_USER = Rule(
    id="azure.identity-user",
    level="warning",
    title="your own identity in the job",
    why="It serves inputs while your token lasts; the run directory and streamed data are opened by the compute's managed identity.",
    fix="identity: managed",
    source="Azure ML: data access from jobs",
)
TIMEOUT_LONG = Rule(
    id="azure.timeout-maximum",
    level="error",
    title="a timeout beyond 21 days",
    why="Azure ML ends every job after 21 days, whatever its timeout says.",
    fix="at most 21 d; a longer run goes on in the next job (isthmus supervise)",
    source=_LIMITS,
)
TIMEOUT_LOW = Rule(
    id="azure.timeout-low-priority",
    level="error",
    title="a timeout beyond 7 days on interruptible machines",
    why="A low-priority job ends after 7 days, whatever its timeout says.",
    fix="at most 7 d; a longer run goes on in the next job (isthmus supervise)",
    source=_LIMITS,
)
TIMEOUT_SHORT = Rule(
    id="azure.timeout-budget",
    level="note",
    title="the run may be longer than one job",
    why="A job that reaches its timeout is cancelled; the run goes on from its last checkpoint in the next one.",
    fix="launch with --follow, or run isthmus supervise",
)
TIER = Rule(
    id="azure.tier-cluster",
    level="error",
    title="an interruptible offer on a cluster of another tier",
    why="A cluster is dedicated or low priority for good; a job cannot choose. It would run at the full price.",
    fix="backends.azure.spot_compute: NAME of a low-priority cluster, or compute: serverless",
    exit_code=2,
)
RESTARTS = Rule(
    id="azure.spot-restarts",
    level="warning",
    title="interruptible machines and no restarts",
    why="Azure ML may fail a preempted job instead of queueing it again; isthmus resubmits it, compute.max_restarts times.",
    fix="compute.max_restarts: 10, and isthmus supervise",
    source="Azure ML users' issues",
)
GRACE = Rule(
    id="azure.grace-spot",
    level="warning",
    title="a grace beyond what a preemption leaves",
    why="Azure gives a preempted machine about 30 s; a checkpoint that is planned to take longer is cut off.",
    fix="backends.azure.grace: 30 s, and checkpoints often enough",
    source="Azure: spot virtual machines, scheduled events",
)
TAG = Rule(
    id="azure.tag-reserved",
    level="error",
    title="a tag that isthmus sets itself",
    why="Jobs are found again by these tags, also from another machine.",
    fix="another name",
    exit_code=2,
)
VARIABLE = Rule(
    id="azure.variable-reserved",
    level="error",
    title="an environment variable that Azure ML or isthmus sets for each node",
    why="The worker takes its rank and its peers from them: with one value for all nodes nobody meets.",
    fix="leave it out",
    exit_code=2,
)
VARIABLE_TEXT = Rule(
    id="azure.variable-text",
    level="note",
    title="an environment variable written as true, false or a number",
    why="The SDK sends a JSON boolean, which the service refuses; isthmus sends the text.",
    fix='quote it: "true"',
    source="azure-ai-ml 1.35, tried",
)
EXPRESSION = Rule(
    id="azure.variable-expression",
    level="error",
    title="a ${{expression}} in an environment variable",
    why="Azure ML expands ${{inputs.x}} and ${{outputs.x}} in the command alone; in a variable it stays literal.",
    fix="a path or URI in full",
    source="Azure ML users' issues",
    exit_code=2,
)
TENSORBOARD = Rule(
    id="azure.tensorboard",
    level="error",
    title="TensorBoard beside a job that writes no event files",
    why="The studio would show an empty page.",
    fix="trackers: [tensorboard]",
    exit_code=2,
)

RULES: tuple[Rule, ...] = (
    SETTINGS, SKU, IMAGE_TAG, IMAGE_BUILD, REGION, REGION_NAME, REGION_OTHER, NODES_FABRIC, NO_FABRIC, MEMLOCK, SHM_LARGE, DOCKER,
    MSCCLPP_IMAGE, MSCCLPP, IDENTITY_SERVERLESS, IDENTITY_USER, TIMEOUT_LONG, TIMEOUT_LOW, TIMEOUT_SHORT, TIER, RESTARTS,
    GRACE, TAG, VARIABLE, VARIABLE_TEXT, EXPRESSION, TENSORBOARD, *rules_data.RULES, *body.RULES,
)  # fmt: skip
