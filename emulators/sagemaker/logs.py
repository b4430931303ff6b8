"""What the containers print: to CloudWatch Logs, line by line, and through the job's regular expressions to its metrics."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

from isthmus.emulators.sagemaker.job import TrainingJob

GROUP = NAMESPACE = "/aws/sagemaker/TrainingJobs"
EVENT_BYTES = 250_000
"""CloudWatch takes 256 KiB an event, its own overhead included."""
BATCH = 1000


class Pump:
    """One host's output. A thread reads, `flush` sends; `wait` returns when all has been read."""

    def __init__(self, output: IO[bytes], stream: str) -> None:
        self.stream = stream
        self._output = output
        self._lines: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._created = False
        self._thread = threading.Thread(target=self._read, name=f"log {stream}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._output:
            moment = int(time.time() * 1000)
            text = line.decode("utf-8", "replace").rstrip("\n")
            with self._lock:
                # An event may not be empty.
                self._lines += [(moment, part) for part in pieces(text or " ")]

    def wait(self, limit_s: float) -> None:
        """Until the output has ended."""
        self._thread.join(limit_s)

    def flush(self, logs: Any) -> list[tuple[int, str]]:
        """Sends what has been read since; returns it: milliseconds since 1970, text."""
        with self._lock:
            lines, self._lines = self._lines, []
        if not self._created:
            self._created = True
            logs.create_log_stream(logGroupName=GROUP, logStreamName=self.stream)
        for start in range(0, len(lines), BATCH):
            events = [{"timestamp": moment, "message": text} for moment, text in lines[start : start + BATCH]]
            logs.put_log_events(logGroupName=GROUP, logStreamName=self.stream, logEvents=events)
        return lines


def pieces(text: str) -> Iterator[str]:
    """A line in parts that fit an event."""
    for start in range(0, len(text), EVENT_BYTES // 4):
        yield text[start : start + EVENT_BYTES // 4]


def create_group(logs: Any) -> None:
    """The group of all training jobs, once."""
    with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
        logs.create_log_group(logGroupName=GROUP)


class Metrics:
    """A job's MetricDefinitions over its lines."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        definitions = job.request["AlgorithmSpecification"].get("MetricDefinitions", [])
        self._patterns = [(one["Name"], re.compile(one["Regex"])) for one in definitions]

    def take(self, lines: list[tuple[int, str]], cloudwatch: Any) -> None:
        """Records the values that lines show: the first group of each expression, where it is a number."""
        data = []
        for moment, text in lines:
            for name, pattern in self._patterns:
                found = pattern.search(text)
                value = number(found[1]) if found and pattern.groups else None
                if value is None:
                    continue
                seen = {"MetricName": name, "Value": value, "Timestamp": moment / 1000}
                self._job.metrics[name] = seen
                dimensions = [{"Name": "TrainingJobName", "Value": self._job.name}]
                data.append({**seen, "Dimensions": dimensions})
        for start in range(0, len(data), BATCH):
            cloudwatch.put_metric_data(Namespace=NAMESPACE, MetricData=data[start : start + BATCH])


def number(text: str | None) -> float | None:
    """A finite number, or None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if value - value == 0 else None
