"""How a worker comes into an attempt: node 0 takes the run's lease and announces it, the others join what it announced."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from isthmus.errors import LeaseLost, UsageError
from isthmus.storage.rundir import Lease, RunDirectory

NUMBER_VARIABLE = "ISTHMUS_ATTEMPT"
TOKEN_VARIABLE = "ISTHMUS_LEASE_TOKEN"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the workers within a run."""

    number: int
    """From 1."""
    token: str
    """Of the lease that it was announced under."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Attempt:
        """The one that a rank was started with."""
        return cls(int(environ[NUMBER_VARIABLE]), environ[TOKEN_VARIABLE])

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        """Reads what `to_json` wrote."""
        data = json.loads(text)
        return cls(int(data["number"]), str(data["token"]))

    def to_json(self) -> str:
        """For a file or a store."""
        return json.dumps(asdict(self))

    def environment(self) -> dict[str, str]:
        """What a rank knows it by."""
        return {NUMBER_VARIABLE: str(self.number), TOKEN_VARIABLE: self.token}


def take_lease(
    run: RunDirectory,
    seconds: float,
    wait: float,
    interrupted: threading.Event,
    on_lost: Callable[[str], None],
) -> Lease:
    """The run's lease, waited for in short steps, so that a signal ends the waiting too.

    Raises:
        LeaseLost: another attempt still holds it after `wait` seconds, or when `interrupted` is set.
    """
    deadline = time.monotonic() + wait
    owner = f"{platform.node()}:{os.getpid()}"
    while True:
        step = min(1.0, max(0.0, deadline - time.monotonic()))
        try:
            return run.lease(seconds, owner, step, on_lost=on_lost)
        except LeaseLost:
            if time.monotonic() >= deadline or interrupted.is_set():
                raise


def announce(run: RunDirectory, lease: Lease, *, job: str | None, nodes: int, world_size: int) -> Attempt:
    """Node 0 begins an attempt: the `started` event with its number, its lease's token and its job."""
    number = len(run.events("started")) + 1
    if run.exists():
        run.update_run_json(attempts=number)
    fields = {} if job is None else {"job": job}
    run.event(
        "started",
        attempt=number,
        host=platform.node(),
        nodes=nodes,
        world_size=world_size,
        lease=lease.token,
        **fields,
    )
    return Attempt(number, lease.token)


def join(run: RunDirectory, *, job: str | None, wait: float, interrupted: threading.Event) -> Attempt | None:
    """The attempt of this job that node 0 announced under the lease in force; None when a signal or a stop came first.

    Another job's attempt is not ours. What is left is the same job started again by its cloud while the lease object of
    its dead self is the newest; the ranks find that out when they meet (`meeting`).

    Raises:
        UsageError: node 0 has not begun after `wait` seconds.
    """
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        token = run.lease_token()
        for event in reversed(run.events("started")):
            if token is not None and event.get("lease") == token and (job is None or event.get("job") == job):
                return Attempt(int(event["attempt"]), token)
        if interrupted.wait(min(2.0, max(0.0, deadline - time.monotonic()))) or stop_came_first(run):
            return None
    raise UsageError(f"node 0 has not begun after {wait:.0f} s", where=run.uri, hint="its log may say why")


def stop_came_first(run: RunDirectory) -> bool:
    """Whether a stop was requested while nobody ran: a cloud's own restart must not undo it."""
    types = [type_of(name) for name in run.file_names("events")]
    told = [type for type in types if type in ("submitted", "started", "stop-requested")]
    return bool(told) and told[-1] == "stop-requested"


def type_of(name: str) -> str:
    """The type of an event by its file's name, so that it need not be read."""
    return name.partition("-")[2].rpartition("-")[0]
