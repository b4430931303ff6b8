"""The Azure ML command job of a job, as the REST body. Pure and offline: no azure package is imported."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from typing import Any

from isthmus import __version__
from isthmus.backends import names
from isthmus.backends.azure.image import environment_of
from isthmus.backends.azure.inputs import PAYLOAD, DataInputs, data_inputs, mountable, uri_folder
from isthmus.backends.azure.provision import cluster_definition
from isthmus.backends.azure.settings import AzureSettings
from isthmus.backends.azure.target import LONGEST, Target, settings_of, target_of
from isthmus.backends.azure.variables import variables
from isthmus.backends.spec import Job, Rendered
from isthmus.core.recipe.dump import dump_recipe

_MARK = re.compile("\ue000([a-z0-9]+)\ue001")
_PRIORITIES = {"low": 1, "medium": 2, "high": 3}


def render(job: Job) -> Rendered:
    """The native request of a job, the same bytes for the same job.

    Raises:
        UsageError: the settings name no workspace, machine or image, or a place that Azure ML cannot reach.
    """
    from isthmus.backends import payload

    settings, target = settings_of(job), target_of(job)
    environment = environment_of(settings.environment, target.workspace)
    data = data_inputs(job.recipe, settings.storage_account)
    job_id = names.job_name(job.run_id, job.attempt, limit=names.AZURE_LIMIT, allowed=names.AZURE_ALLOWED)
    folder = payload.folder_uri(job.run_uri, job_id)
    command = _command(
        settings,
        target,
        payload.start_command(
            _marked(PAYLOAD),
            run_uri=job.run_uri,
            job_id=job_id,
            cluster="azureml",
            grace=settings.grace,
            places={name: _marked(name) for name in data.inputs},
        ),
    )
    files = {"recipe.yaml": dump_recipe(data.recipe), "start.py": payload.START}
    if environment.definition is not None:
        files["environment.json"] = environment.definition
    if target.sku.topology is not None:
        files[target.sku.topology] = _package_file(target.sku.topology)
    native: dict[str, Any] = {**target.workspace.to_json(), "region": target.region, "grace": settings.grace}
    if settings.wheels is not None:
        native["wheels"] = settings.wheels
    if target.compute is not None and settings.cluster.create:
        native["cluster"] = cluster_definition(job, target)
    return Rendered(
        backend=job.backend,
        run_id=job.run_id,
        run_uri=job.run_uri,
        job_id=job_id,
        request={
            "properties": {
                "jobType": "Command",
                "displayName": job_id,
                "experimentName": settings.experiment or job.recipe.name,
                "tags": _tags(job, settings),
                "command": command,
                "environmentId": environment.id,
                **({"computeId": target.compute_id} if target.compute_id else {}),
                # Our worker is the one process of a node, and starts torchrun itself.
                "distribution": {"distributionType": "PyTorch", "processCountPerInstance": 1},
                "resources": _resources(job, settings, target),
                "inputs": _inputs(folder, settings, data),
                "environmentVariables": variables(job, target),
                "identity": _identity(settings),
                "limits": {"jobLimitsType": "Command", "timeout": duration(timeout_of(settings, target))},
                **_queue(settings, target),
                **_services(job, settings),
            }
        },
        files=files,
        native=native,
    )


def timeout_of(settings: AzureSettings, target: Target) -> int:
    """Seconds, at least one: the service takes 0 for no limit at all."""
    return max(1, int(settings.timeout or LONGEST[target.interruptible]))


def duration(seconds: int) -> str:
    """ISO 8601 as the SDK writes it: 604800 -> `P7D`, 5400 -> `PT1H30M`."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    time = "".join(
        f"{number}{unit}" for number, unit in ((hours, "H"), (minutes, "M"), (rest, "S")) if number
    )
    return "P" + (f"{days}D" if days else "") + (f"T{time}" if time else "")


def quoted(argument: str) -> str:
    """For the shell, and past Azure ML: what the user wrote is no `${{expression}}` of its, nor the SDK's `{inputs.x}`."""
    pieces, last = [], 0
    for match in _MARK.finditer(argument):
        pieces += [_literal(argument[last : match.start()]), f'"${{{{inputs.{match[1]}}}}}"']
        last = match.end()
    return "".join([*pieces, _literal(argument[last:])]) or "''"


def _literal(text: str) -> str:
    # `{` is always within single quotes here: they are closed and opened again behind it.
    return shlex.quote(text).replace("{", "{''") if text else ""


def _marked(name: str) -> str:
    return f"\ue000{name}\ue001"


def _command(settings: AzureSettings, target: Target, start: list[str]) -> str:
    """Exec'ed, so that the signals of an eviction reach the worker and not a shell."""
    command = "exec " + " ".join(quoted(argument) for argument in start)
    if target.sku.topology is not None:
        # Not among the environment variables, where Azure ML expands no expression.
        command = f"export NCCL_TOPO_FILE={quoted(_marked(PAYLOAD) + '/' + target.sku.topology)}; {command}"
    if settings.mscclpp is not None:
        library = quoted(settings.mscclpp.library)
        lacks = quoted(f"error: this image has no {settings.mscclpp.library} (backends.azure.mscclpp)")
        command = f"[ -f {library} ] || {{ echo {lacks} >&2; exit 2; }}; {command}"
    return command


def _package_file(name: str) -> str:
    return resources.files("isthmus.backends.azure").joinpath(name).read_text(encoding="utf-8")


def _tags(job: Job, settings: AzureSettings) -> dict[str, str]:
    own = {
        "isthmus-run": job.run_id,
        "isthmus-run-uri": job.run_uri,
        "isthmus-attempt": str(job.attempt),
        "isthmus-name": job.recipe.name,
        "isthmus-version": __version__,
        "isthmus-grace": f"{settings.grace:g}",
    }
    return dict(sorted({**settings.tags, **own}.items()))


def _resources(job: Job, settings: AzureSettings, target: Target) -> dict[str, Any]:
    arguments = ["--ulimit memlock=-1"] if settings.memlock else []
    arguments += settings.docker_args
    made: dict[str, Any] = {
        "instanceCount": job.recipe.compute.nodes,
        "shmSize": f"{-(-settings.shm_size // 2**20)}m",
    }
    if arguments:
        made["dockerArgs"] = " ".join(arguments)
    if target.compute is None:
        made["instanceType"] = target.sku.name
    return made


def _inputs(folder: str, settings: AzureSettings, data: DataInputs) -> dict[str, dict[str, str]]:
    own = uri_folder(mountable(folder, settings.storage_account, "run_directory"), "Download")
    return {PAYLOAD: own, **data.inputs}


def _identity(settings: AzureSettings) -> dict[str, str]:
    if settings.identity == "user":
        return {"identityType": "UserIdentity"}
    made = {"identityType": "Managed"}
    if settings.client_id is not None:
        made["clientId"] = settings.client_id
    return made


def _queue(settings: AzureSettings, target: Target) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if target.interruptible and target.compute is None:
        made["jobTier"] = "Spot"
    elif settings.queue is not None and settings.queue.tier is not None:
        made["jobTier"] = settings.queue.tier.capitalize()
    if settings.queue is not None and settings.queue.priority is not None:
        made["priority"] = _PRIORITIES[settings.queue.priority]
    return {"queueSettings": made} if made else {}


def _services(job: Job, settings: AzureSettings) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if settings.ssh is not None:
        made["ssh"] = {
            "jobServiceType": "SSH",
            "nodes": {"nodesValueType": "All"},
            "properties": {"sshPublicKeys": settings.ssh.public_key},
        }
    if settings.tensorboard is not None:
        folder = settings.tensorboard.log_dir or f"{job.run_uri.rstrip('/')}/tensorboard"
        made["tensorboard"] = {"jobServiceType": "TensorBoard", "properties": {"logDir": folder}}
    return {"services": made} if made else {}
