"""The worker, with a real torchrun, real signals and real kills around a stub of the trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isthmus.core.outcome import Death, Outcome, decide
from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.dump import dump_recipe
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir import lease as leases


class Attempt:
    """A worker process on a run directory."""

    def __init__(self, place: Path, plan: dict[str, str], *extra: str) -> None:
        self.run = RunDirectory(place / "run")
        self.ready = place / "ready"
        self.ready.mkdir(exist_ok=True)
        recipe = place / "recipe.yaml"
        recipe.write_text(dump_recipe(load_recipe("quickstart").recipe))
        self.process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "isthmus.core.worker",
                    "--recipe",
                    str(recipe),
                    "--run",
                    self.run.uri,
                ),
                *("--module", "isthmus.core.rehearsal", *extra),
            ],
            env={
                **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
                "ISTHMUS_REHEARSAL": json.dumps(plan),
                "ISTHMUS_REHEARSAL_READY": str(self.ready),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pid_of(self, rank: int, attempt: int = 1) -> int:
        """The process id of a rank, once it is ready."""
        file = self.ready / f"rank{rank}-attempt{attempt}"
        while not (file.exists() and file.read_text()):
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.02)
        return int(file.read_text())

    def end(self) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Attempt]]:
    """Starts workers on one run directory, and leaves none behind."""
    attempts: list[Attempt] = []

    def start(plan: dict[str, str], *extra: str) -> Attempt:
        attempts.append(Attempt(tmp_path, plan, *extra))
        return attempts[-1]

    yield start
    for attempt in attempts:
        if attempt.process.poll() is None:
            attempt.process.kill()
            attempt.process.wait()


def gone(pid: int, within: float = 20.0) -> bool:
    """Whether a process that is not our child ends."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_finished_is_0_with_pinned_threads_and_one_event(start: Callable[..., Attempt]) -> None:
    attempt = start({"*": "finish"})
    code, output = attempt.end()
    assert code == 0, output
    assert [event["type"] for event in attempt.run.events()] == ["started", "note", "finished"]
    started, note, _ = attempt.run.events()
    assert started["attempt"] == 1
    assert started["world_size"] == 2
    assert note["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert attempt.run.lease_token() is None, "the lease was released"


def test_the_first_cause_is_named_with_its_exit_code(start: Callable[..., Attempt]) -> None:
    attempt = start({"0": "wait", "1": "usage"})
    code, output = attempt.end()
    assert code == 2
    (failed,) = attempt.run.events("failed")
    assert failed["rank"] == 1
    assert failed["cause"] == "shard 3: no such column"
    assert "isthmus: failed: shard 3: no such column" in output
    assert "Traceback" not in output
    assert "ChildFailedError" not in output


def test_a_storage_error_is_1(start: Callable[..., Attempt]) -> None:
    attempt = start({"0": "fail", "1": "wait"})
    code, output = attempt.end()
    assert code == 1, output
    assert "the disk is full" in attempt.run.events("failed")[0]["cause"]


@pytest.mark.faults
def test_kill_9_of_a_rank_is_named(start: Callable[..., Attempt]) -> None:
    attempt = start({"*": "wait"})
    # Both have begun: torchrun ends the one that is left, which could not say any more who it is.
    other = attempt.pid_of(0)
    os.kill(attempt.pid_of(1), signal.SIGKILL)
    code, output = attempt.end()
    assert code == 1
    cause = attempt.run.events("failed")[0]["cause"]
    assert cause.startswith("rank 1 was killed by signal 9 (SIGKILL); ")
    # What the kernel counts of its own kills tells this one apart; without such a counter it is a question.
    assert "not by the kernel for want of memory" in cause or cause.endswith("out of memory?")
    assert f"isthmus: failed: {cause}" in output
    assert gone(other)


@pytest.mark.faults
def test_sigterm_is_75_after_a_checkpoint_and_the_next_attempt_goes_on(start: Callable[..., Attempt]) -> None:
    attempt = start({"*": "wait"})
    pids = [attempt.pid_of(rank) for rank in (0, 1)]
    attempt.process.send_signal(signal.SIGTERM)
    code, output = attempt.end()
    assert code == 75, output
    assert attempt.run.checkpoints() == [1]
    assert [event["type"] for event in attempt.run.events()][-1] == "preempted"
    assert all(gone(pid) for pid in pids)

    second = start({"*": "wait"})
    second.pid_of(0, attempt=2)
    second.pid_of(1, attempt=2)
    second.run.event("stop-requested", by="test")
    second.process.send_signal(signal.SIGTERM)
    code, output = second.end()
    assert code == 4, output
    assert [event["type"] for event in second.run.events()][-1] == "stopped"
    assert second.run.checkpoints() == [1, 2]

    third = start({"*": "finish"})
    code, _ = third.end()
    assert code == 4, "a cloud's own restart does not undo a stop"


@pytest.mark.faults
def test_a_deaf_rank_is_killed_within_the_grace(start: Callable[..., Attempt]) -> None:
    attempt = start({"0": "wait", "1": "deaf"}, "--grace", "3")
    deaf = attempt.pid_of(1)
    attempt.pid_of(0)
    began = time.monotonic()
    attempt.process.send_signal(signal.SIGTERM)
    code, output = attempt.end()
    assert code == 75, output
    assert time.monotonic() - began < 15
    assert gone(deaf)


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the ranks notice within a second or two")
def test_kill_9_of_the_worker_leaves_no_orphans(start: Callable[..., Attempt]) -> None:
    attempt = start({"*": "wait"})
    pids = [attempt.pid_of(rank) for rank in (0, 1)]
    attempt.process.kill()
    attempt.process.wait()
    assert all(gone(pid) for pid in pids)


@pytest.mark.faults
def test_a_second_worker_is_refused_and_a_taken_over_one_is_fenced(start: Callable[..., Attempt]) -> None:
    first = start({"*": "wait"}, "--lease-seconds", "3")
    ranks = [first.pid_of(rank) for rank in (0, 1)]
    second = start({"*": "finish"}, "--lease-wait", "0")
    code, output = second.end()
    assert code == 1
    assert "another attempt is running" in output
    assert f":{first.process.pid} holds it" in output
    # What a taker does that found the lease expired, while the first one slept.
    taker = leases.Lease(first.run._store, owner="taker", ttl=60)
    assert taker._create(2)
    code, output = first.end()
    assert code == 1
    assert "taker holds it" in output
    assert all(gone(pid) for pid in ranks)
    assert [event["type"] for event in first.run.events()] == ["started", "note"], (
        "a fenced worker writes nothing"
    )


def test_an_unreadable_recipe_is_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nnom: x\n")
    command = [sys.executable, "-m", "isthmus.core.worker", "--recipe", str(recipe), "--run", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def said(rank: int, status: str, time: float, cause: str | None = None, code: int = 1) -> Outcome:
    """An outcome."""
    return Outcome(rank, status, code, cause, time)  # type: ignore[arg-type]


def test_verdicts() -> None:
    def verdict(outcomes: list[Outcome], deaths: list[Death], **facts: bool) -> tuple[str, int, str | None]:
        facts = {"signalled": False, "stop_requested": False, **facts}
        found = decide(outcomes, deaths, ranks=2, **facts)  # type: ignore[arg-type]
        return found.status, found.exit_code, found.cause

    done = [said(0, "finished", 1), said(1, "finished", 1)]
    assert verdict(done, []) == ("finished", 0, None)
    assert verdict(done, [], signalled=True) == ("finished", 0, None)
    # The survivor of a kill complains first, as torchrun looks only now and then.
    echo = [said(0, "failed", 10.0, "connection closed by peer")]
    killed = Death(1, -9, 10.4)
    assert (
        verdict(echo, [killed, Death(0, 1, 10.4)])[2]
        == "rank 1 was killed by signal 9 (SIGKILL); out of memory?"
    )
    # A rank that failed long before torchrun's teardown killed the other is the cause.
    assert (
        verdict([said(0, "failed", 10.0, "disk full")], [Death(0, 1, 11), Death(1, -9, 41)])[2] == "disk full"
    )
    first = [said(1, "failed", 5.0, "a usage error", 2), said(0, "failed", 5.2, "peer closed")]
    assert verdict(first, [Death(0, 1, 5), Death(1, 1, 5)]) == ("failed", 2, "a usage error")
    assert verdict([said(0, "preempted", 5, code=75)], [], signalled=True) == ("preempted", 75, None)
    assert verdict([], [], signalled=True, stop_requested=True) == ("stopped", 4, None)
    assert verdict([], [], signalled=True) == ("preempted", 75, None)
    assert verdict([said(0, "stopped", 5, "budget", 4), said(1, "stopped", 5, None, 4)], []) == (
        "stopped",
        4,
        "budget",
    )
    # Another node was evicted: these ranks agreed without a signal of their own.
    assert verdict([said(0, "preempted", 5), said(1, "preempted", 5)], []) == ("preempted", 75, None)
    assert verdict([], [])[0] == "failed"
    assert verdict([said(0, "finished", 1)], [Death(1, 7, 3)])[2].startswith("rank 1 exited with 7")  # type: ignore[union-attr]


def test_a_rank_whose_parent_was_gone_before_it_looked_ends_at_once(tmp_path: Path) -> None:
    """torchrun killed while its ranks are still importing: nobody would end them."""
    ended = subprocess.run(
        [sys.executable, "-m", "isthmus.core.cluster.rank", "isthmus.core.rehearsal"],
        env={**os.environ, "ISTHMUS_RANKS_PARENT": "1", "ISTHMUS_OUTCOME_DIR": str(tmp_path), "RANK": "0"},
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
