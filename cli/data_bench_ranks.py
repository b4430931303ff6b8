"""Several ranks of one world reading at the same time, each in a process of its own, as on a training node.

``python -m isthmus.cli.data_bench_ranks`` is one of them: it takes what to read from its first line of input, says when its first
batch is there, waits for a line, measures, and prints one JSON document.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import IO, Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a rank reads: the arguments of `data_bench_setup`."""

    recipe: str
    overrides: list[str]
    backend: str
    roots: list[str]
    stage: int
    access: str
    resolution: int
    batch_size: int
    lanes: int
    window: int
    memory_limit: str
    ranks: int
    depth: int | None
    seconds: float
    start_step: int


def run_ranks(task: Task, processes: int) -> list[dict[str, Any]]:
    """Measures the first `processes` ranks of a task's world together.

    Returns:
        A `stream.bench.Measurement` of each, as JSON data. All began when the last one had its first batch.

    Raises:
        UsageError: a rank refuses, with its message.
        StorageError: a rank failed while it read.
    """
    with contextlib.ExitStack() as running:
        ranks = [running.enter_context(_rank(task, number)) for number in range(processes)]
        for number, rank in enumerate(ranks):
            _expect(rank, number, "ready")
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        return [_expect(rank, number, "measured") for number, rank in enumerate(ranks)]


@contextlib.contextmanager
def _rank(task: Task, number: int) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-m", "isthmus.cli.data_bench_ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it said before it ended is read below
            process.stdin.write(json.dumps({**asdict(task), "rank": number}) + "\n")
            process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _expect(rank: subprocess.Popen[str], number: int, word: str) -> dict[str, Any]:
    from isthmus.errors import StorageError, UsageError

    assert rank.stdout is not None
    line = rank.stdout.readline()
    said: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
    if word in said:
        found: dict[str, Any] = said[word]
        return found
    kind = UsageError if said.get("exit_code") == 2 else StorageError
    if "error" not in said:
        raise kind(f"rank {number} ended without a word, with code {rank.wait()}")
    raise kind(f"rank {number}: {said['error']}", where=said.get("where"), hint=said.get("hint"))


def main(given: IO[str], out: IO[str]) -> int:
    """One rank."""
    from isthmus.errors import IsthmusError

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        return _measure(json.loads(given.readline()), given, say)
    except IsthmusError as error:
        say(error=error.message, where=error.where, hint=error.hint, exit_code=error.exit_code)
        return error.exit_code


def _measure(told: dict[str, Any], given: IO[str], say: Any) -> int:
    from isthmus.cli.data_bench_setup import setup_of
    from isthmus.storage.stream.bench import measure

    rank = told.pop("rank")
    task = Task(**told)
    setup = setup_of(task)

    def wait_for_the_others() -> None:
        say(ready={})
        if not given.readline():
            sys.exit(1)  # the parent has gone

    measured, _ = measure(
        lambda depth, step: setup.make_loader(depth, step, rank),
        task.depth,
        task.seconds,
        task.start_step,
        wait_for_the_others,
    )
    say(measured=asdict(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.stdin, sys.stdout))
