"""A job as the SageMaker SDK's ModelTrainer, for teams that put training steps into SageMaker Pipelines.

Needs the SDK (`pip install 'sagemaker>=3.27'`), which isthmus itself never uses: it is a gigabyte.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from isthmus.backends import payload
from isthmus.backends.sagemaker.aws import Clients
from isthmus.backends.sagemaker.render import choose, render
from isthmus.backends.spec import Job
from isthmus.core.packaging import digest_of, file_name
from isthmus.core.recipe.dump import dump_recipe, recipe_data, recipe_hash
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory

ModelTrainer = Any
"""`sagemaker.train.ModelTrainer`; the SDK's types do not hold under strict."""


def to_model_trainer(job: Job, session: Any = None) -> ModelTrainer:
    """A ModelTrainer whose `train()` sends the request that `isthmus launch` would send.

    Writes the run directory and the job's files, since a step of a pipeline may run when nobody is there to do so. Run
    outside of a pipeline, the training job has the name that isthmus would give it, so that `isthmus status` and
    `isthmus logs` find it; a second `train()` is refused as a second job of that name is.

    Args:
        job: as prepared for the sagemaker backend.
        session: a `Session` or `PipelineSession` of the SDK; None makes one with the environment's credentials.

    Raises:
        UsageError: the SDK is not installed, or the recipe's own code is not in the run directory.
        StorageError: the run directory cannot be written.
    """
    if importlib.util.find_spec("sagemaker") is None:
        raise UsageError(
            "the ModelTrainer bridge needs the SageMaker SDK, which is not installed",
            hint="pip install 'sagemaker>=3.27'",
        )
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.training import configs
    from sagemaker.train import ModelTrainer as Base

    rendered = render(job)
    request: Any = rendered.request
    algorithm, resources = request["AlgorithmSpecification"], request["ResourceConfig"]

    class Trainer(Base):  # type: ignore[misc]
        """Starts our first process itself: behind the SDK's own script a SIGTERM would not reach it."""

        def _create_training_job_args(self, *words: Any, **named: Any) -> Any:
            made = super()._create_training_job_args(*words, **named)
            own = made.get("algorithm_specification")
            if own is not None:
                own.container_entrypoint = list(algorithm["ContainerEntrypoint"])
                own.container_arguments = list(algorithm["ContainerArguments"])
                made["training_job_name"] = rendered.job_id
            else:  # for a pipeline, which names its jobs
                made["AlgorithmSpecification"]["ContainerEntrypoint"] = algorithm["ContainerEntrypoint"]
                made["AlgorithmSpecification"]["ContainerArguments"] = algorithm["ContainerArguments"]
            return made

    if session is None:
        # A default bucket, or the SDK would ask STS at an address of its own, and make a bucket.
        bucket = job.run_uri.removeprefix("s3://").partition("/")[0]
        session = Session(boto_session=Clients(choose(job).region).session, default_bucket=bucket)
    _put(job, rendered)
    trainer = Trainer(
        sagemaker_session=session,
        role=request.get("RoleArn"),
        base_job_name=rendered.job_id,
        training_image=algorithm["TrainingImage"],
        training_input_mode=algorithm["TrainingInputMode"],
        compute=_compute(configs, request, resources),
        networking=_networking(configs, request),
        stopping_condition=_made(configs.StoppingCondition, request["StoppingCondition"]),
        output_data_config=_made(configs.OutputDataConfig, request["OutputDataConfig"]),
        checkpoint_config=_made(configs.CheckpointConfig, request.get("CheckpointConfig")),
        input_data_config=[_channel(configs, channel) for channel in request["InputDataConfig"]],
        environment=dict(request["Environment"]),
        tags=[configs.Tag(key=tag["Key"], value=tag["Value"]) for tag in request["Tags"]],
    )
    # The SDK fills in 30 GB where a machine has disks of its own.
    trainer.compute.volume_size_in_gb = resources.get("VolumeSizeInGB")
    trainer.with_metric_definitions(
        [_made(configs.MetricDefinition, one) for one in algorithm["MetricDefinitions"]]
    )
    if "RetryStrategy" in request:
        trainer.with_retry_strategy(_made(configs.RetryStrategy, request["RetryStrategy"]))
    if "InfraCheckConfig" in request:
        trainer.with_infra_check_config(_made(configs.InfraCheckConfig, request["InfraCheckConfig"]))
    return trainer


def _put(job: Job, rendered: Any) -> None:
    run = RunDirectory(job.run_uri)
    code = digest_of(job.recipe.code) if job.recipe.code is not None else None
    if job.recipe.code is not None and (code is None or run.read_file(file_name(code)) is None):
        raise UsageError(
            "the recipe's own code is not in the run directory",
            where=job.run_uri,
            hint="write the launch's package there first: run.write_file(launch.code.name, launch.code.data)",
        )
    facts = {"id": job.run_id, "name": job.recipe.name, "backend": job.backend, "job_ids": [rendered.job_id]}
    recipe = {"recipe": recipe_data(job.source), "recipe_hash": recipe_hash(job.source)}
    run.create(dump_recipe(job.recipe), {**facts, **recipe, "attempts": 0, "dataset_fingerprints": []})
    payload.put(rendered)


def _made(config: Any, values: Any) -> Any:
    """A config of the SDK from the service's own names; None of none."""
    return None if values is None else config(**{_snake(name): value for name, value in values.items()})


def _snake(name: str) -> str:
    """`MaxRuntimeInSeconds` -> `max_runtime_in_seconds`, `S3Uri` -> `s3_uri`, `VolumeSizeInGB` -> `volume_size_in_gb`."""
    import re

    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _compute(configs: Any, request: Any, resources: Any) -> Any:
    values = {_snake(name): value for name, value in resources.items() if name != "InstancePreferences"}
    if "InstancePreferences" in resources:
        from sagemaker.core.shapes import InstancePreference

        values["instance_preferences"] = [
            _made(InstancePreference, one) for one in resources["InstancePreferences"]
        ]
    return configs.Compute(**values, enable_managed_spot_training=request["EnableManagedSpotTraining"])


def _networking(configs: Any, request: Any) -> Any:
    vpc = request.get("VpcConfig", {})
    return configs.Networking(
        subnets=vpc.get("Subnets"),
        security_group_ids=vpc.get("SecurityGroupIds"),
        enable_network_isolation=request["EnableNetworkIsolation"],
        enable_inter_container_traffic_encryption=request["EnableInterContainerTrafficEncryption"],
    )


def _channel(configs: Any, channel: Any) -> Any:
    source = configs.S3DataSource(
        **{_snake(name): value for name, value in channel["DataSource"]["S3DataSource"].items()}
    )
    return configs.Channel(
        channel_name=channel["ChannelName"],
        input_mode=channel["InputMode"],
        compression_type=channel["CompressionType"],
        record_wrapper_type=channel["RecordWrapperType"],
        data_source=configs.DataSource(s3_data_source=source),
    )
