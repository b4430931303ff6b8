"""Progress, rhythms, the budget and signals."""

from __future__ import annotations

import io
import os
import signal
import time

import pytest

from isthmus.core.recipe.schema import Budget
from isthmus.core.recipe.units import Interval
from isthmus.core.train.agreement import lost_peer
from isthmus.core.train.control import BudgetWatch, Rhythm, Signals, spent_hours
from isthmus.core.train.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drive(stream: io.StringIO, **kwargs: float) -> str:
    progress = Progress(5, quiet=False, stream=stream, **kwargs)
    for step in range(1, 6):
        progress.step(step, stage="a", loss=0.5, samples_per_s=12.0, seconds=0.1)
    progress.say("a line")
    progress.close()
    return stream.getvalue()


def test_a_log_gets_lines_now_and_then_and_never_a_carriage_return() -> None:
    text = drive(io.StringIO(), interval=3600)
    assert "\r" not in text
    assert text.splitlines() == [
        "step 1/5  stage a  loss 0.5000  12 samples/s  0 s left",
        "step 5/5  stage a  loss 0.5000  12 samples/s  0 s left",
        "a line",
    ]


def test_a_terminal_gets_a_bar_that_gives_way_to_lines() -> None:
    text = drive(Terminal())
    assert "\r" in text
    assert "5/5" in text
    assert text.endswith("\ra line\n")


def test_other_ranks_are_silent() -> None:
    stream = io.StringIO()
    progress = Progress(5, quiet=True, stream=stream)
    progress.step(5, stage="a", loss=0.5, samples_per_s=1, seconds=1)
    progress.say("x")
    assert stream.getvalue() == ""


def test_rhythm_by_steps_is_of_the_step_and_by_time_of_the_clock() -> None:
    steps = Rhythm(Interval(steps=3))
    assert [step for step in range(1, 10) if steps.due(step)] == [3, 6, 9]
    assert not steps.clock_due()
    clock = Rhythm(Interval(seconds=0.02))
    assert not clock.due(3)
    deadline = time.monotonic() + 5
    while not clock.clock_due():
        assert time.monotonic() < deadline
    clock.done()
    assert not clock.clock_due()


def test_budget_counts_earlier_attempts() -> None:
    started = [
        {"attempt": 1, "time": 0.0},
        {"attempt": 2, "time": 10_000.0},
        {"attempt": 3, "time": 20_000.0},
    ]
    rows = [{"attempt": 1, "time": 3600.0}, {"attempt": 2, "time": 11_800.0}]
    assert spent_hours(started, rows, attempt=3) == pytest.approx(1.5)
    assert spent_hours(started, rows, attempt=3, now=20_900.0) == pytest.approx(1.75), (
        "it costs while it loads"
    )
    assert spent_hours(started[:2], rows, attempt=3, now=20_900.0) == pytest.approx(1.5)
    watch = BudgetWatch(Budget(max_hours=2.0, max_usd=200.0), 1.5, 100.0)
    assert watch.reached() is None
    assert BudgetWatch(Budget(max_hours=1.5), 1.5, None).reached() == "budget.max_hours 1.5 reached"
    assert "max_usd" in str(BudgetWatch(Budget(max_usd=150.0), 1.5, 100.0).reached())
    assert BudgetWatch(Budget(max_usd=150.0), 1.5, None).reached() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_noted_and_handlers_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
    assert signal.getsignal(number) is before


def test_an_echo_of_a_peers_death_is_told_from_an_own_failure() -> None:
    echo = RuntimeError("[gloo/transport/tcp/pair.cc:532] Connection closed by peer [127.0.0.1]:1234")
    assert "lost contact" in str(lost_peer(echo))
    assert lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost_peer(ValueError("Connection closed by peer")) is None
