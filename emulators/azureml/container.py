"""What Azure ML puts into a container: its command, with the paths of inputs and outputs, and its environment."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.emulators.azureml.checks_job import REFERENCE
from isthmus.emulators.azureml.world import Job, World
from isthmus.emulators.image import Image


def install(image: Image, folder: Path) -> dict[str, str]:
    """The image's own variables, with a PATH on which `python` and `python3` are the image's; both are written into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3"):
        script = folder / name
        # Not a link: a virtual environment is found from the path that is called.
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(image.python)} "$@"\n')
        script.chmod(0o755)
    variables = image.environment()
    return {**variables, "PATH": f"{folder}:{variables['PATH']}"}


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Paths (or literal values) of a job's inputs and outputs on one node."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def expand(command: str, ports: Ports) -> str:
    """The command with each ${{inputs.x}} and ${{outputs.x}} replaced."""

    def found(match: Any) -> str:
        name, _, below = match["name"].partition(".")
        value = (ports.inputs if match["kind"] == "inputs" else ports.outputs)[name]
        return f"{value}/{below}" if below and below != "path" else value

    return REFERENCE.sub(found, command)


def processes_per_node(job: Job) -> int:
    """Processes that Azure ML starts on each node."""
    return int((job.properties.get("distribution") or {}).get("processCountPerInstance") or 1)


def log_name(job: Job, rank: int) -> str:
    """The log of a process among the run's artifacts; numbers have as many digits as the last one."""
    world = job.nodes * processes_per_node(job)
    if job.properties.get("distribution") is None:
        return "user_logs/std_log.txt" if rank == 0 else f"user_logs/std_log_{rank}.txt"
    return f"user_logs/std_log_process_{rank:0{len(str(world - 1))}d}.txt"


def environment(
    world: World,
    job: Job,
    *,
    node: int,
    local_rank: int,
    master: tuple[str, int],
    hosts: list[str],
    ports: Ports,
) -> dict[str, str]:
    """What Azure ML sets for one process; the job's own variables do not override it."""
    processes = processes_per_node(job)
    size = job.nodes * processes
    address, port = master
    found = {
        "AZUREML_RUN_ID": job.name,
        "AZUREML_ROOT_RUN_ID": job.name,
        "AZUREML_NODE_COUNT": str(job.nodes),
        "AZUREML_ARM_SUBSCRIPTION": world.subscription,
        "AZUREML_ARM_RESOURCEGROUP": world.resource_group,
        "AZUREML_ARM_WORKSPACE_NAME": world.workspace,
        "AZUREML_ARM_PROJECT_NAME": str(job.properties.get("experimentName") or "Default"),
        "AZUREML_EXPERIMENT_SCOPE": f"{world.path}/experiments/{job.properties.get('experimentName') or 'Default'}",
        "AZUREML_WORKSPACE_ID": world.workspace_id,
        "AZUREML_WORKSPACE_SCOPE": world.path,
        "AZUREML_COMPUTE": job.compute or "serverless",
        "AZ_BATCHAI_JOB_NAME": job.name,
        "AZ_BATCHAI_JOB_MASTER_NODE_IP": address,
        "AZ_BATCHAI_NUM_GPUS": str(job.sku.gpus),
        "AZ_BATCHAI_WORKER_HOSTS": ",".join(hosts),
        "AZ_BATCH_MASTER_NODE": f"{address}:{port}",
        "AZ_BATCH_NODE_LIST": ";".join(hosts),
        "AZ_BATCH_HOST_LIST": ",".join(hosts),
        "AZ_BATCH_IS_CURRENT_NODE_MASTER": "true" if node == 0 else "false",
        "AZ_BATCH_NODE_ID": f"tvmps_{node:04d}_{'p' if job.low_priority else 'd'}",
        "NODE_RANK": str(node),
    }
    if job.properties.get("distribution") is not None:
        found |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "RANK": str(node * processes + local_rank),
            "LOCAL_RANK": str(local_rank),
        }
    found |= {f"AZURE_ML_INPUT_{name}": value for name, value in ports.inputs.items()}
    found |= {f"AZURE_ML_OUTPUT_{name}": value for name, value in ports.outputs.items()}
    return found
