"""Keepers: one thread for each job, from its queue to its end, over all its attempts."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isthmus.emulators.azureml.allocation import allocate, release
from isthmus.emulators.azureml.attempt import PREEMPTED, Attempt, End
from isthmus.emulators.azureml.blobs import Blobs
from isthmus.emulators.azureml.identity import Tokens
from isthmus.emulators.azureml.logs import Shipping
from isthmus.emulators.azureml.nodes import Host
from isthmus.emulators.azureml.rules import Refused
from isthmus.emulators.azureml.world import Demand, Job, World
from isthmus.emulators.image import Image
from isthmus.errors import IsthmusError

SCRATCH = "aml-"
"""Beginning of the names of temporary folders; the process id follows."""


@dataclass(kw_only=True)
class Options:
    """How the service behaves; may be changed while it serves. Times in seconds."""

    folder: Path
    images: Mapping[str, Image]
    isolated: bool
    grace: float
    """From the warning of a preemption to its SIGKILL."""
    cancel_grace: float
    """From a cancellation's SIGTERM to its SIGKILL."""
    start_delay: float
    """Until machines that had to be started are there."""
    on_preemption: Literal["fail", "requeue"]
    on_lost_node: Literal["fail", "not-responding"]
    heartbeat: float
    """Until the service misses a node that died."""
    address: str = ""
    ports: tuple[int, ...] = ()
    """Of the services that containers must reach."""


class Keepers:
    """All of them."""

    def __init__(self, world: World, blobs: Blobs, tokens: Tokens, options: Options) -> None:
        self.world, self.blobs, self.tokens, self.options = world, blobs, tokens, options
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

        for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
            # Of an emulator that was killed.
            if not Path("/proc", left.name.split("-")[1]).exists():
                shutil.rmtree(left, ignore_errors=True)

    def start(self, job: Job) -> None:
        """A keeper for a new job."""
        thread = threading.Thread(target=self._keep, args=(job,), daemon=True, name=f"azureml-{job.name}")
        self._threads.append(thread)
        thread.start()

    def demand(self, job: Job, what: Demand, node: int | None = None) -> None:
        """Something that shall happen to a job; nothing, where it has ended."""
        with self.world.changed:
            if job.over:
                return
            job.demands.append((what, node))
            if what == "cancel":
                self.world.set_status(job, "CancelRequested")
            self.world.changed.notify_all()

    def hosts(self, job: Job) -> list[Host]:
        """The nodes it runs on."""
        attempt: Attempt | None = job.private.get("attempt")
        return [node.host() for node in attempt.nodes] if attempt is not None else []

    def stop(self) -> None:
        """Kills everything and waits for it."""
        self._closing.set()
        with self.world.changed:
            self.world.changed.notify_all()
        for thread in self._threads:
            thread.join(60)

    # -- one job

    def _keep(self, job: Job) -> None:
        shipping = Shipping(self.world, self.blobs, job)
        try:
            end = self._attempts(job, shipping)
        except Exception as error:  # noqa: BLE001 - a job must not stay running because its keeper broke
            end = End("Failed", "SystemError", f"The emulator failed: {type(error).__name__}: {error}")
        if self._closing.is_set():
            return
        with self.world.changed:
            if end.message is not None:
                job.error = {"code": end.code, "message": end.message, "details": [], "rule": end.rule}
            self.world.set_status(job, end.status)

    def _attempts(self, job: Job, shipping: Shipping) -> End:
        while True:
            job.attempt += 1
            fresh = self._queue(job)
            if fresh is None:
                return End("Canceled")
            end = self._attempt(job, shipping)
            if (
                end.taken
                and job.low_priority
                and self.options.on_preemption == "requeue"
                and end.rule == "preempted"
            ):
                job.warnings.append(PREEMPTED)
                continue
            return end

    def _queue(self, job: Job) -> float | None:
        """Waits for nodes; None when it is cancelled before there are any."""
        self.world.set_status(job, "Queued")
        with self.world.changed:
            while True:
                if self._closing.is_set() or self._cancelled(job):
                    return None
                fresh = allocate(self.world, job)
                if fresh is not None:
                    break
                self.world.changed.wait(0.2)
            self.world.changed.notify_all()
            deadline = time.monotonic() + fresh * self.options.start_delay
            while (left := deadline - time.monotonic()) > 0:
                if self._closing.is_set() or self._cancelled(job):
                    release(self.world, job)
                    return None
                self.world.changed.wait(min(left, 0.5))
            cluster = self.world.clusters.get(job.compute or "")
            if cluster is not None:
                cluster.allocating = False
        return fresh

    def _cancelled(self, job: Job) -> bool:
        return any(what == "cancel" for what, _ in job.demands)

    def _attempt(self, job: Job, shipping: Shipping) -> End:
        folder = self.options.folder / "jobs" / job.name / f"attempt-{job.attempt:02d}"
        # Short: sockets that processes make there have short names only.
        scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))
        attempt = Attempt(self.world, self.blobs, self.tokens, self.options, job, folder, scratch, shipping)
        end = End("Canceled")
        try:
            self.world.set_status(job, "Preparing")
            attempt.prepare()
            with self.world.changed:
                job.private["attempt"] = attempt
                # What was asked before there was a node concerns none.
                job.demands = [d for d in job.demands if d[0] == "cancel"]
                if not self._cancelled(job):
                    self.world.set_status(job, "Running")
            end = attempt.run(self._closing)
            return end
        except Refused as refused:
            end = End("Failed", refused.rule.code, refused.message, refused.rule.id)
            return end
        except IsthmusError as error:
            end = End("Failed", "SystemError", str(error))
            return end
        finally:
            if end.status in ("Completed", "Failed") and not self._closing.is_set() and not end.taken:
                self.world.set_status(job, "Finalizing")
            with contextlib.suppress(OSError):
                attempt.clean(send=not end.taken and not self._closing.is_set())
            job.private.pop("attempt", None)
            release(self.world, job, taken=end.taken)
            shutil.rmtree(scratch, ignore_errors=True)
