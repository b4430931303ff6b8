"""The logs of all hosts of a job, from CloudWatch: followed together, in the order of time.

A host's log is a stream `<job>/algo-<n>-<time>`; there is none before it has printed, and another one for each restart. Each
stream is read by its own position, so that a host whose lines arrive late loses none, and neither does a lost connection.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from isthmus.backends.sagemaker.aws import Client, errors, is_missing, is_passing
from isthmus.backends.spec import LogLine

GROUP = "/aws/sagemaker/TrainingJobs"
CALLS_PER_SECOND = 10.0
"""Of GetLogEvents and DescribeLogStreams together; an account has about 25 of the one and 5 of the other."""
IDLE = 2.0
"""Seconds between looks when nothing new came."""
STREAMS_EVERY = 5.0
PATIENCE = 1800.0
"""Seconds without an answer after which following gives up."""
SETTLE = 2
"""Looks without a new line, after the job has ended, until nothing more is expected: CloudWatch lags a little."""
_HOST = re.compile(r"/algo-(\d+)")


class Tail:
    """The lines of a job, as they come.

    Args:
        client: of CloudWatch Logs.
        job: its name.
        ended: whether the job has ended; asked before each look, so that what it printed last is read.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        ended: Callable[[], bool],
        *,
        sleep: Callable[[float], None] = time.sleep,
        idle: float | None = None,
    ) -> None:
        self.client, self.job, self.ended = client, job, ended
        self.sleep, self.idle = sleep, IDLE if idle is None else idle
        self.positions: dict[str, str | None] = {}
        self._looked = float("-inf")
        self._last_answer = time.monotonic()

    def so_far(self) -> Iterator[LogLine]:
        """What is there now. Raises UsageError, StorageError."""
        with errors("read the log", self.job):
            self._find_streams()
            yield from self._new()

    def follow(self) -> Iterator[LogLine]:
        """Until the job has ended; a network that comes back within half an hour is waited for."""
        quiet = 0
        while True:
            try:
                ended = self.ended()
                if ended or time.monotonic() - self._looked >= STREAMS_EVERY:
                    self._find_streams()
                lines = list(self._new())
            except Exception as error:
                if not self._may_pass(error):
                    with errors("follow the log", self.job):
                        raise
                self.sleep(self.idle)
                continue
            self._last_answer = time.monotonic()
            yield from lines
            quiet = 0 if lines or not ended else quiet + 1
            if quiet >= SETTLE:
                return
            self.sleep(max(self.idle if not lines else 0.2, len(self.positions) / CALLS_PER_SECOND))

    def _may_pass(self, error: Exception) -> bool:
        cause = error.__cause__ if error.__cause__ is not None else error
        return is_passing(cause) and time.monotonic() - self._last_answer < PATIENCE

    def _find_streams(self) -> None:
        self._looked = time.monotonic()
        arguments: dict[str, Any] = {"logGroupName": GROUP, "logStreamNamePrefix": f"{self.job}/"}
        while True:
            try:
                page = self.client.describe_log_streams(**arguments)
            except Exception as error:
                if is_missing(error):
                    return  # nothing has printed yet, in this account
                raise
            for stream in page.get("logStreams", ()):
                self.positions.setdefault(stream["logStreamName"], None)
            if not page.get("nextToken"):
                return
            arguments["nextToken"] = page["nextToken"]

    def _new(self) -> Iterator[LogLine]:
        """Lines since the last look, by time; lines of one stream stay in their order."""
        found: list[tuple[float, int, int, LogLine]] = []
        after: dict[str, str | None] = {}
        for name in list(self.positions):
            after[name] = self._read(name, found)
        # Only now, that all have answered: a failure in between must not lose the lines of the streams before it.
        self.positions.update(after)
        yield from (line for *_, line in sorted(found, key=lambda row: row[:3]))

    def _read(self, stream: str, found: list[tuple[float, int, int, LogLine]]) -> str | None:
        host = _HOST.search(stream)
        node = int(host[1]) - 1 if host else 0
        position, latest = self.positions[stream], 0.0
        while True:
            arguments = {"logGroupName": GROUP, "logStreamName": stream, "startFromHead": True}
            if position is not None:
                arguments["nextToken"] = position
            try:
                page = self.client.get_log_events(**arguments)
            except Exception as error:
                if is_missing(error):
                    return position
                raise
            for event in page.get("events", ()):
                latest = max(latest, event["timestamp"] / 1000)
                for text in event["message"].rstrip("\n").replace("\r", "\n").split("\n"):
                    line = LogLine(node, event["timestamp"] / 1000, text)
                    # A stream's own order goes before its clock.
                    found.append((latest, node, len(found), line))
            following = page.get("nextForwardToken")
            if following is None or following == position or not page.get("events"):
                return following or position
            position = following
