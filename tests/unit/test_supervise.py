"""The supervisor's decision is pure, and its loop does what was decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.backends.spec import Status
from isthmus.backends.supervise import Limits, hours_run, next_action, supervise
from isthmus.storage.rundir import RunDirectory

LIMITS = Limits(max_restarts=2)


def history(*words: str) -> list[dict[str, Any]]:
    """Events an hour apart."""
    return [{"type": word, "time": 3600.0 * index} for index, word in enumerate(words)]


PREEMPTED = Status(state="preempted", exit_code=75)


@pytest.mark.parametrize(
    ("words", "status", "kind"),
    [
        (["submitted"], Status(state="pending"), "wait"),
        (["submitted", "started"], Status(state="running"), "wait"),
        (["submitted", "started", "preempted"], PREEMPTED, "restart"),
        (["submitted", *["started", "preempted"] * 3], PREEMPTED, "done"),
        (["submitted", *["started", "preempted"] * 3, "submitted", "started", "preempted"], PREEMPTED, "restart"),
        (["submitted", "started", "stop-requested", "preempted"], PREEMPTED, "done"),
        (["submitted", "started", "stop-requested", "stopped", "submitted", "started", "preempted"], PREEMPTED, "restart"),
        (["submitted", "started", "failed"], Status(state="failed", exit_code=1), "done"),
        (["submitted", "started", "finished"], Status(state="finished", exit_code=0), "done"),
    ],
)  # fmt: skip
def test_decisions(words: list[str], status: Status, kind: str) -> None:
    assert next_action(history(*words), status, LIMITS, 3600.0 * len(words)).kind == kind


def test_a_stop_that_came_too_late_ends_with_4() -> None:
    action = next_action(
        history("submitted", "started", "stop-requested", "preempted"), PREEMPTED, LIMITS, 9e9
    )
    assert action.status is not None
    assert (action.status.state, action.status.exit_code) == ("stopped", 4)


def test_budgets() -> None:
    events = history("submitted", "started", "preempted", "started")
    running = Status(state="running")
    for limits in (
        Limits(max_restarts=9, max_hours=2.5),
        Limits(max_restarts=9, max_usd=25, price=lambda hours: 10 * hours),
    ):
        assert next_action(events, running, limits, 4.4 * 3600).kind == "wait"
        action = next_action(events, running, limits, 4.6 * 3600)
        assert action.kind == "stop"
        assert action.why is not None
        assert action.why.startswith("budget.max_")
        asked = [*events, {"type": "stop-requested", "time": 4.6 * 3600}]
        assert next_action(asked, running, limits, 5 * 3600).kind == "wait", "it asks once"
        ended = next_action([*events, {"type": "preempted", "time": 4.6 * 3600}], PREEMPTED, limits, 5 * 3600)
        assert ended.status is not None
        assert ended.status.state == "stopped"


def test_hours_leave_out_the_time_between_attempts() -> None:
    assert hours_run(history("submitted", "started", "preempted", "note", "started", "finished"), 9e9) == 2.0
    # An attempt that died without a word counts to the last that was heard of it.
    assert hours_run(history("started", "checkpoint-committed", "submitted", "started"), 5 * 3600) == 4.0


WORDS = ["submitted", "started", "preempted", "failed", "finished", "stopped", "stop-requested", "note"]


@given(st.lists(st.sampled_from(WORDS), max_size=20), st.integers(0, 3))
def test_it_never_restarts_beyond_its_limits(words: list[str], max_restarts: int) -> None:
    events = history(*words)
    action = next_action(
        events, PREEMPTED, Limits(max_restarts=max_restarts, max_hours=3), 3600.0 * len(words)
    )
    last = len(words) - 1 - words[::-1].index("submitted") if "submitted" in words else 0
    if action.kind == "restart":
        assert words[last:].count("started") <= max_restarts
        assert "stop-requested" not in words[last:]
        assert hours_run(events, 3600.0 * len(words)) < 3


class Scripted:
    """A runner whose attempts end as told."""

    def __init__(self, run: RunDirectory, endings: list[str]) -> None:
        self.run, self.endings, self.begun = run, endings, 0

    def start(self) -> None:
        self.begun += 1
        self.run.event("started", attempt=self.begun)
        self.run.event(self.endings[self.begun - 1])

    def status(self) -> Status:
        word = self.endings[self.begun - 1]
        return PREEMPTED if word == "preempted" else Status(state="finished", exit_code=0)

    def stop(self) -> None:
        raise AssertionError("nobody asked")

    def wait(self, seconds: float) -> None:
        raise AssertionError("it has ended")

    def interrupted(self) -> bool:
        return False


def test_the_loop_restarts_until_it_finishes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.event("submitted")
    runner = Scripted(run, ["preempted", "preempted", "finished"])
    runner.start()
    assert supervise(run, runner, LIMITS).state == "finished"
    assert runner.begun == 3


def test_the_loop_gives_up_and_says_why(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.event("submitted")
    runner = Scripted(run, ["preempted"] * 9)
    runner.start()
    status = supervise(run, runner, LIMITS)
    assert (status.state, status.exit_code) == ("preempted", 75)
    assert run.events("note")[-1]["text"] == "not restarted: preempted 3 times, compute.max_restarts is 2"
