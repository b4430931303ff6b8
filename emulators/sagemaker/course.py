"""A job's course: waiting for instances, its attempts, what the service does after each."""

from __future__ import annotations

import time
import traceback

from isthmus.emulators.sagemaker.attempt import Attempt, Outcome
from isthmus.emulators.sagemaker.job import TrainingJob, WarmPool
from isthmus.emulators.sagemaker.requests import is_spot, stopping, wanted_types
from isthmus.emulators.sagemaker.site import Site

INTERNAL = "InternalServerError: We encountered an internal error. Please try again."
NO_CAPACITY = "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
STEP_S = 0.05


def run(job: TrainingJob, site: Site, *, warm: bool) -> None:
    """Takes a job from Starting to its end. Runs in a thread of the job's own.

    Args:
        warm: it continues on the instances of a warm pool: there is nothing to wait for.
    """
    try:
        _run(job, site, warm)
    except Exception as error:  # noqa: BLE001  whatever breaks here must not leave a job that never ends
        traceback.print_exc()
        with job.lock:
            job.failure = f"{INTERNAL} (emulator: {error})"
            job.move("Failed", job.failure, "Failed")


def _run(job: TrainingJob, site: Site, warm: bool) -> None:
    request = job.request
    wait = stopping(request, "MaxWaitTimeInSeconds") if is_spot(request) else None
    deadline = job.created + wait if wait is not None else None
    retries = request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
    while True:
        if not _provision(job, site, deadline):
            return
        assert job.selected is not None
        kind, count = job.selected
        try:
            if not (warm and not job.attempts):
                _pause(job, site, site.times.start)
            with job.lock:
                job.attempts += 1
                job.interrupted = job.lost = False
            outcome = Outcome("stopped") if job.stop_asked else Attempt(job, site, deadline).run()
        finally:
            site.capacity.give(kind, count, is_spot(request))
            site.slots.release()
        if outcome.why == "interrupted" and not job.stop_asked:
            job.move("Interrupted", "Training job interrupted: the managed spot instances were taken back")
            if _out_of_time(job, deadline):
                return
            _pause(job, site, site.times.restart / 2)
            job.move("Restarting", "Restarting the training job")
            _pause(job, site, site.times.restart / 2)
            continue
        if outcome.why == "lost" and retries > 0 and not job.stop_asked:
            retries -= 1
            job.move("Starting", "Retrying after an internal error")
            if _out_of_time(job, deadline):
                return
            _pause(job, site, site.times.restart)
            continue
        _conclude(job, outcome)
        return


def _conclude(job: TrainingJob, outcome: Outcome) -> None:
    with job.lock:
        if outcome.why == "completed":
            job.move("Completed", "Training job completed", "Completed")
        elif outcome.why in ("failed", "lost"):
            job.failure = outcome.reason or INTERNAL
            job.move("Failed", job.failure, "Failed")
        else:
            secondary = {"runtime": "MaxRuntimeExceeded", "wait": "MaxWaitTimeExceeded"}.get(
                outcome.why, "Stopped"
            )
            job.move(secondary, "Training job stopped", "Stopped")
        keep = job.request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds", 0)
        if keep:
            now = time.time()
            job.warm_pool = WarmPool(until=now + keep, since=now)


def _out_of_time(job: TrainingJob, deadline: float | None) -> bool:
    """Ends a job between two attempts, when the limits of all of them together are reached."""
    limit = stopping(job.request, "MaxRuntimeInSeconds") or 86400
    if deadline is not None and time.time() > deadline:
        _conclude(job, Outcome("wait"))
    elif job.trained > limit:
        _conclude(job, Outcome("runtime"))
    return job.over


def _provision(job: TrainingJob, site: Site, deadline: float | None) -> bool:
    """Waits for instances of one of the types that would do, in their order; False when the job ended meanwhile."""
    spot = is_spot(job.request)
    begun = time.time()
    pending = stopping(job.request, "MaxPendingTimeInSeconds")
    patience = min(site.times.patience, pending if pending is not None else site.times.patience)
    while True:
        if site.slots.acquire(blocking=False):
            for kind, count in wanted_types(job.request):
                if site.capacity.take(kind, count, spot):
                    with job.lock:
                        job.selected = (kind, count)
                        job.move("Starting", "Preparing the instances for training")
                    return True
            site.slots.release()
        if job.stop_asked or site.closing.is_set():
            _conclude(job, Outcome("stopped"))
            return False
        if _out_of_time(job, deadline):
            return False
        if not spot and time.time() - begun > patience:
            _conclude(job, Outcome("failed", NO_CAPACITY))
            return False
        if job.secondary != "Pending":
            job.move("Pending", "Insufficient capacity error from EC2 while launching instances, retrying!")
        time.sleep(STEP_S)


def _pause(job: TrainingJob, site: Site, seconds: float) -> None:
    """Lets time pass, unless the job is stopped."""
    end = time.time() + seconds
    while time.time() < end and not job.stop_asked and not site.closing.is_set():
        time.sleep(min(STEP_S, max(end - time.time(), 0)))
