"""What `launch` and `resume` share: the plan, the question, and staying with the run until it ends."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import typer

from isthmus.cli.output import emit

if TYPE_CHECKING:
    from isthmus.backends.prepare import Launch
    from isthmus.backends.spec import Finding, Handle, LogLine, Status
    from isthmus.backends.submission import By
    from isthmus.backends.supervisor import Look, Supervisor


def run_launch(
    make: Callable[[int], Launch],
    count: int,
    folder: Path,
    *,
    yes: bool,
    as_json: bool,
    follow: bool = False,
    by: By = "launch",
    prices: str = "",
) -> None:
    """Checks, shows, starts, and follows unless it is detached; exits with the run's exit code.

    Args:
        make: prepares the launch for the destination of that index.
        count: destinations there are.
        folder: whose commit and lock are recorded.
        follow: stay with a job that would go on by itself, too.
        by: who starts it.
        prices: a file of the user's own prices.
    """
    from isthmus.backends.failover import choose, unreachable
    from isthmus.backends.launch import lines_so_far, start
    from isthmus.backends.prepare import preflight, refuse_errors
    from isthmus.cli.budgeting import keep_estimate, with_budget
    from isthmus.errors import PreflightRefused

    launch, notes = choose(count, make, lambda launch: with_budget(preflight(launch), prices))
    show_findings([*notes, *unreachable(launch), *launch.findings])
    refuse_errors(launch)
    if not as_json:
        from isthmus.cli.plan import plan_text

        print(plan_text(launch, prices), flush=True)
    _confirm(launch, yes=yes or as_json)
    before = lines_so_far(launch)
    job = launch.job
    facts: dict[str, object] = {
        "run": job.run_id,
        "run_uri": job.run_uri,
        "backend": job.backend,
        "world_size": job.world_size,
        "attempt": job.attempt,
    }
    if job.recipe.encode is not None:
        facts["dataset"] = job.recipe.encode.dest
    if launch.changes is not None:
        facts["changes"] = launch.changes
    try:
        handle = start(launch, folder, by=by)
    except PreflightRefused as error:
        if len(launch.destinations) < 2:
            raise
        print(f"note: {launch.destinations[launch.choice]} refused: {error}", file=sys.stderr)
        look = _supervisor(job.run_uri, prices=prices).look()
        if look.did == "done":
            leave(look, facts, as_json=as_json)
        handle = look.handle
        facts["backend"] = handle.backend
    else:
        keep_estimate(launch, prices)
    if job.detach:
        if not follow:
            text = f"started; next:\n{next_commands(job.run_id, supervised=_supervised(handle.backend))}"
            emit({**facts, "state": "pending"}, as_json=as_json, text=text)
            return
        look_after(job.run_uri, job.run_id, facts, as_json=as_json, skip=before, prices=prices)
    _attend(launch, handle, facts, as_json=as_json, skip=before)


def _attend(launch: Launch, handle: Handle, facts: dict[str, object], *, as_json: bool, skip: int) -> None:
    """Stays with a job that ends with this process."""
    from isthmus.backends.launch import attend

    screen = Screen(sys.stderr if as_json else sys.stdout)
    status = attend(launch.backend, handle, screen.write, screen.say, skip=skip)
    screen.clear()
    _ended(launch.job.run_id, status, facts, as_json=as_json)


def look_after(
    run_uri: str,
    run_id: str,
    facts: dict[str, object],
    *,
    as_json: bool,
    interval: float = 15.0,
    skip: int = 0,
    log: bool = True,
    prices: str = "",
) -> NoReturn:
    """Supervises a run until it is done, with its log; exits with its exit code, or with 0 after Ctrl-C.

    Args:
        prices: a file of the user's own prices; with none a run keeps those that it was launched with.
    """
    from isthmus.backends.staying import stay

    screen = Screen(sys.stderr if as_json else sys.stdout)
    try:
        look = stay(
            _supervisor(run_uri, screen.say, prices), screen.say, write=screen.write if log else None,
            interval=interval, skip=skip,
        )  # fmt: skip
    except KeyboardInterrupt:
        screen.clear()
        text = f"{run_id} goes on; stop it: isthmus stop {run_id}\nfollow it: isthmus supervise {run_id}"
        emit({**facts, "state": "left"}, as_json=as_json, text=text)
        raise typer.Exit(0) from None
    screen.clear()
    leave(look, facts, as_json=as_json)


def _supervisor(run_uri: str, say: Callable[[str], None] = lambda text: None, prices: str = "") -> Supervisor:
    from isthmus.backends.supervisor import Supervisor
    from isthmus.cli.pricing import price_function

    return Supervisor(run_uri, price=price_function(prices), keep_prices=not prices, say=say)


def leave(look: Look, facts: dict[str, object], *, as_json: bool) -> NoReturn:
    """Says how a run ended and exits with its exit code."""
    _ended(look.handle.run_id, look.status, facts, as_json=as_json)
    raise typer.Exit(0)


def _ended(run_id: str, status: Status, facts: dict[str, object], *, as_json: bool) -> None:
    if status.ended:
        facts["exit_code"] = status.exit_code
    resumable = status.state in ("preempted", "failed")
    look = f"isthmus data verify {facts['dataset']}" if "dataset" in facts else f"isthmus report {run_id}"
    after = f"go on: isthmus resume {run_id}" if resumable else f"next: {look}"
    text = f"{run_id} {status.state}" + (f": {status.cause}" if status.cause else "") + f"\n{after}"
    emit({**facts, "state": status.state, "cause": status.cause}, as_json=as_json, text=text)
    if status.exit_code:
        raise typer.Exit(status.exit_code)


class Screen:
    """Shows a followed log: on a terminal `step 3/10 ...` and `encode 3/10 ...` lines become one bar, elsewhere all is lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._bar = False

    def write(self, line: LogLine) -> None:
        """A line of the log."""
        match = re.match(r"(?:step|encode) (\d+)/(\d+) ", line.text) if self._terminal else None
        self.clear()
        if match is None:
            print(f"[{line.node}] {line.text}" if line.node else line.text, file=self._out, flush=True)
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


def show_findings(findings: list[Finding]) -> None:
    """Warnings and notes on stderr; errors are raised, by `refuse_errors`."""
    for finding in findings:
        if finding.level != "error":
            fix = f" ({finding.fix})" if finding.fix else ""
            print(f"{finding.level}: {finding.message}{fix}", file=sys.stderr)


def next_commands(run_id: str, *, supervised: bool) -> str:
    """What to type next, exactly."""
    words = [f"status {run_id}", f"logs -f {run_id}", f"stop {run_id}", f"report {run_id}"]
    if supervised:
        words.insert(0, f"supervise {run_id}")
    return "\n".join(f"  isthmus {word}" for word in words)


def _supervised(backend: str) -> bool:
    """Whether a preempted job of that backend waits for a supervisor."""
    from isthmus.backends.registry import get_backend
    from isthmus.backends.spec import Capability

    return Capability.RESTARTS not in get_backend(backend).capabilities


def _confirm(launch: Launch, *, yes: bool) -> None:
    """On a terminal: where it costs money, or in spite of warnings."""
    from isthmus.backends.spec import Capability

    if yes or not sys.stdin.isatty():
        return
    question = None
    if Capability.ATTACHED not in launch.backend.capabilities:
        question = f"Submit to {launch.backend.name}?"
    if any(finding.level == "warning" for finding in launch.findings):
        question = "Launch in spite of the warnings?"
    if question is not None and not typer.confirm(question):
        raise typer.Exit(0)
