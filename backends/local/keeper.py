"""The process that keeps a local run going: `python -m isthmus.backends.local.keeper FOLDER JOB_ID PARENT`.

It starts the worker, restarts it when it was preempted, and outlives the launcher. Its own output and the
worker's go to the log. SIGTERM asks it to have the worker checkpoint, and then to end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from isthmus.backends.local.place import JobPlace
from isthmus.backends.spec import EXIT_CODES, State, Status
from isthmus.backends.supervise import Limits, supervise
from isthmus.errors import IsthmusError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.process import ProcessId, die_with_parent

_LAST_WORDS = 15.0
"""Seconds that the worker has, after its grace, to write its verdict down."""


class LocalRunner:
    """The worker as `supervise` sees it."""

    def __init__(self, place: JobPlace, job: Mapping[str, Any], run: RunDirectory) -> None:
        self.place = place
        self.job = job
        self.run = run
        self.grace = float(job["request"]["grace"])
        self._worker: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self._deadline: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        self.stop()

    def start(self) -> None:
        """Starts a worker, unless this process was told to end meanwhile."""
        if self._interrupted:
            return
        request = self.job["request"]
        folder = self.place.folder / self.job["job_id"]
        files = {name: str(folder / name) for name in self.job["files"]}
        command = [files.get(word, word) for word in request["command"]]
        self._deadline = None
        self._worker = subprocess.Popen(
            [sys.executable, *command[1:]],
            env={**os.environ, **request["environment"], "ISTHMUS_PARENT": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own, that can be killed as one
        )
        process = ProcessId.of(self._worker.pid)
        if process is not None:
            self.place.note_process("worker", process)
        if self.interrupted():
            self.stop()  # the signal came while it was being started

    def status(self) -> Status:
        """Of the newest worker."""
        if self._worker is None:
            return Status(state="preempted", cause="ended before it began")
        code = self._worker.poll()
        if code is None:
            return Status(state="running")
        endings = {exit_code: state for state, exit_code in EXIT_CODES.items()}
        state: State = endings.get(code, "failed")
        event = self._last_word()
        if event is None and state == "failed":
            event = self._speak_for_the_worker(code)
        cause = event.get("cause") if event else None
        return Status(state=state, exit_code=code if code > 0 else EXIT_CODES[state], cause=cause)

    def _last_word(self) -> Mapping[str, Any] | None:
        """The event by which the newest attempt ended, if it did."""
        for event in reversed(self.run.events()):
            if event["type"] in EXIT_CODES:
                return dict(event)
            if event["type"] in ("started", "submitted"):
                return None
        return None

    def _speak_for_the_worker(self, code: int) -> Mapping[str, Any]:
        """Records why the worker ended, when it could not itself."""
        holder = self.run.lease_holder()
        if holder is not None and not holder.is_free(time.time()):
            return {"cause": f"another attempt is running: {holder.describe(time.time())}"}
        if code < 0:
            name = signal.Signals(-code).name
            cause = f"the worker was killed by signal {-code} ({name})"
        else:
            cause = last_error(self.place.log) or f"the worker exited with {code}; see {self.place.log}"
        event: dict[str, Any] = self.run.event("failed", cause=cause, exit_code=code if code > 0 else 1)
        return event

    def stop(self) -> None:
        """Passes SIGTERM on; `wait` kills what is left after the grace."""
        if self._worker is not None and self._worker.returncode is None:
            if self._deadline is None:
                self._deadline = time.monotonic() + self.grace + _LAST_WORDS
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._worker.pid, signal.SIGTERM)

    def wait(self, seconds: float) -> None:
        """Until the worker ends, or for that long."""
        assert self._worker is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                # In slices: a signal handler may set the deadline meanwhile.
                self._worker.wait(1.0)
                return
            except subprocess.TimeoutExpired:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._worker.pid, signal.SIGKILL)

    def interrupted(self) -> bool:
        """Whether SIGTERM came."""
        return self._interrupted


def last_error(log: Path) -> str | None:
    """The last line of the log that begins with `error: `, without that word."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return found[-1] if found else None


def main(arguments: list[str]) -> int:
    """Keeps the run in that folder going; returns its exit code."""
    place, job_id = JobPlace(Path(arguments[0])), arguments[1]
    job = json.loads(place.job(job_id).read_text())
    request = job["request"]
    run = RunDirectory(job["run_uri"])
    runner = LocalRunner(place, job, run)
    if not request["detach"]:
        # The terminal's window may be closed, or the launcher killed: then checkpoint and end, as with Ctrl-C.
        die_with_parent(int(arguments[2]), how=signal.SIGTERM)
    own = ProcessId.current()
    if place.claim(job_id, own) != own:
        return 0  # the job was submitted twice; another keeper has it
    place.note_process("keeper", own)
    if runner.interrupted():
        run.event("preempted", cause="it ended before it began", exit_code=EXIT_CODES["preempted"])
        return EXIT_CODES["preempted"]
    limits = request["limits"]
    usd_per_hour = limits["usd_per_hour"]
    try:
        runner.start()
        status = supervise(
            run,
            runner,
            Limits(
                max_restarts=limits["max_restarts"],
                max_hours=limits["max_hours"],
                max_usd=limits["max_usd"],
                price=None if usd_per_hour is None else lambda hours: hours * float(usd_per_hour),
            ),
        )
    except IsthmusError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        runner.stop()
        return error.exit_code
    return status.exit_code if status.exit_code is not None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
