"""What the service checks before it takes a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from isthmus.emulators.azureml.checks_resources import compute_of, identity_of, limits_of
from isthmus.emulators.azureml.places import asset, find_place, in_registry
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.world import Job, World

JOB_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}")
PORT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
REFERENCE = re.compile(r"\$\{\{\s*(?P<kind>\w+)\.(?P<name>[^}\s]+?)\s*\}\}")
INPUT_TYPES = ("uri_folder", "uri_file", "mltable", "literal", "custom_model", "mlflow_model", "triton_model")
INPUT_MODES = ("ReadOnlyMount", "Download", "Direct", "EvalMount", "EvalDownload", "ReadWriteMount")
OUTPUT_TYPES = ("uri_folder", "uri_file", "mltable", "custom_model", "mlflow_model", "triton_model")
OUTPUT_MODES = ("ReadWriteMount", "Upload", "Direct")
MAY_CHANGE = ("tags", "displayName", "description", "isArchived", "services", "properties", "status")
"""Of a job that exists."""


def job_of(name: str, body: Any, world: World, *, endpoint: str) -> Job:
    """The job that a PUT asks for.

    Raises:
        Refused: by a rule named job-... or serverless-...
    """
    if not JOB_NAME.fullmatch(name):
        raise refuse("job-name", f"The job name {name!r} is invalid")
    properties = body.get("properties") if isinstance(body, dict) else None
    if not isinstance(properties, dict):
        raise refuse("body", "properties is required")
    if properties.get("jobType") != "Command":
        raise refuse("job-type", f"jobType {properties.get('jobType')!r} is not Command")
    for field in ("tags", "properties"):
        _check_strings(properties.get(field), "job-tags", field)
    _check_strings(
        properties.get("environmentVariables"), "job-environment-variables", "environmentVariables"
    )
    cluster, sku, low, nodes = compute_of(properties, world)
    _check_environment(properties, world)
    _check_code(properties, world)
    _check_ports(properties, world, endpoint)
    _check_command(properties)
    limits_of(properties, low_priority=low)
    identity_of(properties, serverless=cluster is None)
    return Job(name=name, properties=properties, low_priority=low, nodes=nodes, compute=cluster, sku=sku)


def change(job: Job, body: Any) -> None:
    """What a second PUT of a name changes.

    Raises:
        Refused: it is another job.
    """
    new = body.get("properties") if isinstance(body, dict) else None
    if not isinstance(new, dict):
        raise refuse("body", "properties is required")
    for field in sorted(set(new) | set(job.properties)):
        if field not in MAY_CHANGE and _meant(new.get(field)) != _meant(job.properties.get(field)):
            raise refuse(
                "job-exists",
                "A job with this name already exists. If you are trying to submit a new job, use a different name. If you are "
                f"trying to update an existing job, the existing job's {field} cannot be changed. [name: {job.name}]",
            )
    job.properties |= {field: new[field] for field in MAY_CHANGE if field in new and field != "status"}


def _meant(value: Any) -> Any:
    """Absent, null and empty are the same to the service."""
    if isinstance(value, dict):
        return {key: kept for key, inner in value.items() if (kept := _meant(inner)) is not None} or None
    return value if value not in ([], "", False) else None


def _check_strings(value: Any, rule: str, field: str) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise refuse(rule, f"{field} is not a map")
    for key, text in value.items():
        if not isinstance(text, str) and not (text is None and rule == "job-tags"):
            raise refuse(rule, f"Error converting value {text!r} of {field}.{key} to type 'System.String'")


def _check_environment(properties: Mapping[str, Any], world: World) -> None:
    text = properties.get("environmentId")
    if not isinstance(text, str) or not text:
        raise refuse("job-environment", "environmentId is required")
    if in_registry(text):
        return
    found = asset(text, "environments")
    if found is None or found[1] is None:
        raise refuse("job-environment", f"environmentId {text!r} names no environment with its version")
    if found[1] == "@latest" and any(name == found[0] for name, _ in world.environments):
        return
    if (found[0], found[1]) not in world.environments:
        raise refuse("job-environment", f"Could not find environment {found[0]} of version {found[1]}")


def _check_code(properties: Mapping[str, Any], world: World) -> None:
    text = properties.get("codeId")
    if text is None:
        return
    found = asset(str(text), "codes")
    if found is None or (found[0], found[1] or "") not in world.codes:
        raise refuse("job-code", f"Could not find code {text!r}")


def _check_ports(properties: Mapping[str, Any], world: World, endpoint: str) -> None:
    """Inputs and outputs."""
    for side, rule in (("inputs", "job-input"), ("outputs", "job-output")):
        ports = properties.get(side) or {}
        if not isinstance(ports, dict):
            raise refuse(rule, f"{side} is not a map")
        for name, port in ports.items():
            if not PORT_NAME.fullmatch(name):
                raise refuse("job-input-name", f"{side}.{name} is an invalid name")
            if not isinstance(port, dict):
                raise refuse(rule, f"{side}.{name} is not an object")
            if side == "inputs":
                _check_input(name, port, world, endpoint)
            else:
                _check_output(name, port, world, endpoint)


def _check_input(name: str, port: Mapping[str, Any], world: World, endpoint: str) -> None:
    kind, mode = port.get("jobInputType"), port.get("mode")
    if kind not in INPUT_TYPES:
        raise refuse(
            "job-input", f"inputs.{name}: jobInputType {kind!r} is not one of {', '.join(INPUT_TYPES)}"
        )
    if kind == "literal":
        if not isinstance(port.get("value"), str) or mode is not None:
            raise refuse("job-input", f"inputs.{name}: a literal has a string value and no mode")
        return
    if mode is not None and mode not in INPUT_MODES:
        raise refuse("job-input", f"inputs.{name}: mode {mode!r} is not one of {', '.join(INPUT_MODES)}")
    if not isinstance(port.get("uri"), str) or not port["uri"]:
        raise refuse("job-input", f"inputs.{name}: uri is required")
    if mode != "Direct":
        find_place(port["uri"], world, endpoint=endpoint, rule="job-input")


def _check_output(name: str, port: Mapping[str, Any], world: World, endpoint: str) -> None:
    kind, mode = port.get("jobOutputType"), port.get("mode")
    if kind not in OUTPUT_TYPES:
        raise refuse(
            "job-output", f"outputs.{name}: jobOutputType {kind!r} is not one of {', '.join(OUTPUT_TYPES)}"
        )
    if mode is not None and mode not in OUTPUT_MODES:
        raise refuse("job-output", f"outputs.{name}: mode {mode!r} is not one of {', '.join(OUTPUT_MODES)}")
    if port.get("uri") and find_place(port["uri"], world, endpoint=endpoint, rule="job-output") is None:
        raise refuse("job-output", f"outputs.{name}: no permission to write to {port['uri']}")


def _check_command(properties: Mapping[str, Any]) -> None:
    command = properties.get("command")
    if not isinstance(command, str) or not command.strip():
        raise refuse("job-command", "command is required")
    for match in REFERENCE.finditer(command):
        ports = properties.get(match["kind"]) or {}
        # A file below a folder may be meant: ${{inputs.data.path}}.
        name = match["name"].partition(".")[0]
        if match["kind"] not in ("inputs", "outputs", "search_space") or name not in ports:
            raise refuse(
                "job-command-input", f"The command refers to {match[0]}, which the job does not define"
            )
