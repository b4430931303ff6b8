"""The request as Azure's own tools take it: the REST body, or the YAML of `az ml job create -f`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from isthmus.backends.spec import Rendered

SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
_MODES = {"ReadOnlyMount": "ro_mount", "Download": "download", "Direct": "direct"}
_IDENTITIES = {"Managed": "managed_identity", "UserIdentity": "user_identity", "AMLToken": "aml_token"}
_PRIORITIES = {1: "low", 2: "medium", 3: "high"}
_ARM = re.compile(
    r"/subscriptions/.+/workspaces/[^/]+/(?:computes/(?P<compute>[^/]+)"
    r"|environments/(?P<name>[^/]+)/versions/(?P<version>[^/]+))"
)
DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?")
"""ISO 8601, of the parts that a job's timeout has."""


def document(rendered: Rendered, format: Literal["json", "yaml"]) -> str:
    """One JSON object, the job's REST body; or the YAML form of the same job.

    The YAML is whole but for the job's own files, which `isthmus launch` puts into the run directory first; its image is
    written out, and registered by whoever submits it.
    """
    if format == "json":
        return json.dumps(rendered.request, indent=2, ensure_ascii=False) + "\n"
    head = (
        f"# az ml job create -f FILE --subscription {rendered.native['subscription']}"
        f" --resource-group {rendered.native['resource_group']} --workspace-name {rendered.native['workspace']}\n"
        "# `isthmus launch` puts the files of its input `isthmus` there first.\n"
    )
    return head + dump(yaml_form(rendered, inline_environment=True))


def yaml_form(rendered: Rendered, *, inline_environment: bool) -> dict[str, Any]:
    """The published command-job form.

    Args:
        inline_environment: write the image out, instead of naming the environment that `submit` registers.
    """
    body: Mapping[str, Any] = rendered.request["properties"]
    made: dict[str, Any] = {
        "$schema": SCHEMA,
        "type": "command",
        "name": rendered.job_id,
        "display_name": body["displayName"],
        "experiment_name": body["experimentName"],
        "tags": dict(body["tags"]),
        "command": body["command"],
        "environment": _environment(rendered, inline_environment),
    }
    if "computeId" in body:
        made["compute"] = short_id(body["computeId"])
    made["distribution"] = {
        "type": "pytorch",
        "process_count_per_instance": body["distribution"]["processCountPerInstance"],
    }
    names = {
        "instanceCount": "instance_count", "instanceType": "instance_type",
        "shmSize": "shm_size", "dockerArgs": "docker_args",
    }  # fmt: skip
    made["resources"] = {names[key]: value for key, value in body["resources"].items()}
    made["inputs"] = {
        name: {"type": entry["jobInputType"], "path": entry["uri"], "mode": _MODES[entry["mode"]]}
        for name, entry in body["inputs"].items()
    }
    made["environment_variables"] = dict(body["environmentVariables"])
    made["identity"] = {"type": _IDENTITIES[body["identity"]["identityType"]]}
    if "clientId" in body["identity"]:
        made["identity"]["client_id"] = body["identity"]["clientId"]
    made["limits"] = {"timeout": seconds(body["limits"]["timeout"])}
    if queue := body.get("queueSettings"):
        made["queue_settings"] = {
            **({"job_tier": queue["jobTier"].lower()} if "jobTier" in queue else {}),
            **({"priority": _PRIORITIES[queue["priority"]]} if "priority" in queue else {}),
        }
    if services := body.get("services"):
        made["services"] = {name: _service(entry) for name, entry in services.items()}
    return made


def short_id(arm_id: str) -> str:
    """`azureml:NAME` or `azureml:NAME:VERSION` of an ARM id, so that the YAML is good for any workspace."""
    match = _ARM.fullmatch(arm_id)
    if match is None:
        return arm_id
    return f"azureml:{match['compute'] or ':'.join((match['name'], match['version']))}"


def seconds(duration: str) -> int:
    """Of an ISO 8601 duration of days, hours, minutes and seconds."""
    match = DURATION.fullmatch(duration)
    assert match is not None, duration
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _environment(rendered: Rendered, inline: bool) -> Any:
    definition = rendered.files.get("environment.json")
    if definition is None or not inline:
        return short_id(rendered.request["properties"]["environmentId"])
    known = json.loads(definition)
    return {key: known[key] for key in ("image", "build") if key in known}


def _service(entry: Mapping[str, Any]) -> dict[str, Any]:
    if entry["jobServiceType"] == "SSH":
        return {"type": "ssh", "ssh_public_keys": entry["properties"]["sshPublicKeys"], "nodes": "all"}
    return {"type": "tensor_board", "log_dir": entry["properties"]["logDir"]}


def dump(form: Mapping[str, Any]) -> str:
    """YAML in block style. Every text is double-quoted, so that it means the same to any version of YAML."""
    lines: list[str] = []
    _write(form, "", lines)
    return "\n".join(lines) + "\n"


def _write(value: Mapping[str, Any], indent: str, lines: list[str]) -> None:
    for key, inner in value.items():
        name = key if re.fullmatch(r"\$?[a-z][a-z0-9_]*", key) and key not in _WORDS else _text(key)
        if isinstance(inner, Mapping) and inner:
            lines.append(f"{indent}{name}:")
            _write(inner, indent + "  ", lines)
        elif isinstance(inner, Mapping):
            lines.append(f"{indent}{name}: {{}}")
        else:
            lines.append(f"{indent}{name}: {_text(inner) if isinstance(inner, str) else json.dumps(inner)}")


_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def _text(value: str) -> str:
    """Double-quoted; what YAML's readers refuse to see is escaped."""
    out = ""
    for char in value:
        code = ord(char)
        if char in '"\\':
            out += "\\" + char
        elif char.isprintable() and code != 0xFEFF:
            out += char
        else:
            wide = "x%02x" if code < 0x100 else "u%04x" if code < 0x10000 else "U%08x"
            out += "\\" + wide % code
    return f'"{out}"'
