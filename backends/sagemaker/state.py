"""SageMaker's words for a job, in ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from isthmus.backends.sagemaker.metrics import EFA_NICS
from isthmus.backends.settle import NativeState
from isthmus.backends.spec import Metered, State

ENDED = frozenset({"Completed", "Failed", "Stopped"})
_EXIT = re.compile(r"exit ?code:?\s*(\d+)", re.IGNORECASE)
_CLOUDS_OWN = re.compile(
    r"^\W*(CapacityError|InternalServerError|InsufficientCapacity\w*|ResourceLimitExceeded)\b", re.IGNORECASE
)
"""Reasons of a failure that is not the job's: another submission may do better."""
_LIMITS = {
    "MaxRuntimeExceeded": "it ran for as long as max_runtime allows",
    "MaxWaitTimeExceeded": "it waited and ran for as long as max_wait allows",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What SageMaker says of a job."""

    native: NativeState
    cause: str | None = None
    exit_code: int | None = None
    """Of the container that failed."""
    detail: str | None = None


def of(job: Mapping[str, Any]) -> Seen:
    """From DescribeTrainingJob's answer."""
    status, secondary = str(job.get("TrainingJobStatus")), str(job.get("SecondaryStatus", ""))
    reason = " ".join(str(job.get("FailureReason") or "").split()) or None
    if status == "Completed":
        return Seen("finished", detail=secondary)
    if status == "Failed":
        code = _EXIT.search(reason or "")
        native: NativeState = "interrupted" if _CLOUDS_OWN.search(reason or "") else "failed"
        return Seen(native, reason, int(code[1]) if code else None, secondary)
    if status == "Stopped":
        if secondary in _LIMITS:
            return Seen("interrupted", _LIMITS[secondary], detail=secondary)
        return Seen("stopped", reason, detail=secondary)
    if status == "Stopping":
        return Seen("running", detail="Stopping")
    if status != "InProgress":
        return Seen("unknown", detail=status)
    detail = _said(job, secondary)
    if secondary in ("Training", "Uploading"):
        return Seen("running", detail=_without_efa(job) or detail)
    before = {str(step.get("Status")) for step in job.get("SecondaryStatusTransitions", ())}
    again = secondary in ("Interrupted", "Restarting") or before & {"Interrupted", "Restarting"}
    return Seen("restarting" if again else "pending", detail=detail)


def metered(job: Mapping[str, Any]) -> Metered | None:
    """BillableTimeInSeconds and TrainingTimeInSeconds, as far as SageMaker tells them; None before training began.

    `1 - billable / training` is what managed spot saves, in SageMaker's own words: billable seconds are of the price on
    demand. Both are wall-clock, to be multiplied by the number of instances.
    """
    billable, trained = job.get("BillableTimeInSeconds"), job.get("TrainingTimeInSeconds")
    if not isinstance(trained, int | float):
        begun, ended = job.get("TrainingStartTime"), job.get("TrainingEndTime")
        if not isinstance(begun, datetime):
            return None
        until = ended if isinstance(ended, datetime) else datetime.now(begun.tzinfo)
        trained = max(0.0, (until - begun).total_seconds())
    told = float(billable) if isinstance(billable, int | float) else None
    return Metered(seconds=float(trained), billable_s=told)


def listed(job: Mapping[str, Any]) -> State:
    """As a list shows it, without the run directory: how it ended is not known better than this."""
    seen = of(job)
    if seen.native == "interrupted" or seen.exit_code == 75:
        return "preempted"
    return seen.native


def _said(job: Mapping[str, Any], secondary: str) -> str:
    """The newest status, with SageMaker's message for it."""
    steps = job.get("SecondaryStatusTransitions") or ()
    message = " ".join(str(steps[-1].get("StatusMessage") or "").split()) if steps else ""
    return f"{secondary}: {message}" if message and message != secondary else secondary


def _without_efa(job: Mapping[str, Any]) -> str | None:
    """A warning when training has begun and NCCL has not said that it found EFA; the request asks for that line."""
    asked = {one.get("Name") for one in job.get("AlgorithmSpecification", {}).get("MetricDefinitions", ())}
    measured = {one.get("MetricName") for one in job.get("FinalMetricDataList", ())}
    if EFA_NICS in asked and "train:step" in measured and EFA_NICS not in measured:
        return "Training, but NCCL has not said that it uses EFA: gradients may cross sockets"
    return None
