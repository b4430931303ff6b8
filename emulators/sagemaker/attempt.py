"""One attempt of a job on one set of hosts: laid out, started, watched, ended."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from typing import Literal

from isthmus.emulators.hosts import Cluster, Container, Host
from isthmus.emulators.image import find_image
from isthmus.emulators.namespaces import Bridge
from isthmus.emulators.processes import Loopback, free_port
from isthmus.emulators.sagemaker.bucket import download
from isthmus.emulators.sagemaker.checkpoints import Mirror
from isthmus.emulators.sagemaker.job import TrainingJob
from isthmus.emulators.sagemaker.logs import Metrics, Pump, create_group
from isthmus.emulators.sagemaker.outputs import upload
from isthmus.emulators.sagemaker.requests import checkpoint_path, input_mode, stopping
from isthmus.emulators.sagemaker.site import KEYS, Site
from isthmus.emulators.sagemaker.tree import (
    ML,
    Place,
    copy_read_only,
    lay_out,
    mount_command,
    needs_copy,
    objects,
    resource_config,
    rewritten,
)

Why = Literal["completed", "failed", "stopped", "runtime", "wait", "interrupted", "lost", "closing"]
TICK_S = 0.05
FLUSH_S = 0.2
SYNC_S = 1.0
REASON_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    why: Why
    reason: str | None = None
    """FailureReason of one that failed."""


class Attempt:
    """From the first folder to the last upload. Its hosts end with it."""

    def __init__(self, job: TrainingJob, site: Site, deadline: float | None) -> None:
        self.job = job
        self.site = site
        self.deadline = deadline
        """When a spot job's wait is over; None for others."""
        self.request = job.request
        self.count = job.selected[1] if job.selected else 1
        self.folder = site.folder / "jobs" / job.region / job.name / f"attempt-{job.attempts}"
        self.places: list[Place] = []
        self.mirrors: list[Mirror] = []
        self.pumps: list[Pump] = []
        self.code = 0
        """Exit code of the host that failed first."""
        self.metrics = Metrics(job)
        self._port = 0
        """MASTER_PORT of plain processes: all jobs of this machine share its ports, whatever address they are at."""
        self._s3 = site.client("s3", job.region)
        self._logs = site.client("logs", job.region)
        self._cloudwatch = site.client("cloudwatch", job.region)

    def run(self) -> Outcome:
        """Runs it to its end."""
        isolated = bool(self.request.get("EnableNetworkIsolation"))
        with contextlib.ExitStack() as stack:
            cluster: Cluster
            if self.site.privileges == "namespaces":
                names = [f"algo-{index + 1}" for index in range(self.count)]
                cluster = bridge = Bridge(names, isolated=isolated)
                stack.callback(bridge.close)
                url = None
                if bridge.gateway:
                    listener = self.site.listen(bridge.gateway)
                    stack.callback(listener.close)
                    url = listener.url
            else:
                net = self.site.nets.pop()
                stack.callback(self.site.nets.append, net)
                cluster = Loopback(self.count, net)
                self._port = free_port()
                stack.callback(cluster.close)
                # A process cannot be kept from the network; without keys it cannot use the store at least.
                url = None if isolated else self.site.outer_url
            self._prepare(cluster)
            self._start(cluster, url)
            stack.callback(self._forget)
            why = self._watch()
            return self._end(why)

    def _forget(self) -> None:
        with self.job.lock:
            self.job.hosts = []

    def _prepare(self, cluster: Cluster) -> None:
        job, request = self.job, self.request
        channels = request.get("InputDataConfig", [])
        if any(input_mode(request, channel) == "File" for channel in channels):
            job.move("Downloading", "Downloading input data")
        with job.lock:
            job.training_since = time.time()
            job.started = job.started or job.training_since
        kind = job.selected[0] if job.selected else ""
        link = "eth0" if cluster.privileges == "namespaces" else "lo"
        for index in range(self.count):
            place = Place(root=self.folder / f"algo-{index + 1}")
            lay_out(place, request, resource_config(request, cluster.names, index, kind, link))
            self.places.append(place)
            for channel in channels:
                folder = place.ml / "input" / "data" / channel["ChannelName"]
                folder.mkdir()
                found = objects(self._s3, channel, index, self.count)
                if input_mode(request, channel) == "File":
                    download(self._s3, found, folder)
                elif not self._mounts(channel, found):
                    copy_read_only(self._s3, found, folder)
            checkpoints = place.checkpoints(request)
            if checkpoints is not None:
                mirror = Mirror(self._s3, request["CheckpointConfig"]["S3Uri"], checkpoints)
                mirror.restore()
                self.mirrors.append(mirror)
            if cluster.privileges == "processes":
                for path in (place.ml / "input" / "data").rglob("*.yaml"):
                    if path.stat().st_size < 1 << 20 and path.stat().st_mode & 0o200:
                        path.write_text(
                            rewritten(path.read_text(encoding="utf-8"), place.ml), encoding="utf-8"
                        )

    def _mounts(self, channel: dict[str, object], found: list[tuple[str, str, str]]) -> bool:
        return self.site.fuse and not needs_copy(channel, found)

    def _start(self, cluster: Cluster, url: str | None) -> None:
        job = self.job
        job.move("Training", "Training image download completed. Training in progress.")
        create_group(self._logs)
        begun = max(int(time.time()), int(job.created) + job.attempts - 1)
        for place in self.places:
            if isinstance(cluster, Bridge):
                (place.root / "hosts").write_text(cluster.hosts_file(), encoding="utf-8")
        hosts = cluster.start([self._container(cluster, place, url) for place in self.places])
        for index, host in enumerate(hosts, start=1):
            self.pumps.append(Pump(host.output, f"{job.name}/algo-{index}-{begun}"))
        with job.lock:
            job.hosts = list(hosts)

    def _container(self, cluster: Cluster, place: Place, url: str | None) -> Container:
        job, request = self.job, self.request
        algorithm = request["AlgorithmSpecification"]
        image = find_image(self.site.images, algorithm.get("TrainingImage") or algorithm["AlgorithmName"])
        assert image is not None
        environment = {
            **image.environment(),
            "AWS_REGION": job.region,
            "TRAINING_JOB_NAME": job.name,
            "TRAINING_JOB_ARN": job.arn,
            "DMLC_INTERFACE": "eth0",
            **self._store(url),
            **request.get("Environment", {}),
        }
        command = [*(algorithm.get("ContainerEntrypoint") or image.entrypoint)]
        command += algorithm.get("ContainerArguments", [])
        if cluster.privileges == "processes":
            ml = place.ml
            command = [rewritten(part, ml) for part in command]
            environment = {key: rewritten(value, ml) for key, value in environment.items()}
            environment["SAGEMAKER_BASE_DIR"] = str(ml)
            environment.setdefault("MASTER_PORT", str(self._port))
            return Container(command=command, environment=environment, home=place.root / "home", cwd=str(ml))
        binds = {ML: place.ml, "/etc/hosts": place.root / "hosts"}
        path = checkpoint_path(request)
        folder = place.checkpoints(request)
        if path and folder and not path.startswith(f"{ML}/"):
            binds[path] = folder
        fuse = {
            f"{ML}/input/data/{channel['ChannelName']}": mount_command(
                channel["DataSource"]["S3DataSource"]["S3Uri"], self.site.inner_url, KEYS, job.region
            )
            for index, channel in enumerate(request.get("InputDataConfig", []))
            if input_mode(request, channel) == "FastFile"
            and self._mounts(channel, objects(self._s3, channel, index, self.count))
        }
        return Container(
            command=command, environment=environment, binds=binds, fuse=fuse, home=place.root / "home"
        )

    def _store(self, url: str | None) -> dict[str, str]:
        """How a container of the emulation finds the store and its role's keys; isolated ones get neither."""
        if url is None:
            return {}
        return {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": KEYS[0],
            "AWS_SECRET_ACCESS_KEY": KEYS[1],
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _watch(self) -> Why:
        """Until all hosts have ended: passes on what shall end them, and what they say."""
        hosts = self.job.hosts
        why: Why | None = None
        since = flushed = synced = time.time()
        killed = False
        while True:
            codes = [host.poll() for host in hosts]
            now = time.time()
            if why is None:
                why = self._reason(codes, now)
                since = now
                # Of the host that failed first; those that are ended on its account have codes of their own.
                self.code = next((code for code in codes if code), 0)
                if why in ("lost", "closing"):
                    kill_all(hosts)
                elif why is not None:
                    for host in hosts:
                        host.signal(signal.SIGTERM)
            elif why != "closing" and self.site.closing.is_set():
                why = "closing"
                kill_all(hosts)
            if why and not killed and now - since > self.site.times.grace:
                killed = True
                kill_all(hosts)
            if now - flushed > FLUSH_S:
                flushed = now
                self._flush()
            if now - synced > SYNC_S:
                synced = now
                for mirror in self.mirrors:
                    mirror.sync()
            if all(code is not None for code in codes):
                return why or "completed"
            time.sleep(TICK_S)

    def _reason(self, codes: list[int | None], now: float) -> Why | None:
        """What ends the attempt now; None for nothing."""
        job = self.job
        limit = stopping(self.request, "MaxRuntimeInSeconds") or 86400
        if self.site.closing.is_set():
            return "closing"
        if job.lost:
            return "lost"
        if job.interrupted:
            return "interrupted"
        if job.stop_asked:
            return "stopped"
        if any(codes):
            return "failed"
        if job.seconds(now) > limit:
            return "runtime"
        return "wait" if self.deadline is not None and now > self.deadline else None

    def _flush(self) -> None:
        for pump in self.pumps:
            lines = pump.flush(self._logs)
            if lines:
                self.metrics.take(lines, self._cloudwatch)

    def _end(self, why: Why) -> Outcome:
        job = self.job
        for pump in self.pumps:
            pump.wait(5)
        if why != "closing":
            self._flush()
        with job.lock:
            now = time.time()
            job.trained = job.seconds(now)
            job.training_since = None
        if why in ("lost", "closing"):
            return Outcome(why)
        for mirror in self.mirrors:
            mirror.sync()
        if why == "interrupted":
            return Outcome(why)
        job.move("Uploading", "Uploading generated training model")
        upload(self._s3, self.request, self.places, self.folder, model=why != "failed")
        return Outcome(why, self._failure() if why == "failed" else None)

    def _failure(self) -> str:
        """FailureReason: what the first host that has one wrote to its failure file, and the exit code."""
        told = ""
        for place in self.places:
            if place.failure.is_file():
                told = place.failure.read_text(encoding="utf-8", errors="replace")[:REASON_LIMIT]
                break
        ending = f", exit code: {self.code}"
        return f"AlgorithmError: {told}"[: REASON_LIMIT - len(ending)] + ending


def kill_all(hosts: list[Host]) -> None:
    """Ends all hosts at once."""
    for host in hosts:
        host.kill()
