"""A training job as the service tells of it: request, status, its course so far."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from isthmus.emulators.hosts import Host
from isthmus.emulators.sagemaker.requests import is_spot
from isthmus.emulators.sagemaker.shapes import members

BEGINNINGS = frozenset({"Starting", "Pending", "Downloading", "Training", "Interrupted", "Restarting"})
ENDED = frozenset({"Completed", "Failed", "Stopped"})
SPOT_SHARE = 0.3
"""What of a spot instance's training time is billed: managed spot tells its discount as less billable time."""
FLAGS = ("EnableNetworkIsolation", "EnableInterContainerTrafficEncryption", "EnableManagedSpotTraining")
SUMMARY = [
    "TrainingJobName",
    "TrainingJobArn",
    "CreationTime",
    "TrainingEndTime",
    "LastModifiedTime",
    "TrainingJobStatus",
    "SecondaryStatus",
    "WarmPoolStatus",
    "TrainingPlanArn",
]


@dataclass(slots=True)
class WarmPool:
    """Instances kept after a job has ended."""

    until: float
    """Seconds since 1970."""
    since: float
    reused_by: str | None = None


@dataclass(slots=True, eq=False)
class TrainingJob:
    """One job. Its course runs in a thread of its own; everything here is read and written under `lock`."""

    request: dict[str, Any]
    arn: str
    region: str
    created: float = field(default_factory=time.time)
    tags: list[dict[str, str]] = field(default_factory=list)
    status: str = "InProgress"
    secondary: str = "Starting"
    transitions: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    selected: tuple[str, int] | None = None
    """Instance type and count of the current or last attempt."""
    started: float | None = None
    ended: float | None = None
    trained: float = 0.0
    """Seconds of training over the attempts that have ended."""
    training_since: float | None = None
    hosts: list[Host] = field(default_factory=list)
    attempts: int = 0
    stop_asked: bool = False
    interrupted: bool = False
    """The current attempt's instances are being taken away."""
    lost: bool = False
    """A machine of the current attempt has died."""
    warm_pool: WarmPool | None = None
    modified: float = field(default_factory=time.time)
    notes: list[str] = field(default_factory=list)
    """What the emulation could not do as the service does."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def name(self) -> str:
        """TrainingJobName."""
        return str(self.request["TrainingJobName"])

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.status in ENDED

    def move(self, secondary: str, message: str, status: str | None = None) -> None:
        """The next transition; one with the same word only gets a new message. A job that is being stopped begins nothing."""
        with self.lock:
            if self.stop_asked and secondary in BEGINNINGS:
                return
            now = self.modified = time.time()
            if self.transitions and self.transitions[-1]["Status"] == secondary:
                self.transitions[-1]["StatusMessage"] = message
            else:
                if self.transitions:
                    self.transitions[-1]["EndTime"] = now
                self.transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": message})
            self.secondary = secondary
            self.status = status or self.status
            if self.over:
                self.ended = now
                self.trained, self.training_since = self.seconds(now), None
                self.transitions[-1]["EndTime"] = now

    def seconds(self, now: float) -> float:
        """Of training, over all attempts."""
        running = now - self.training_since if self.training_since is not None else 0.0
        return self.trained + running

    def describe(self) -> dict[str, Any]:
        """DescribeTrainingJob: all that was asked for, and how it is now. Times are seconds since 1970."""
        with self.lock:
            answer = {key: copy.deepcopy(value) for key, value in self.request.items() if key != "Tags"}
            answer |= {
                "TrainingJobArn": self.arn,
                "TrainingJobStatus": self.status,
                "SecondaryStatus": self.secondary,
                "SecondaryStatusTransitions": copy.deepcopy(self.transitions),
                "CreationTime": self.created,
                "LastModifiedTime": self.modified,
                "FinalMetricDataList": list(self.metrics.values()),
                "ModelArtifacts": {"S3ModelArtifacts": self.artifacts()},
            }
            answer["StoppingCondition"] = {
                "MaxRuntimeInSeconds": 86400,
                **answer.get("StoppingCondition", {}),
            }
            for key in FLAGS:
                answer.setdefault(key, False)
            if self.selected and "InstancePreferences" in answer.get("ResourceConfig", {}):
                kind, count = self.selected
                answer["ResourceConfig"] |= {"SelectedInstanceType": kind, "SelectedInstanceCount": count}
            if self.failure:
                answer["FailureReason"] = self.failure
            if self.started is not None:
                seconds = int(self.seconds(time.time()))
                answer["TrainingStartTime"] = self.started
                answer["TrainingTimeInSeconds"] = seconds
                share = SPOT_SHARE if is_spot(self.request) else 1.0
                answer["BillableTimeInSeconds"] = int(seconds * share)
            if self.ended is not None:
                answer["TrainingEndTime"] = self.ended
            if pool := self.pool_status():
                answer["WarmPoolStatus"] = pool
            known = members("DescribeTrainingJob")
            return {key: value for key, value in answer.items() if key in known}

    def summary(self) -> dict[str, Any]:
        """One entry of ListTrainingJobs."""
        described = self.describe()
        plan = described.get("ResourceConfig", {}).get("TrainingPlanArn")
        described |= {"TrainingPlanArn": plan} if plan else {}
        return {key: described[key] for key in SUMMARY if key in described}

    def artifacts(self) -> str:
        """Where the model goes."""
        output = self.request["OutputDataConfig"]
        plain = output.get("CompressionType") == "NONE"
        return f"{output['S3OutputPath'].rstrip('/')}/{self.name}/output/model{'/' if plain else '.tar.gz'}"

    def pool_status(self) -> dict[str, Any] | None:
        """WarmPoolStatus; None for a job that keeps no instances."""
        if not self.request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds"):
            return None
        pool = self.warm_pool
        if pool is None:
            return {"Status": "InUse"}
        if pool.reused_by:
            return {"Status": "Reused", "ReusedByJob": pool.reused_by}
        now = time.time()
        retained = int(min(now, pool.until) - pool.since)
        status = "Available" if now < pool.until else "Terminated"
        return {"Status": status, "ResourceRetainedBillableTimeInSeconds": max(retained, 0)}
