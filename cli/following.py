"""What `launch` and `resume` share: the summary, the question, and staying with the run until it ends."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from isthmus.cli.output import emit

if TYPE_CHECKING:
    from isthmus.backends.prepare import Launch
    from isthmus.backends.spec import LogLine


def run_launch(launch: Launch, folder: Path, *, yes: bool, as_json: bool) -> None:
    """Checks, shows, starts, and follows unless it is detached; exits with the run's exit code."""
    from isthmus.backends.launch import attend, lines_so_far, start
    from isthmus.backends.prepare import preflight, refuse_errors

    launch = preflight(launch)
    show_findings(launch)
    refuse_errors(launch)
    if not as_json:
        print(plan_text(launch), flush=True)
    _confirm(launch, yes=yes or as_json)
    before = lines_so_far(launch)
    handle = start(launch, folder)
    job = launch.job
    facts: dict[str, object] = {
        "run": job.run_id,
        "run_uri": job.run_uri,
        "backend": job.backend,
        "world_size": job.world_size,
        "attempt": job.attempt,
    }
    if launch.changes is not None:
        facts["changes"] = launch.changes
    if job.detach:
        emit(
            {**facts, "state": "pending"},
            as_json=as_json,
            text=f"started; next:\n{_next_commands(job.run_id)}",
        )
        return
    screen = Screen(sys.stderr if as_json else sys.stdout)
    status = attend(launch.backend, handle, screen.write, screen.say, skip=before)
    screen.clear()
    if status.ended:
        facts["exit_code"] = status.exit_code
    if status.state in ("preempted", "failed"):
        after = f"go on: isthmus resume {job.run_id}"
    else:
        after = f"next: isthmus report {job.run_id}"
    text = f"{job.run_id} {status.state}" + (f": {status.cause}" if status.cause else "") + f"\n{after}"
    emit({**facts, "state": status.state, "cause": status.cause}, as_json=as_json, text=text)
    if status.exit_code:
        raise typer.Exit(status.exit_code)


class Screen:
    """Shows a followed log: on a terminal the trainer's `step 3/10 ...` lines become one bar, elsewhere all is lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._bar = False

    def write(self, line: LogLine) -> None:
        """A line of the log."""
        match = re.match(r"step (\d+)/(\d+)  ", line.text) if self._terminal else None
        self.clear()
        if match is None:
            print(line.text, file=self._out, flush=True)
            return
        step, total = int(match[1]), max(1, int(match[2]))
        filled = 20 * min(step, total) // total
        text = f"{'█' * filled}{'·' * (20 - filled)} {line.text}"
        # A line that wraps could not be taken back.
        self._out.write(text[: shutil.get_terminal_size().columns - 1])
        self._out.flush()
        self._bar = True

    def say(self, text: str) -> None:
        """A word of the launcher itself."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the bar back."""
        if self._bar:
            self._out.write("\r\x1b[2K")
            self._out.flush()
            self._bar = False


def show_findings(launch: Launch) -> None:
    """Warnings and notes on stderr; errors are raised, by `refuse_errors`."""
    for finding in launch.findings:
        if finding.level != "error":
            fix = f" ({finding.fix})" if finding.fix else ""
            print(f"{finding.level}: {finding.message}{fix}", file=sys.stderr)


def plan_text(launch: Launch) -> str:
    """What will run, where, on what data, and where it is written."""
    from isthmus.core.recipe.summary import summary, summary_text

    job, compute = launch.job, launch.job.recipe.compute
    kind = "process" if compute.gpu == "none" else compute.gpu
    plural = "es" if kind == "process" and compute.gpus_per_node > 1 else ""
    places = [
        place
        for source in job.recipe.data.sources
        for place in ([source.uri] if isinstance(source.uri, str) else list(source.uri))
    ]
    again = f", attempt {job.attempt}" if job.attempt > 1 else ""
    lines = [
        f"run {job.run_id}{again}",
        f"  where   {job.backend}, {compute.nodes} node{'s' if compute.nodes > 1 else ''} x "
        f"{compute.gpus_per_node} {kind}{plural}, world size {job.world_size}",
        summary_text(summary(job.recipe)),
        f"  data    {', '.join(places)}",
        f"  output  {job.run_uri}",
    ]
    lines += [
        f"  changed {path}: {before} -> {now}" for path, (before, now) in (launch.changes or {}).items()
    ]
    return "\n".join(lines)


def _next_commands(run_id: str) -> str:
    return "\n".join(
        f"  isthmus {command}"
        for command in (f"status {run_id}", f"logs -f {run_id}", f"stop {run_id}", f"report {run_id}")
    )


def _confirm(launch: Launch, *, yes: bool) -> None:
    warned = any(finding.level == "warning" for finding in launch.findings)
    if warned and not yes and sys.stdin.isatty() and not typer.confirm("Launch in spite of the warnings?"):
        raise typer.Exit(0)
