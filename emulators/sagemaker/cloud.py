"""The emulator: a SageMaker account of one region (others answer, too) on this machine, for as long as it is open."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from isthmus.emulators import namespaces
from isthmus.emulators.faults import Faults
from isthmus.emulators.hosts import HostInfo, Privileges
from isthmus.emulators.image import Image, find_image
from isthmus.emulators.sagemaker import course
from isthmus.emulators.sagemaker.capacity import Capacity
from isthmus.emulators.sagemaker.errors import ServiceError, ValidationException
from isthmus.emulators.sagemaker.job import TrainingJob
from isthmus.emulators.sagemaker.permissions import Denied
from isthmus.emulators.sagemaker.quotas import Quotas
from isthmus.emulators.sagemaker.requests import is_spot
from isthmus.emulators.sagemaker.server import Front, Listener
from isthmus.emulators.sagemaker.service import Service
from isthmus.emulators.sagemaker.site import ACCOUNT, KEYS, Site, Times
from isthmus.errors import UsageError

ROLE = "isthmus-training"
TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
_open = threading.Lock()
"""moto's state belongs to the process: one emulator at a time in each."""
log = logging.getLogger(__name__)


class SageMakerEmulator:
    """Use as a context manager; closing it ends all jobs.

    Args:
        folder: for the hosts' files; the emulator's own.
        images: a training image's name, or a pattern -> what stands for it here.
        privileges: `namespaces`, `processes`, or `auto`: namespaces where they can be had. `note` says what is missing.
        region: of `environment`.
        grace: seconds from SIGTERM to SIGKILL; the service's 120 unless told.
        start_delay: seconds until instances are ready.
        restart_delay: seconds from an interruption until instances are looked for again.
        patience: seconds that an on-demand job waits for capacity before its CapacityError.
        jobs_at_once: further ones wait as if for capacity.
        port: of the endpoint; 0 for a free one.

    Raises:
        UsageError: namespaces were asked for and cannot be had, or another emulator is open in this process.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        images: Mapping[str, Image] | None = None,
        privileges: Privileges | Literal["auto"] = "auto",
        region: str = "us-east-1",
        grace: float = 120.0,
        start_delay: float = 0.0,
        restart_delay: float = 0.5,
        patience: float = 3600.0,
        jobs_at_once: int = 8,
        port: int = 0,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.region = region
        self.images = dict(images) if images is not None else {"*": Image()}
        self.quota = Quotas()
        self.capacity = Capacity()
        self.denied = Denied()
        """Actions that the job's role may not do, as patterns: `s3:ListBucket`, `s3:Put*`."""
        self.role = f"arn:aws:iam::{ACCOUNT}:role/{ROLE}"
        """A role that exists."""
        lacking = namespaces.missing()
        if privileges == "namespaces" and lacking:
            raise UsageError(f"hosts cannot be namespaces here: {lacking}", hint="use privileges='processes'")
        self.privileges: Privileges = "processes" if privileges == "processes" or lacking else "namespaces"
        no_fuse = namespaces.can_mount() if self.privileges == "namespaces" else "no mounts"
        self.note = self._note(lacking, no_fuse)
        """What this emulation cannot do as the service does, in one line; empty for nothing."""
        if not _open.acquire(blocking=False):
            raise UsageError("another SageMaker emulator is open in this process", hint="close it first")
        try:
            self.faults = Faults()
            self._closing = threading.Event()
            self._threads: list[threading.Thread] = []
            times = Times(grace=grace, start=start_delay, restart=restart_delay, patience=patience)
            self._open(times, jobs_at_once, port, no_fuse is None)
        except BaseException:
            _open.release()
            raise

    def _open(self, times: Times, jobs_at_once: int, port: int, fuse: bool) -> None:
        from moto.moto_api._internal import moto_api_backend

        moto_api_backend.reset()  # nothing of an emulator that was open before
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        if self.privileges == "namespaces":
            for name in namespaces.sweep():
                log.info("removed the network %s of an emulator that was killed", name)
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / "jobs", ignore_errors=True)
        self._service = Service(self, self.quota, self._begin)
        front = Front(
            faults=self.faults,
            denied=self.denied,
            region=self.region,
            sagemaker=self._service.answer,
            quotas=self._quotas,
            control=self._control,
            streams=self._streams,
        )
        # Job machinery has an endpoint of its own, so that faults meet clients only.
        self._inner = Listener(front.moto, "127.0.0.1")
        self._outer = Listener(front, "127.0.0.1", port)
        self.endpoint = self._outer.url
        self._site = Site(
            folder=self.folder,
            images=self.images,
            privileges=self.privileges,
            fuse=fuse,
            times=times,
            capacity=self.capacity,
            client=self.client,
            inner_url=self._inner.url,
            outer_url=self._outer.url,
            listen=functools.partial(Listener, front),
            slots=threading.BoundedSemaphore(jobs_at_once),
            closing=self._closing,
        )
        iam = self.client("iam", self.region)
        iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=json.dumps(TRUST))

    @staticmethod
    def _note(lacking: str | None, no_fuse: str | None) -> str:
        if lacking:
            return f"hosts are plain processes on loopback addresses ({lacking}): no PID 1, no mounts, no network isolation"
        return f"Fast file mode is a read-only copy ({no_fuse})" if no_fuse else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all jobs at once, and the endpoint."""
        if self._closing.is_set():
            return
        self._closing.set()
        for thread in self._threads:
            thread.join(30)
        self._outer.close()
        self._inner.close()
        _open.release()

    # What a test or a rehearsal does to the cloud.

    def environment(self) -> dict[str, str]:
        """What a client's process needs in its environment."""
        nowhere = self.folder / "no-profile"
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEYS[0],
            "AWS_SECRET_ACCESS_KEY": KEYS[1],
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            # A developer's own profile must not reach a client of the emulator, nor the other way round.
            "AWS_SHARED_CREDENTIALS_FILE": str(nowhere),
            "AWS_CONFIG_FILE": str(nowhere),
        }

    def state(self, job: str) -> str:
        """TrainingJobStatus/SecondaryStatus, such as "InProgress/Training". Raises UsageError for an unknown job."""
        found = self._find(job)
        with found.lock:
            return f"{found.status}/{found.secondary}"

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs as DescribeTrainingJob tells of them, in the order in which they came."""
        return [job.describe() for job in self._service.of()]

    def hosts(self, job: str) -> list[HostInfo]:
        """The hosts of the attempt that runs; none when none does."""
        found = self._find(job)
        with found.lock:
            hosts = list(found.hosts)
        told = []
        for host in hosts:
            code = host.poll()
            told.append(
                HostInfo(
                    name=host.name, address=host.address, pid=host.pid, alive=code is None, exit_code=code
                )
            )
        return told

    def evict(self, job: str) -> None:
        """A spot interruption: SIGTERM, grace, SIGKILL; then the service restarts the job as long as MaxWait allows.

        Raises:
            UsageError: the job is not a spot job, or does not run.
        """
        found = self._running(job)
        if not is_spot(found.request):
            raise UsageError(
                f"{job} is no spot job: the service does not interrupt it",
                hint="kill_node is what happens to on-demand instances",
            )
        found.interrupted = True

    def kill_node(self, job: str, node: int) -> None:
        """A machine that dies: every process on host `node` (from 0) is killed, and it is off the network.

        The service says InternalServerError, and retries as far as the RetryStrategy goes.

        Raises:
            UsageError: the job does not run, or has no such host.
        """
        found = self._running(job)
        with found.lock:
            if not 0 <= node < len(found.hosts):
                raise UsageError(f"{job} has hosts 0 to {len(found.hosts) - 1}, not {node}")
            found.lost = True
            found.hosts[node].kill()

    def fail_next(self, operation: str, how: str | int, times: int = 1) -> None:
        """The next requests of an operation (`*`: any; S3's are named `s3:GET`, `s3:PUT`, ...) fail.

        Args:
            how: an error code such as ThrottlingException or SlowDown, an HTTP status, `drop-before` or `drop-after`:
                the connection closes before or after the operation's effect.
        """
        self.faults.add(operation, how, times)

    def bucket(self, name: str, region: str | None = None) -> str:
        """Makes a bucket; its URI, s3://name."""
        region = region or self.region
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        self.client("s3", region).create_bucket(Bucket=name, **place)
        return f"s3://{name}"

    # What its parts ask.

    @functools.lru_cache(maxsize=64)  # noqa: B019  dropped with the emulator, of which there is one
    def client(self, service: str, region: str) -> Any:
        """A boto3 client of this emulator that none of its faults reach."""
        import boto3

        session = boto3.session.Session(*KEYS, region_name=region)
        return session.client(service, endpoint_url=self._inner.url)

    def has_image(self, name: str) -> bool:
        """Whether there is something that stands for the image."""
        return find_image(self.images, name) is not None

    def _find(self, name: str) -> TrainingJob:
        try:
            return self._service.find(name)
        except ServiceError:
            raise UsageError(f"no training job {name}") from None

    def _running(self, name: str) -> TrainingJob:
        found = self._find(name)
        if found.secondary != "Training" or not found.hosts:
            raise UsageError(f"{name} does not run now: {self.state(name)}")
        return found

    def _begin(self, job: TrainingJob, warm: bool) -> None:
        thread = threading.Thread(
            target=course.run, args=(job, self._site), kwargs={"warm": warm}, name=job.name, daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _quotas(self, operation: str, request: dict[str, Any], region: str) -> dict[str, Any] | None:
        if request.get("ServiceCode") != "sagemaker":
            return None
        return self.quota.answer(operation, request, region, ACCOUNT)

    def _streams(self, group: str, prefix: str, region: str) -> list[str]:
        pages = self.client("logs", region).get_paginator("describe_log_streams")
        found = pages.paginate(logGroupName=group, logStreamNamePrefix=prefix)
        return [stream["logStreamName"] for page in found for stream in page["logStreams"]]

    def _control(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        """POST /emulator/<verb>: the same for another process."""
        try:
            if verb == "evict":
                self.evict(request["job"])
            elif verb == "kill-node":
                self.kill_node(request["job"], int(request["node"]))
            elif verb == "fail-next":
                self.fail_next(request["operation"], request["how"], int(request.get("times", 1)))
            elif verb == "quota":
                self.quota[request["name"]] = int(request["value"])
            elif verb == "capacity":
                self.capacity[request["name"]] = int(request["value"])
            elif verb != "state":
                raise ValidationException(f"no such verb: {verb}")
            return {"state": self.state(request["job"])} if "job" in request else {}
        except (UsageError, KeyError) as error:
            raise ValidationException(str(error)) from None
