"""Training jobs for the SageMaker emulator: small requests, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import boto3

BUCKET = "emulated"
DATA = f"s3://{BUCKET}/data/"
GROUP = "/aws/sagemaker/TrainingJobs"


def channel(name: str, uri: str = DATA, mode: str = "File", **source: Any) -> dict[str, Any]:
    """An input channel."""
    place = {"S3DataType": "S3Prefix", "S3Uri": uri, **source}
    return {"ChannelName": name, "InputMode": mode, "DataSource": {"S3DataSource": place}}


def request(role: str, name: str, script: str = "true", **changes: Any) -> dict[str, Any]:
    """A CreateTrainingJob request that is accepted; top-level fields given replace its own.

    Args:
        script: for bash, the entry point. One that is longer than an argument may be (256 characters) goes to the bucket
            and comes back through a channel.
    """
    arguments = ["-c", script]
    if len(script) > 256:
        boto3.client("s3").put_object(Bucket=BUCKET, Key=f"scripts/{name}/run.sh", Body=script.encode())
        arguments = ["/opt/ml/input/data/script/run.sh"]
        channels = [*changes.get("InputDataConfig", []), channel("script", f"s3://{BUCKET}/scripts/{name}/")]
        changes = {**changes, "InputDataConfig": channels}
    return {
        "TrainingJobName": name,
        "RoleArn": role,
        "AlgorithmSpecification": {
            "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/team:1",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash"],
            "ContainerArguments": arguments,
            "MetricDefinitions": [{"Name": "loss", "Regex": r"loss=([0-9.]+)"}],
        },
        "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/out", "CompressionType": "NONE"},
        "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        **changes,
    }


def spot(runtime: int = 60, wait: int = 60) -> dict[str, Any]:
    """What makes a request one for managed spot training."""
    limits = {"MaxRuntimeInSeconds": runtime, "MaxWaitTimeInSeconds": wait}
    return {"EnableManagedSpotTraining": True, "StoppingCondition": limits}


def described(name: str) -> dict[str, Any]:
    """DescribeTrainingJob."""
    answer: dict[str, Any] = boto3.client("sagemaker").describe_training_job(TrainingJobName=name)
    return answer


def until_ended(name: str, limit_s: float = 30) -> dict[str, Any]:
    """DescribeTrainingJob of a job that has ended."""
    deadline = time.monotonic() + limit_s
    while (answer := described(name))["TrainingJobStatus"] not in ("Completed", "Failed", "Stopped"):
        assert time.monotonic() < deadline, f"{name} is still {answer['SecondaryStatus']}"
        time.sleep(0.05)
    return answer


def lines(name: str, host: str = "") -> Iterator[str]:
    """The log of a job so far, of all hosts or of one such as `algo-2`."""
    logs = boto3.client("logs")
    try:
        pages = logs.get_paginator("filter_log_events").paginate(
            logGroupName=GROUP, logStreamNamePrefix=f"{name}/{host}"
        )
        for page in pages:
            yield from (event["message"] for event in page["events"])
    except logs.exceptions.ResourceNotFoundException:
        return


def until_said(name: str, text: str, times: int = 1, limit_s: float = 30) -> None:
    """Waits until the text has appeared so many times in a job's log."""
    deadline = time.monotonic() + limit_s
    while sum(text in line for line in lines(name)) < times:
        assert time.monotonic() < deadline, f"{name} has not said {text!r}: {list(lines(name))[-5:]}"
        time.sleep(0.05)


def statuses(answer: dict[str, Any]) -> list[str]:
    """The secondary statuses that a job went through."""
    return [one["Status"] for one in answer["SecondaryStatusTransitions"]]


def keys(prefix: str) -> list[str]:
    """Keys of the bucket below a prefix."""
    listed = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [entry["Key"] for entry in listed.get("Contents", [])]
