"""The REST body against the service's own model, offline: keys, types, enums, and what the SDK lets pass and the service refuses.

Our own renderings pass by construction; this is what holds them to it, and what a bridge's or a user's own body is held to.
Source: Microsoft.MachineLearningServices 2025-01-01-preview (`CommandJob` and what it refers to), and trials of azure-ai-ml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.backends.azure.document import DURATION, seconds
from isthmus.backends.rules import Rule
from isthmus.backends.spec import Finding

_SERVICE = "Microsoft.MachineLearningServices 2025-01-01-preview, CommandJob"
_SDK = "azure-ai-ml 1.35, tried: it takes this without a word"


def _rule(id: str, title: str, why: str, fix: str, source: str = _SDK) -> Rule:
    return Rule(id=f"azure.{id}", level="error", title=title, why=why, fix=fix, source=source)


SHAPE = _rule(
    "body-shape",
    "a field that the service's model does not have, or of another type",
    "The service answers 400, or drops the field without a word.",
    "a field of isthmus' own rendering: report it; of yours: see the command job's REST reference",
    _SERVICE,
)
NODES = _rule(
    "instance-count",
    "resources.instanceCount below 1",
    "The SDK sends a negative count on; the service refuses the job, or takes 1.",
    "compute.nodes of at least 1",
)
SHM = _rule(
    "shm-size",
    "resources.shmSize that is no number with one of b, k, m, g",
    "`lots` passes the SDK; docker refuses it when the node starts, after the wait for the nodes.",
    "backends.azure.shm_size: 16 GiB",
)
ENVIRONMENT = _rule(
    "environment-version",
    "an environment without its version",
    "`azureml:name` passes the SDK's schema; the job is refused later, or runs whatever is newest on that day.",
    "name:version, or an image by digest",
)
UNUSED = _rule(
    "input-unused",
    "an input that the command does not use",
    "It is mounted or downloaded all the same: time, disk and egress for nothing; a misspelt name looks like this.",
    "use it as ${{inputs.NAME}}, or leave it out",
)
UNKNOWN_INPUT = _rule(
    "input-unknown",
    "the command names an input that the job does not have",
    "The expression stays as it is, or the job is refused, after the wait for the nodes.",
    "declare the input",
)
TIMEOUT = _rule(
    "timeout-zero",
    "limits.timeout that is no duration above zero",
    "The SDK drops a timeout of 0 silently: the job then has no limit.",
    "a duration above zero, or none",
)
WASBS = _rule(
    "wasbs",
    "a wasbs:// path",
    "The SDK's dump and load turn wasbs:// into `azureml:wasbs://`, which nothing can mount.",
    "az://CONTAINER@ACCOUNT.blob.core.windows.net/PATH",
    "azure-ai-ml 1.35, tried: dump and load of a job",
)
EXPRESSION = _rule(
    "expression-in-environment",
    "a ${{expression}} in an environment variable",
    "Azure ML expands ${{inputs.x}} and ${{outputs.x}} in the command alone; in a variable it stays literal.",
    "hand it over in the command line",
    "Azure ML's documentation of expressions; its users' issues",
)
VALUE = _rule(
    "environment-value",
    "an environment variable that is not a text",
    "A YAML `true` goes out as a JSON boolean and is refused, or arrives as `True`.",
    'quote it: "true"',
)
LAUNCHER = _rule(
    "one-launcher",
    "more than one launcher of ranks",
    "With process_count_per_instance above 1 and a torchrun in the command, every process starts all ranks of its node.",
    "process_count_per_instance: 1; isthmus' worker starts torchrun",
    "Azure ML: distributed training guide",
)
RULES: tuple[Rule, ...] = (
    SHAPE, NODES, SHM, ENVIRONMENT, UNUSED, UNKNOWN_INPUT, TIMEOUT, WASBS, EXPRESSION, VALUE, LAUNCHER,
)  # fmt: skip

_TEXTS: Mapping[str, Any] = {"*": str}
_INPUT = {
    "jobInputType": {"uri_folder", "uri_file", "mltable", "literal", "custom_model", "mlflow_model", "triton_model"},
    "mode": {"ReadOnlyMount", "ReadWriteMount", "Download", "Direct", "EvalMount", "EvalDownload"},
    "uri": str, "value": str, "description": str, "pathOnCompute": str,
}  # fmt: skip
_OUTPUT = {
    "jobOutputType": {"uri_folder", "uri_file", "mltable", "custom_model", "mlflow_model", "triton_model"},
    "mode": {"ReadWriteMount", "Upload", "Direct"},
    "uri": str, "description": str, "assetName": str, "assetVersion": str,
}  # fmt: skip
MODEL: Mapping[str, Any] = {
    "jobType": {"Command"},
    "displayName": str, "description": str, "experimentName": str, "componentId": str, "isArchived": bool,
    "tags": _TEXTS, "properties": _TEXTS, "command": str, "codeId": str, "environmentId": str, "computeId": str,
    "environmentVariables": {"*": object},
    "distribution": {
        "distributionType": {"PyTorch", "Mpi", "TensorFlow", "Ray"}, "processCountPerInstance": int,
    },
    "identity": {
        "identityType": {"Managed", "UserIdentity", "AMLToken"}, "clientId": str, "objectId": str, "resourceId": str,
    },
    "inputs": {"*": _INPUT},
    "outputs": {"*": _OUTPUT},
    "limits": {"jobLimitsType": {"Command"}, "timeout": str},
    "queueSettings": {"jobTier": {"Null", "Spot", "Basic", "Standard", "Premium"}, "priority": int},
    "resources": {
        "instanceCount": int, "maxInstanceCount": int, "instanceType": str, "shmSize": str, "dockerArgs": str,
        "locations": list, "properties": object,
    },
    "services": {
        "*": {
            "jobServiceType": {"SSH", "TensorBoard", "JupyterLab", "VSCode", "Custom"},
            "nodes": {"nodesValueType": {"All"}}, "port": int, "endpoint": str, "properties": _TEXTS,
        }
    },
}  # fmt: skip
"""`properties` of a command job: field -> type, set of allowed words, or fields within; `*` stands for any name."""
_REQUIRED = ("jobType", "command", "environmentId")
_EXPRESSION = re.compile(r"\$\{\{\s*(?:inputs\.)?([A-Za-z0-9_.]+)\s*\}\}")


def check_body(body: Mapping[str, Any]) -> list[Finding]:
    """All that is wrong with a command job's REST body."""
    properties = body.get("properties")
    if not isinstance(properties, Mapping):
        return [SHAPE.found("the body has no `properties`")]
    wrong = [SHAPE.found(text) for text in _shape(properties, MODEL, "properties")]
    wrong += [SHAPE.found(f"properties.{name} is missing") for name in _REQUIRED if not properties.get(name)]
    return wrong or [*_values(properties), *_inputs(properties)]


def _shape(value: Any, model: Any, path: str) -> Iterator[str]:
    if isinstance(model, Mapping):
        if not isinstance(value, Mapping):
            yield f"{path} is not an object"
            return
        for key, inner in value.items():
            if key not in model and "*" not in model:
                yield f"{path}.{key} is not a field of the service's model"
            else:
                yield from _shape(inner, model.get(key, model.get("*")), f"{path}.{key}")
    elif isinstance(model, set):
        if value not in model:
            yield f"{path} is {value!r}; it takes {', '.join(sorted(model))}"
    elif not isinstance(value, model) or (model is int and isinstance(value, bool)):
        yield f"{path} is {value!r}, not {'a text' if model is str else f'of type {model.__name__}'}"


def _values(properties: Mapping[str, Any]) -> Iterator[Finding]:
    resources = properties.get("resources", {})
    count = resources.get("instanceCount", 1)
    if count < 1:
        yield NODES.found(f"resources.instanceCount is {count}")
    shm = resources.get("shmSize")
    if shm is not None and not re.fullmatch(r"[1-9]\d*[bkmg]", shm):
        yield SHM.found(f"resources.shmSize is `{shm}`")
    environment = properties["environmentId"]
    if not re.search(r"/versions/[^/]+$|^azureml:[^:/]+:[^:/]+$", environment):
        yield ENVIRONMENT.found(f"environmentId `{environment}` names no version")
    timeout = properties.get("limits", {}).get("timeout")
    if timeout is not None and not (DURATION.fullmatch(timeout) and seconds(timeout) > 0):
        yield TIMEOUT.found(f"limits.timeout is `{timeout}`")
    for name, value in properties.get("environmentVariables", {}).items():
        if not isinstance(value, str):
            yield VALUE.found(f"environmentVariables.{name} is {value!r}")
        elif "${{" in value:
            yield EXPRESSION.found(f"environmentVariables.{name} holds an expression of Azure ML")
    processes = properties.get("distribution", {}).get("processCountPerInstance", 1)
    starts = re.search(
        r"\b(torchrun|accelerate launch|deepspeed|isthmus\.core\.worker|start\.py)\b", properties["command"]
    )
    if processes != 1 and starts:
        yield LAUNCHER.found(f"processCountPerInstance is {processes}, and the command runs {starts[1]}")


def _inputs(properties: Mapping[str, Any]) -> Iterator[Finding]:
    inputs = properties.get("inputs", {})
    named = {match.removeprefix("inputs.") for match in _EXPRESSION.findall(properties["command"])}
    for name, entry in inputs.items():
        if str(entry.get("uri", "")).startswith(("wasbs://", "wasb://", "azureml:wasb")):
            yield WASBS.found(f"inputs.{name} is {entry['uri']}")
        if name not in named:
            yield UNUSED.found(f"inputs.{name} is not used in the command")
    outputs = properties.get("outputs", {})
    for name in sorted(named - set(inputs)):
        if not (name.startswith("outputs.") and name.removeprefix("outputs.") in outputs):
            yield UNKNOWN_INPUT.found(
                f"the command names ${{{{inputs.{name}}}}}, which the job does not have"
            )
