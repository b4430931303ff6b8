"""One start of the worker, watched through the phases that its ranks report, and struck in them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_events import WRITING, Event
from training import environment

LIMIT_S = 150.0
"""No wait is longer: whoever takes longer hangs."""
_POLL_S = 0.0015


class Broken(AssertionError):
    """The trainer did what it must not do."""


@dataclass(frozen=True, slots=True)
class Line:
    """What a rank said: it enters a phase."""

    time: float
    rank: int
    pid: int
    step: int
    phase: str


class Attempt:
    """The worker and its ranks.

    Args:
        number: of the attempt in its course.
        folder: for what it prints and the phases it reports; must not be the run directory.
        recipe: file.
        run: URI.
        ranks: how many the recipe asks for.
        hold: phase -> seconds it lasts at least.
        variables: of the environment.
        arguments: more for the worker.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        recipe: Path,
        run: str,
        ranks: int,
        *,
        hold: dict[str, float],
        variables: dict[str, str],
        arguments: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.number, self.folder, self.ranks = number, folder, ranks
        self.trace = folder / "phases"
        self.printed = folder / "printed.txt"
        self.lines: list[Line] = []
        self.mark = 0
        """Lines before this one belong to an earlier event."""
        self._read = [0] * ranks
        self._pids: dict[int, psutil.Process] = {}
        self._family: dict[int, psutil.Process] = {}
        variables = environment(
            ISTHMUS_TRACE_PHASES=str(self.trace),
            ISTHMUS_HOLD_PHASES=",".join(f"{phase}={seconds}" for phase, seconds in hold.items()),
            ISTHMUS_RECORD_KEYS="1",
            **variables,
        )
        command = [
            sys.executable,
            "-m",
            "isthmus.core.worker",
            "--recipe",
            str(recipe),
            "--run",
            run,
            *arguments,
        ]
        with self.printed.open("wb") as out:
            self.process = subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT)
        self.started = time.monotonic()

    # -- watching

    def look(self) -> None:
        """Reads what the ranks have reported since the last look."""
        for rank in range(self.ranks):
            path = self.trace / f"phases-rank{rank}.jsonl"
            try:
                with path.open("rb") as file:
                    file.seek(self._read[rank])
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(whole)
            self.lines += [Line(**json.loads(line)) for line in whole.splitlines()]

    def wait_for(self, event: Event) -> Line | None:
        """The trainer's line that an event waits for, when its delay has passed; None when the attempt ended before.

        Raises:
            Broken: neither came in time.
        """
        if event.phase == "starting":
            return self._wait_for_start(event)
        phase = "staged" if event.phase == "training" else event.phase
        deadline = time.monotonic() + LIMIT_S
        while True:
            ended = self.process.poll() is not None
            self.look()
            found = [
                line
                for line in self.lines[self.mark :]
                if line.phase == phase and line.rank == self._reporter(event) and line.step > 0
            ]
            if len(found) >= event.nth:
                line = found[event.nth - 1]
                # From the line's own time: reading it took a moment.
                time.sleep(max(0.0, line.time + event.delay - time.time()))
                return line
            if ended:
                return None
            if time.monotonic() > deadline:
                raise Broken(f"hung: no {event.phase} within {LIMIT_S:.0f} s; last {self.lines[-1:]}")
            if len(self._pids) < self.ranks:
                self._find_ranks()
            time.sleep(_POLL_S)

    def _wait_for_start(self, event: Event) -> Line | None:
        deadline = time.monotonic() + LIMIT_S
        while event.rank not in self._pids:
            if self.process.poll() is not None:
                return None
            if time.monotonic() > deadline:
                raise Broken("hung: no ranks were started")
            self._find_ranks()
        until = time.monotonic() + event.delay
        while time.monotonic() < until and self.process.poll() is None:
            self.look()
            if self.lines:
                break
            time.sleep(0.01)
        return Line(time.time(), event.rank, self._pids[event.rank].pid, -1, "starting")

    def _reporter(self, event: Event) -> int:
        """Whose line counts: the victim's, where all ranks report the phase."""
        everyone = event.phase in {"staged", "writing", "uploaded", "stage-change", "validating", "training"}
        return event.rank if everyone and event.action in {"kill-rank", "evict-rank"} else 0

    def was_in(self, line: Line, event: Event) -> bool:
        """Whether the trainer was still in the phase when it was struck, by what it has reported by now."""
        self.look()
        if line.phase == "starting":
            return not any(found.step > 0 for found in self.lines)
        after = self.lines[self.lines.index(line) + 1 :]
        if event.phase == "training" or line.phase not in WRITING:
            return event.delay <= max(event.hold, 0.2)
        order = WRITING.index(line.phase)
        return not any(
            later.rank == line.rank and later.step == line.step and later.phase in WRITING[order + 1 :]
            for later in after
        )

    def _find_ranks(self) -> None:
        time.sleep(0.05)
        for child in self.family():
            with suppress(psutil.Error):
                variables = child.environ()
                if "RANK" in variables and "TORCHELASTIC_RUN_ID" in variables:
                    self._pids[int(variables["RANK"])] = child

    def family(self) -> list[psutil.Process]:
        """All processes of the attempt that were ever seen."""
        with suppress(psutil.NoSuchProcess):
            worker = psutil.Process(self.process.pid)
            for found in [worker, *worker.children(recursive=True)]:
                self._family[found.pid] = found
        return list(self._family.values())

    # -- striking

    def send(self, event: Event) -> None:
        """The signal of an event."""
        self.family()
        number = signal.SIGKILL if event.action.startswith("kill") else signal.SIGTERM
        if event.action in {"kill-worker", "evict"}:
            self.process.send_signal(number)
            return
        with suppress(psutil.NoSuchProcess):
            self._pids[event.rank].send_signal(number)

    def freeze(self) -> None:
        """All of it stands still."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        """The ranks go on first, so that they have their way before the worker looks at its lease."""
        for process in reversed(self.family()):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    # -- ending

    def end(self, limit: float = LIMIT_S) -> int:
        """The worker's exit code, when it and all that it started are gone.

        Raises:
            Broken: they are not, after `limit` seconds.
        """
        deadline = time.monotonic() + limit
        while self.process.poll() is None:
            self.family()
            if time.monotonic() > deadline:
                self.kill()
                raise Broken(f"hung: the worker did not end within {limit:.0f} s")
            time.sleep(0.02)
        _, left = psutil.wait_procs(self.family(), timeout=10)
        if left:
            names = [str(process.pid) for process in left]
            self.kill()
            raise Broken(f"processes {', '.join(names)} outlived the worker")
        self.look()
        return self.process.returncode

    def kill(self) -> None:
        """Ends whatever is left of it."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def output(self) -> str:
        """What it has printed."""
        return self.printed.read_text(errors="replace")

    def last_word(self) -> str:
        """The line that says how it ended."""
        lines = [line for line in self.output().splitlines() if line.startswith(("isthmus:", "error:"))]
        return lines[-1] if lines else ""
