"""`isthmus supervise RUN`: one look at a run and what follows from it, wherever the run's jobs are.

Nothing is kept between two looks: the run directory and the cloud tell all. So it may run on a laptop, from cron, or twice at
once: an attempt's number is claimed by a conditional create, and a submission is completed under its own name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isthmus.backends import failover, metering
from isthmus.backends.destinations import known_destinations
from isthmus.backends.following import gone, status_of
from isthmus.backends.launch import start
from isthmus.backends.prepare import Launch, Price, next_number, preflight, prepare_resume, refuse_errors
from isthmus.backends.registry import get_backend
from isthmus.backends.runs import record_of
from isthmus.backends.spec import EXIT_CODES, Capability, Handle, Status
from isthmus.backends.submission import handle_of, refusal_of, send, withdraw
from isthmus.backends.supervise import Limits, next_action, spans, stop_requested
from isthmus.core.recipe import Recipe, parse_recipe
from isthmus.errors import IsthmusError, PreflightRefused, UsageError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.submissions import Submission

PATIENCE_S = 60.0
"""For which the store may be away before a look is given up; the next one comes soon."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 1800.0
"""Between attempts that never began: there is no room, and asking each second makes none."""

Did = Literal["waited", "submitted", "refused", "stopping", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look found and did."""

    did: Did
    status: Status
    backend: str
    handle: Handle
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "did": self.did,
            "why": self.why,
            "run": self.handle.run_id,
            "run_uri": self.handle.run_uri,
            "backend": self.backend,
            "job": self.handle.native.get("job_id"),
            "state": self.status.state,
            "cause": self.status.cause,
            "exit_code": self.status.exit_code if self.did == "done" else None,
        }


class Supervisor:
    """Looks after one run.

    Args:
        uri: the run directory.
        price: what an hour costs, for attempts that were submitted without it.
        keep_prices: an attempt costs what the one before it on the same machines did; otherwise it is priced again.
        say: gets a line for each thing it does.
        pause_s: after each round of the places without an attempt that began: this, then twice that, ...
    """

    def __init__(
        self,
        uri: str,
        *,
        price: Price | None = None,
        keep_prices: bool = True,
        say: Callable[[str], None] = lambda text: None,
        pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = RunDirectory(uri, patience=PATIENCE_S)
        self._price, self._keep_prices = price, keep_prices
        self._say = say
        self._pause_s = pause_s
        self._clock = clock
        self._next = 1
        """The number of the attempt that this look may make."""

    def look(self) -> Look:
        """Looks once, and does what is to be done; on to the next destination while one refuses.

        Raises IsthmusError; the next look may succeed.
        """
        while True:
            look = self._look()
            if look.did != "refused":
                return look

    def _look(self) -> Look:
        data = self.run.read_run_json()
        submissions = self.run.submissions().all()
        events = self.run.events()
        self._next = next_number(submissions[-1] if submissions else None, data)
        if not submissions and not data.get("job_ids"):
            return self._submit(0, "it was begun and never submitted")
        newest = submissions[-1] if submissions else None
        if newest is not None:
            self._refuse_a_copy(newest)
        if newest is not None and newest.answer is None:
            return self._complete(newest, events, len(submissions))
        record = record_of(self.run)
        backend, handle = get_backend(record.backend), record.to_handle()
        status = status_of(record)
        if newest is not None and refusal_of(newest):
            return self._refused(submissions, status, handle)
        if status.missing and stop_requested(events):
            self.run.event(
                "stopped", cause="stop requested, and its cloud does not know the job", exit_code=4
            )
            return self._looked("done", status_of(record_of(self.run)), handle, "stop requested")
        if (lost := gone(record, newest, status, self._clock())) is not None:
            raise lost
        limits = self._limits(data, submissions, events)
        action = next_action(events, status, limits, self._clock())
        if action.kind == "stop":
            self._say(f"stopping: {action.why}")
            self.run.event("stop-requested", by="budget", cause=action.why)
            backend.stop(handle)
            return self._looked("stopping", backend.status(handle), handle, action.why)
        if action.kind == "wait":
            return self._looked("waited", status, handle)
        if status.ended:
            metering.put_down(self.run, handle, events)
        if action.kind == "done" or Capability.RESTARTS in backend.capabilities:
            # A backend that restarts by itself has given up for a reason of its own.
            return self._done(action.status or status, status, handle, action.why)
        if (seconds := self._pause(data, submissions, events)) > 0:
            return self._looked("waited", status, handle, f"the next attempt comes in {seconds:.0f} s")
        return self._again(submissions, status, action.why)

    # -- what a look may lead to

    def _complete(self, newest: Submission, events: Sequence[Mapping[str, Any]], count: int) -> Look:
        """A submission of which nobody knows whether it arrived."""
        handle = handle_of(newest)
        backend = get_backend(handle.backend)
        if stop_requested(events):
            withdraw(self.run, newest, "stop requested before it was submitted")
            return self._looked("done", status_of(record_of(self.run)), handle, "stop requested")
        job_id = handle.native["job_id"]
        self._say(f"completing the submission of {job_id} to {handle.backend}")
        try:
            handle = send(self.run, newest, backend, record=False)
        except PreflightRefused as error:
            self._say(f"refused: {error}")
            return self._looked("refused", status_of(record_of(self.run)), handle, f"{job_id}: {error}")
        return self._looked("submitted", backend.status(handle), handle, "a submission was completed")

    def _refuse_a_copy(self, newest: Submission) -> None:
        """A fetched directory is no place for a job; what `runs copy` carried over waits for its resume."""
        there = handle_of(newest).run_uri
        if there != self.run.uri:
            raise UsageError(
                f"a copy of the run at {there}",
                where=self.run.uri,
                hint=f"supervise that one, or go on from the copy: isthmus resume {self.run.uri}",
            )

    def _refused(self, submissions: Sequence[Submission], status: Status, handle: Handle) -> Look:
        """The last submission was refused for good: the next destination, unless all were asked in turn."""
        refusal = refusal_of(submissions[-1])
        assert refusal is not None
        choice = int(submissions[-1].data.get("choice", 0))
        asked = {choice}
        for one in reversed(submissions):
            if not refusal_of(one):
                break
            asked.add(int(one.data.get("choice", 0)))
        if int(refusal.get("exit_code", 1)) != 3:
            return self._looked("done", status, handle, status.cause)
        others = self._others(choice)
        for other in [index for index in others if index not in asked]:
            look = self._try(other, f"refused: {refusal.get('cause')}")
            if look is not None:
                return look
        return self._looked("done", status, handle, status.cause)

    def _again(self, submissions: Sequence[Submission], status: Status, why: str | None) -> Look:
        """The next attempt: elsewhere when that is better and possible, else where it was."""
        choice = int(submissions[-1].data.get("choice", 0)) if submissions else 0
        leave = failover.why_leave(submissions, status, self._clock()) if submissions else None
        if leave is not None:
            for other in self._others(choice):
                look = self._try(other, f"{leave}; {why}")
                if look is not None:
                    return look
        return self._submit(choice, why or "preempted")

    def _others(self, choice: int) -> list[int]:
        launch = self._prepared(choice)
        return failover.order_from(choice, len(launch.destinations))

    def _try(self, choice: int, why: str) -> Look | None:
        """Submits to that destination; None when something speaks against it, which is said."""
        try:
            launch = self._prepared(choice)
            place = launch.destinations[choice]
            against = failover.cannot_move(launch.job.source, self.run.uri, launch.job.run_id, place)
            if against is not None:
                raise PreflightRefused(against)
            launch = preflight(launch)
            refuse_errors(launch)
        except IsthmusError as error:
            self._say(f"not to destination {choice + 1}: {error}")
            return None
        return self._started(launch, f"{why}; now {place}")

    def _submit(self, choice: int, why: str) -> Look:
        return self._started(self._prepared(choice), why)

    def _started(self, launch: Launch, why: str) -> Look:
        if launch.job.attempt != self._next:
            # What was decided was decided about an attempt before the newest.
            return self._overtaken()
        self._say(f"submitting {launch.rendered.job_id} to {launch.backend.name}: {why}")
        try:
            handle = start(launch, Path.cwd(), by="supervise")
        except UsageError as error:
            newest = self.run.submissions().newest()
            if newest is None or newest.number < launch.job.attempt or refusal_of(newest):
                raise
            return self._overtaken(str(error))
        except PreflightRefused as error:
            newest = self.run.submissions().newest()
            assert newest is not None
            self._say(f"refused: {error}")
            return self._looked("refused", status_of(record_of(self.run)), handle_of(newest), str(error))
        return self._looked("submitted", launch.backend.status(handle), handle, why)

    def _overtaken(self, why: str = "another supervisor was faster") -> Look:
        record = record_of(self.run)
        return self._looked("waited", status_of(record), record.to_handle(), why)

    def _prepared(self, choice: int) -> Launch:
        return prepare_resume(
            record_of(self.run),
            choice=choice,
            detach=True,
            price=self._price,
            keep_price=self._keep_prices,
        )

    def _done(self, verdict: Status, status: Status, handle: Handle, why: str | None) -> Look:
        events = self.run.events()
        if verdict.state == "stopped" and status.state == "preempted":
            # The attempt ended before it could be asked to stop; nobody shall restart it.
            if not stop_requested(events):
                self.run.event("stop-requested", by="budget", cause=why)
            if events[-1]["type"] != "stopped":
                self.run.event("stopped", cause=why, exit_code=EXIT_CODES["stopped"])
        elif verdict is not status and why:
            text = f"not restarted: {why}"
            if not any(event.get("text") == text for event in events[-3:]):
                self.run.event("note", text=text)
        return self._looked("done", verdict, handle, why)

    # -- figures

    def _limits(
        self,
        data: Mapping[str, Any],
        submissions: Sequence[Submission],
        events: Sequence[Mapping[str, Any]],
    ) -> Limits:
        recipe = recipe_of(data)
        usd = usd_spent(submissions, events, self._clock())
        return Limits(
            max_restarts=recipe.compute.max_restarts,
            max_hours=recipe.budget.max_hours,
            max_usd=recipe.budget.max_usd,
            price=None if usd is None else lambda hours: usd,
        )

    def _pause(
        self,
        data: Mapping[str, Any],
        submissions: Sequence[Submission],
        events: Sequence[Mapping[str, Any]],
    ) -> float:
        """Seconds until the next attempt may be made: none after one that ran, or while a place was not asked yet."""
        began = {event.get("job") for event in events if event["type"] == "started"}
        submitted = ""
        for event in events:
            if event["type"] == "submitted":
                submitted = str(event.get("job_id"))
            elif event["type"] == "started":
                began.add(submitted)
        idle = 0
        for one in reversed(submissions):
            if one.data["rendered"]["job_id"] in began:
                break
            idle += 1
        rounds = idle // len(known_destinations(data, recipe_of(data)))
        if not rounds:
            return 0.0
        pause = min(self._pause_s * 2.0 ** (rounds - 1), LONGEST_PAUSE_S)
        return float(submissions[-1].data["created"]) + pause - self._clock()

    def _looked(self, did: Did, status: Status, handle: Handle, why: str | None = None) -> Look:
        return Look(did=did, status=status, backend=handle.backend, handle=handle, why=why)


def recipe_of(run_json: Mapping[str, Any]) -> Recipe:
    """The recipe that a run was begun with, as its run.json tells."""
    import json

    return parse_recipe(json.dumps(run_json["recipe"]), filename=f"{run_json.get('id')}/run.json").recipe


def usd_spent(
    submissions: Sequence[Submission], events: Sequence[Mapping[str, Any]], now: float
) -> float | None:
    """What the attempts so far cost, each at its own price; None when one that ran has none."""
    prices = {one.data["rendered"]["job_id"]: one.data.get("usd_per_hour") for one in submissions}
    total = 0.0
    for job, seconds in spans(events, now):
        price = prices.get(job)
        if price is None:
            return None
        total += float(price) * seconds / 3600
    return total
