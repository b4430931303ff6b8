"""The rules about data and storage, with the arithmetic of egress; and those of the preflight."""

from __future__ import annotations

from isthmus.backends.rules import Rule

_STORAGE = "Microsoft: scalability and performance targets for standard storage accounts"

RUN_DIRECTORY = Rule(
    id="azure.run-directory",
    level="error",
    title="a run directory that no node can write to",
    why="All nodes, the launcher and whoever resumes the run read and write it: it must be in Blob storage.",
    fix="run_directory: {azure: az://CONTAINER@ACCOUNT.blob.core.windows.net/PATH}",
    exit_code=2,
)
DATA_PLACE = Rule(
    id="azure.data-place",
    level="error",
    title="data that the job cannot reach",
    why="A path of your own machine means nothing in the container, and Azure ML mounts Blob storage alone.",
    fix="data.sources: uri: {azure: az://CONTAINER@ACCOUNT.blob.core.windows.net/PATH}; isthmus data copy brings it there",
    exit_code=2,
)
DATA_WASBS = Rule(
    id="azure.data-wasbs",
    level="error",
    title="a wasbs:// place",
    why="The SDK's dump and load turn it into `azureml:wasbs://`, which nothing can mount; no store here opens it.",
    fix="az://CONTAINER@ACCOUNT.blob.core.windows.net/PATH",
    source="azure-ai-ml 1.35, tried",
    exit_code=2,
)
DATA_OTHER_CLOUD = Rule(
    id="azure.data-other-cloud",
    level="warning",
    title="data streamed from another cloud",
    why="Every epoch is paid as egress there, at several cents a gigabyte, and the nodes need that cloud's credentials.",
    fix="copy it to a storage account in the job's region",
)
CACHE = Rule(
    id="azure.mount-cache",
    level="error",
    title="a mount's cache larger than the node's disk",
    why="A mount fills the disk, and everything on the node then fails with `No space left on device`.",
    fix="a smaller backends.azure.mount.cache",
    source="Azure ML: mount settings; the default has no limit",
)
CACHE_VARIABLE = Rule(
    id="azure.mount-unbounded",
    level="error",
    title="a mount's cache without a limit",
    why="DATASET_MOUNT_CACHE_SIZE of zero or less means no limit, or only some room left on the disk.",
    fix="backends.azure.mount.cache",
    source="Azure ML: mount settings",
)
DOWNLOAD = Rule(
    id="azure.download-start",
    level="note",
    title="data is downloaded before the start",
    why="Azure ML copies every input to every node's disk before the command runs: that time is paid, and after each restart again.",
    fix="data.access: mount or stream",
    source="Azure ML: input modes",
)
EGRESS = Rule(
    id="azure.egress",
    level="error",
    title="reading needs more than the storage accounts give",
    why="Beyond an account's limit requests are answered with 503 `Egress is over the account limit`: the GPUs wait.",
    fix="spread the roots of the data over more accounts (a list in `uri`), or ask Azure to raise the limit",
    source=_STORAGE,
)
EGRESS_TIGHT = Rule(
    id="azure.egress-tight",
    level="warning",
    title="reading needs most of what the storage accounts give",
    why="Restarts, validation and other jobs read too; beyond the limit requests are answered with 503.",
    fix="spread the roots of the data over more accounts, or ask Azure to raise the limit",
    source=_STORAGE,
)
ETHERNET = Rule(
    id="azure.ethernet",
    level="error",
    title="reading needs more than a node's Ethernet gives",
    why="Storage is reached over Ethernet, not InfiniBand: an ND A100 v4 machine has 24 Gb/s, 3 GB/s, for its eight GPUs.",
    fix="fewer images a second a node (a larger model or resolution), or more nodes",
    source="Microsoft: ND A100 v4 series",
)

LOGIN = Rule(
    id="azure.login",
    level="error",
    title="no valid login",
    why="Nothing can be asked or submitted.",
    fix="az login, or a managed identity",
    exit_code=3,
)
WORKSPACE = Rule(
    id="azure.workspace",
    level="error",
    title="the workspace cannot be opened",
    why="It does not exist under that subscription and resource group, or the login has no role on it.",
    fix="check the names; the role is AzureML Data Scientist",
)
WORKSPACE_REGION = Rule(
    id="azure.workspace-region",
    level="error",
    title="the workspace is in another region than the settings say",
    why="The job runs where its compute is; data, quota and prices of the other region would be looked at.",
    fix="backends.azure.region of the workspace, or another workspace",
)
CLUSTER = Rule(
    id="azure.cluster",
    level="error",
    title="the cluster is not there, or does not fit",
    why="The job would be refused, wait for ever for more nodes than the cluster may have, or run on another machine.",
    fix="backends.azure.cluster: {create: true}, or the name of a fitting cluster",
)
CLUSTER_IDLE = Rule(
    id="azure.cluster-minimum",
    level="warning",
    title="the cluster does not scale to zero",
    why="Its minimum of nodes costs around the clock, job or no job.",
    fix="az ml compute update --min-instances 0",
)
OFFERED = Rule(
    id="azure.region-sku",
    level="error",
    title="the region does not offer the machine, or not in that tier",
    why="A cluster of it cannot be created there.",
    fix="another region or another of compute.offers",
)
QUOTA = Rule(
    id="azure.quota",
    level="error",
    title="not enough quota",
    why="GPU families begin with a quota of 0; low-priority cores are one pool for all families.",
    fix="ask for it in the Azure portal (Machine Learning, Quotas), or take another of compute.offers",
    source="Azure ML: manage and increase quotas",
)
QUOTA_UNKNOWN = Rule(
    id="azure.quota-unknown",
    level="warning",
    title="the quota could not be found out",
    why="The service does not list that family, or the login may not ask.",
    fix="look in the Azure portal: Machine Learning, Quotas",
)
ENVIRONMENT = Rule(
    id="azure.environment",
    level="error",
    title="the registered environment is not there",
    why="The job would be refused.",
    fix="az ml environment list shows what there is",
)
STORAGE_REGION = Rule(
    id="azure.storage-region",
    level="error",
    title="a storage account in another region than the compute",
    why="Reads cross regions: slow, and paid by the gigabyte, each epoch anew.",
    fix="copy the data to an account in the compute's region, or set backends.azure.region",
)
STORAGE = Rule(
    id="azure.storage",
    level="error",
    title="a container that cannot be reached",
    why="It does not exist, or the login has no role on it.",
    fix="check the name; the role is Storage Blob Data Contributor",
)
ASK = Rule(
    id="azure.unanswered",
    level="warning",
    title="a question that Azure did not answer",
    why="A check could not be made; the launch may still be right.",
    fix="try again: isthmus doctor",
)
RULES: tuple[Rule, ...] = (
    RUN_DIRECTORY, DATA_PLACE, DATA_WASBS, DATA_OTHER_CLOUD, CACHE, CACHE_VARIABLE, DOWNLOAD, EGRESS, EGRESS_TIGHT, ETHERNET,
    LOGIN, WORKSPACE, WORKSPACE_REGION, CLUSTER, CLUSTER_IDLE, OFFERED, QUOTA, QUOTA_UNKNOWN, ENVIRONMENT, STORAGE_REGION,
    STORAGE, ASK,
)  # fmt: skip
