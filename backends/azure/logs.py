"""The logs of all nodes, as they grow: own tailer, since the SDK's shows node 0 alone and loads the whole file at each look."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from isthmus.backends.azure.errors import Unreachable
from isthmus.backends.azure.history import History
from isthmus.backends.spec import LogLine

_NAME = re.compile(r"user_logs/std_log(?:_process_0*(?P<node>\d+))?\.txt")
_TIME = re.compile(rb"\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)(Z|[+-]\d\d:?\d\d)?")
INTERVAL_S = 3.0
"""Between looks at a job that is followed."""
PATIENCE_S = 600.0
"""For which a follower goes on asking while nobody answers."""


@dataclass(slots=True)
class _File:
    node: int
    offset: int = 0
    rest: bytes = b""
    time: float | None = None
    """Of the newest line that tells one."""


class Tailer:
    """Reads on from where it was; never the same byte twice.

    Args:
        history: of the workspace.
        job: name.
    """

    def __init__(self, history: History, job: str) -> None:
        self._history = history
        self._job = job
        self._files: dict[str, _File] = {}

    def poll(self, *, last: bool = False) -> list[LogLine]:
        """What is new, over all nodes, in the order of the times that lines tell; the nodes' own order is kept.

        Args:
            last: the job has ended: a line without its line break is a line, too.
        """
        urls = self._history.details(self._job).get("logFiles") or {}
        found: list[tuple[float, int, LogLine]] = []
        for name, url in sorted(urls.items()):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            file = self._files.setdefault(name, _File(int(match["node"] or 0)))
            for raw in self._lines(file, name, url, last):
                file.time = time_of(raw) or file.time
                line = LogLine(file.node, time_of(raw), raw.decode(errors="replace").rstrip("\r"))
                found.append((file.time or 0.0, file.node, line))
        # Stable: what tells no time stays behind what its own node said before.
        found.sort(key=lambda entry: entry[0])
        return [line for _, _, line in found]

    def _lines(self, file: _File, name: str, url: str, last: bool) -> list[bytes]:
        data, size = self._history.read(url, file.offset, name)
        if size is not None and size < file.offset:
            # A node that was restarted begins its file anew.
            file.offset, file.rest = 0, b""
            data, size = self._history.read(url, 0, name)
        file.offset += len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        if last and file.rest:
            lines.append(file.rest)
            file.rest = b""
        return lines


def time_of(line: bytes) -> float | None:
    """Seconds since 1970 that a line begins with, in ISO 8601; without a zone UTC is meant."""
    match = _TIME.match(line)
    if match is None:
        return None
    text = match[1].decode().replace(",", ".").replace(" ", "T") + (match[2] or b"").decode()
    try:
        told = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()


def follow(
    tailer: Tailer,
    ended: Callable[[], bool],
    *,
    interval: float | None = None,
    patience: float = PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[LogLine]:
    """Lines until the job has ended, and what came until then. A store or service that is away is asked again.

    Raises:
        Unreachable: nobody answered for `patience` seconds.
    """
    silent_since: float | None = None
    interval = INTERVAL_S if interval is None else interval
    while True:
        try:
            # Asked before reading: what was printed before the end is read after it.
            over = ended()
            yield from tailer.poll(last=over)
        except Unreachable:
            silent_since = silent_since if silent_since is not None else clock()
            if clock() - silent_since > patience:
                raise
            sleep(min(30.0, 2 * interval))
            continue
        silent_since = None
        if over:
            return
        sleep(interval)
