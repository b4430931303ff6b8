"""What the service refuses, each with the rule it stands for: one list, for tests, for documentation and for the answers themselves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isthmus.errors import UsageError

QUOTAS = "https://learn.microsoft.com/azure/machine-learning/how-to-manage-quotas"
MFE = "azure-rest-api-specs, Microsoft.MachineLearningServices, mfe.json"
COMPUTE = "azure-rest-api-specs, Microsoft.MachineLearningServices, machineLearningServices.json"
CLUSTERS = "https://learn.microsoft.com/azure/machine-learning/how-to-create-attach-compute-cluster"
YAML = "https://learn.microsoft.com/azure/machine-learning/reference-yaml-job-command"
ARM = "https://learn.microsoft.com/azure/azure-resource-manager/management/common-deployment-errors"
SERVERLESS = "https://learn.microsoft.com/azure/machine-learning/how-to-use-serverless-compute"
DATA = "https://learn.microsoft.com/azure/machine-learning/how-to-read-write-data-v2"
CODES = "https://learn.microsoft.com/azure/machine-learning/how-to-troubleshoot-environments"

When = Literal["request", "allocation", "start", "run"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the service.

    `when` it bites: at the request (an HTTP error), while nodes are allocated (the job stays queued, the cluster has an
    error), at the job's start or in its run (the job fails).
    """

    id: str
    status: int
    code: str
    what: str
    source: str
    when: When = "request"


class Refused(Exception):
    """The service says no."""

    def __init__(self, rule: Rule, message: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message

    def body(self) -> dict[str, Any]:
        """Azure's error envelope; the rule is in `additionalInfo`, which clients pass through."""
        info = {"type": "Rule", "info": {"id": self.rule.id, "source": self.rule.source}}
        return {
            "error": {
                "code": self.rule.code,
                "message": self.message,
                "details": [],
                "additionalInfo": [info],
            }
        }


def _rules(*rules: Rule) -> dict[str, Rule]:
    return {rule.id: rule for rule in rules}


RULES: dict[str, Rule] = _rules(
    # -- every request
    Rule("api-version", 400, "MissingApiVersionParameter", "a request names its api-version", ARM),
    Rule(
        "token",
        401,
        "InvalidAuthenticationToken",
        "a request carries a token that is known and not expired",
        ARM,
    ),
    Rule("subscription", 404, "SubscriptionNotFound", "the subscription exists", ARM),
    Rule("workspace", 404, "ResourceNotFound", "resource group and workspace exist", ARM),
    Rule("not-found", 404, "NotFound", "what a GET names exists", ARM),
    Rule(
        "not-emulated",
        404,
        "NotEmulated",
        "the emulator knows the operation (the service has more)",
        "the emulator",
    ),
    Rule("body", 400, "ValidationError", "the body is JSON of the published shape", MFE),
    # -- computes
    Rule(
        "compute-name",
        400,
        "BadArgument",
        "a cluster's name: a letter, then letters, digits, dashes; 2 to 32 in all",
        CLUSTERS,
    ),
    Rule(
        "compute-type",
        400,
        "BadArgument",
        "computeType is AmlCompute (the emulator runs no other)",
        "the emulator",
    ),
    Rule("compute-sku-unknown", 400, "InvalidPropertyValue", "the VM size exists", CLUSTERS),
    Rule("compute-sku-region", 400, "InvalidPropertyValue", "the region offers the VM size", CLUSTERS),
    Rule("compute-priority", 400, "BadArgument", "vmPriority is Dedicated or LowPriority", COMPUTE),
    Rule(
        "compute-sku-low-priority",
        400,
        "BadArgument",
        "a low-priority cluster's VM size is low-priority capable",
        CLUSTERS,
    ),
    Rule(
        "compute-scale",
        400,
        "BadArgument",
        "0 <= minNodeCount <= maxNodeCount, maxNodeCount >= 1, an ISO 8601 idle time",
        COMPUTE,
    ),
    Rule(
        "compute-rdma-nodes", 400, "BadArgument", "a cluster of RDMA machines has at most 100 nodes", QUOTAS
    ),
    Rule(
        "compute-nodes",
        400,
        "BadArgument",
        "a cluster has at most 100 nodes unless support raised it",
        QUOTAS,
    ),
    Rule(
        "compute-change",
        400,
        "BadArgument",
        "VM size, priority and region of a cluster cannot be changed",
        CLUSTERS,
    ),
    Rule(
        "quota-family", 400, "ClusterCoreQuotaReached", "the family's quota holds at least one node", QUOTAS
    ),
    Rule(
        "quota-low-priority",
        400,
        "ClusterCoreQuotaReached",
        "the low-priority pool holds at least one node",
        QUOTAS,
    ),
    Rule(
        "quota-nodes",
        200,
        "ClusterCoreQuotaReached",
        "the quota holds the nodes a job wants; else it stays queued",
        QUOTAS,
        "allocation",
    ),
    Rule(
        "capacity",
        200,
        "AllocationFailed",
        "the region has the machines free; else the job stays queued",
        CLUSTERS,
        "allocation",
    ),
    # -- environments, data
    Rule(
        "asset-name",
        400,
        "ValidationError",
        "names and versions of assets: letters, digits, dash, underscore; <= 255",
        MFE,
    ),
    Rule(
        "asset-immutable",
        409,
        "Conflict",
        "a version of an environment, code or data asset cannot be changed",
        MFE,
    ),
    Rule("environment-image", 400, "ValidationError", "an environment has an image or a build context", MFE),
    # -- jobs
    Rule(
        "job-name",
        400,
        "UserError",
        "a job's name: a letter or digit, then letters, digits, dash, underscore; <= 255",
        MFE,
    ),
    Rule(
        "job-exists",
        400,
        "UserError",
        "a job's name is used once; only tags and the like of a job can be changed",
        YAML,
    ),
    Rule("job-type", 400, "UserError", "jobType is Command (the emulator runs no other)", "the emulator"),
    Rule("job-command", 400, "UserError", "a command job has a command", YAML),
    Rule(
        "job-command-input",
        400,
        "UserError",
        "each ${{inputs.x}} and ${{outputs.x}} of the command is defined",
        YAML,
    ),
    Rule(
        "job-input-name",
        400,
        "UserError",
        "an input's or output's name: a letter or underscore, then letters, digits, underscores",
        YAML,
    ),
    Rule(
        "job-input",
        400,
        "UserError",
        "an input has a known type, a uri that can be read, and a mode of its type",
        YAML,
    ),
    Rule(
        "job-output",
        400,
        "UserError",
        "an output has a known type, a uri that can be written, and a mode",
        YAML,
    ),
    Rule("job-datastore", 400, "UserError", "datastores and data assets that a job names exist", YAML),
    Rule(
        "job-environment", 400, "UserError", "a job names an environment with its version, which exists", YAML
    ),
    Rule("job-code", 400, "UserError", "the code version that a job names exists", MFE),
    Rule("job-compute", 400, "UserError", "the compute that a job names exists", YAML),
    Rule("job-instance-type", 400, "UserError", "instanceType is the cluster's VM size, or absent", YAML),
    Rule(
        "job-instances",
        400,
        "UserError",
        "instanceCount is a whole number >= 1, at most the cluster's maxNodeCount",
        YAML,
    ),
    Rule(
        "job-distribution",
        400,
        "UserError",
        "distribution is PyTorch, with processCountPerInstance >= 1",
        YAML,
    ),
    Rule("job-shm", 400, "UserError", "shmSize is a number and one of b, k, m, g", MFE),
    Rule("job-docker-args", 400, "UserError", "dockerArgs is a string", MFE),
    Rule(
        "job-environment-variables",
        400,
        "ValidationError",
        "environment variables are a map of strings to strings",
        MFE,
    ),
    Rule("job-tags", 400, "ValidationError", "tags and properties are maps of strings to strings", MFE),
    Rule(
        "job-timeout",
        400,
        "UserError",
        "limits.timeout is an ISO 8601 duration of whole seconds, >= 1 s",
        MFE,
    ),
    Rule("job-lifetime", 400, "UserError", "a job lives at most 21 days, 7 on low priority", QUOTAS),
    Rule("job-identity", 400, "UserError", "identity is Managed, AMLToken or UserIdentity", MFE),
    Rule(
        "serverless-identity",
        400,
        "UserError",
        "serverless compute knows no system-assigned identity: name a user-assigned one",
        SERVERLESS,
    ),
    Rule(
        "serverless-instance-type",
        400,
        "UserError",
        "a serverless job's instanceType exists in the region",
        SERVERLESS,
    ),
    Rule("serverless-quota", 400, "UserError", "a serverless job's nodes fit the quota", SERVERLESS),
    Rule(
        "job-tier",
        400,
        "UserError",
        "queueSettings.jobTier is Spot, Basic, Standard, Premium or Null, on serverless compute",
        YAML,
    ),
    # -- a job's start and run
    Rule("image", 200, "UserError", "the environment's image can be pulled", CODES, "start"),
    Rule(
        "input-missing",
        200,
        "UserError",
        "what an input's uri names exists (ScriptExecution.StreamAccess.NotFound)",
        DATA,
        "start",
    ),
    Rule(
        "input-access",
        200,
        "UserError",
        "an input's account can be read (ScriptExecution.StreamAccess.Authentication)",
        DATA,
        "start",
    ),
    Rule(
        "identity-missing",
        200,
        "UserError",
        "a job with a managed identity runs on a cluster that has one",
        CLUSTERS,
        "start",
    ),
    Rule("exit-code", 200, "UserError", "the user's process exits with 0", YAML, "run"),
    Rule(
        "preempted",
        200,
        "PreemptionError",
        "low-priority nodes may be taken back at any moment",
        CLUSTERS,
        "run",
    ),
    Rule("node-lost", 200, "NodeLost", "a node that dies ends the job", CLUSTERS, "run"),
    Rule("timed-out", 200, "UserError", "a job past limits.timeout is cancelled", MFE, "run"),
)


def refuse(rule: str, message: str) -> Refused:
    """The refusal by the rule of that id, to be raised."""
    return Refused(RULES[rule], message)


def as_json() -> str:
    """All rules, machine-readable."""
    return json.dumps([asdict(rule) for rule in RULES.values()], indent=2)


def missing(what: str, hint: str) -> UsageError:
    """What the emulator needs on this machine and did not find."""
    return UsageError(f"the Azure ML emulator needs {what}", hint=hint)
