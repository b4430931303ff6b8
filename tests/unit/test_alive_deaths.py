"""Causes of death: what the kernel's counters, the fault handler and the ranks' own words add up to."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from isthmus.core.outcome import Death, Outcome, decide
from isthmus.core.telemetry.deaths import KillCounter, keep_logs, last_place
from isthmus.storage.rundir import RunDirectory

KILLED = Death(1, -9, 5.0)


def write(root: Path, kills: int, limit: str = "16000000000") -> None:
    root.mkdir(exist_ok=True)
    (root / "memory.events").write_text(f"low 0\noom 3\noom_kill {kills}\n")
    (root / "memory.max").write_text(f"{limit}\n")


def test_a_kill_by_the_kernel_is_told_from_one_by_somebody(tmp_path: Path) -> None:
    write(tmp_path / "cgroup", 2)
    kills = KillCounter(tmp_path / "none", tmp_path / "cgroup")
    assert kills.explain() == "not by the kernel for want of memory: something on this machine sent it"
    write(tmp_path / "cgroup", 3)
    assert kills.explain() == "the kernel killed it for want of memory (the container's limit is 16.0 GB)"
    write(tmp_path / "cgroup", 4, "max")
    assert kills.explain() == "the kernel killed it for want of memory"


def test_version_1_groups_and_the_machines_counter_are_asked_too(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 7\n")
    kills = KillCounter(tmp_path, tmp_path / "none")
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 8\n")
    assert kills.explain() == "the kernel killed it for want of memory"
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    kills = KillCounter(tmp_path, tmp_path)
    assert kills.explain() is not None
    assert KillCounter(tmp_path / "none", tmp_path / "none").explain() is None


def test_a_crash_in_native_code_names_the_python_line(tmp_path: Path) -> None:
    code = (
        "import faulthandler, sys\n"
        "faulthandler.enable(file=open(sys.argv[1], 'a'))\n"
        "def forward():\n"
        "    faulthandler._sigsegv()\n"
        "forward()\n"
    )
    (tmp_path / "crash.py").write_text(code)
    file = tmp_path / "stack-rank1.txt"
    done = subprocess.run([sys.executable, str(tmp_path / "crash.py"), str(file)], check=False)
    place = last_place(file)
    assert place == "forward (crash.py:4)"
    death = Death(1, done.returncode, 5.0, place=place)
    assert death.describe() == "rank 1 was killed by signal 11 (SIGSEGV) in forward (crash.py:4)"


def test_the_training_thread_is_found_among_others(tmp_path: Path) -> None:
    file = tmp_path / "stack.txt"
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    with file.open("w") as stream:
        faulthandler.dump_traceback_later(0.01, file=stream)
        threading.Event().wait(0.3)
    stop.set()
    other.join()
    text = file.read_text()
    assert text.count("Thread 0x") >= 2  # a test runner may have more
    place = last_place(file)
    assert place is not None
    assert place.startswith("wait (threading.py")
    assert last_place(tmp_path / "none") is None


def test_what_memory_counters_say_is_in_the_cause() -> None:
    assert KILLED.describe().endswith("; out of memory?")
    known = Death(1, -9, 5.0, memory="the kernel killed it for want of memory")
    verdict = decide([], [known], ranks=2, signalled=False, stop_requested=False)
    assert verdict.cause == "rank 1 was killed by signal 9 (SIGKILL); the kernel killed it for want of memory"


def test_the_watchdogs_word_counts_before_any_echo() -> None:
    echo = Outcome(0, "failed", 1, "rank 0 lost contact with another rank", 1.0)
    told = Outcome(2, "preempted", 75, "rank 1 of 3 does not answer", 2.0, culprit=1, decisive=True)
    verdict = decide([echo, told], [Death(1, -9, 3.0)], ranks=3, signalled=False, stop_requested=False)
    assert (verdict.status, verdict.exit_code, verdict.rank) == ("preempted", 75, 1)
    assert verdict.cause == "rank 1 of 3 does not answer"
    stopped = decide([told], [], ranks=3, signalled=True, stop_requested=True)
    assert stopped.exit_code == 4, "a stop that was asked for stays one"


def test_a_rank_that_names_another_passes_the_blame_on() -> None:
    told = Outcome(0, "failed", 1, "rank 5 failed: out of memory", 1.0, culprit=5)
    assert decide([told], [], ranks=1, signalled=False, stop_requested=False).rank == 5


def test_what_ranks_left_is_kept_in_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flight_0").write_bytes(b"recording")
    (tmp_path / "stack-rank0.txt").write_text("Fatal")
    (tmp_path / "stack-rank1.txt").touch()
    run = RunDirectory(tmp_path / "run")
    keep_logs(run, tmp_path, 3)
    logs = sorted(path.name for path in (tmp_path / "run/logs/attempt3").iterdir())
    assert logs == ["flight_0", "stack-rank0.txt"]
    (tmp_path / "file").touch()
    keep_logs(RunDirectory(tmp_path / "file"), tmp_path, 3)
    assert "could not be kept" in caplog.text
