"""An encode job's ranks as one: figures of several nodes in one line, pace, hours left and dollars; the budget; a node that is gone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.encode.behind import WriteBehind
from isthmus.core.encode.job import Progress
from isthmus.core.encode.team import JobTeam, Seat, Whole
from isthmus.core.recipe.schema import Budget
from isthmus.core.train.control import BudgetWatch
from isthmus.errors import StorageError, TrainingFailed
from isthmus.storage.rundir import RunDirectory


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def team(
    run: RunDirectory, folder: Path, rank: int, *, clock: Clock, said: list[str], budget: Budget | None = None,
    usd: float | None = None, spent: float = 0.0, attempt: int = 1,
) -> JobTeam:  # fmt: skip
    """Of four ranks on two nodes."""
    folder.mkdir(exist_ok=True)
    seat = Seat(rank=rank, ranks=4, local_rank=rank % 2, local_ranks=2, attempt=attempt)
    watch = BudgetWatch(budget or Budget(), spent, usd)
    return JobTeam(run, seat, folder, watch, out=said.append, clock=clock, every=0.01)


def done(count: int, **rejected: int) -> Progress:
    return Progress(written=count, rejected=rejected)


def test_one_line_of_all_ranks_with_pace_time_left_and_dollars(run: RunDirectory, tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    ranks = [
        team(run, tmp_path / f"node{at // 2}", at, clock=clock, said=said, usd=36.0, spent=0.5)
        for at in range(4)
    ]
    record: dict[str, Any] = {"written": 80, "counts": {"unreadable": 15, "filter-size": 5}}
    ranks[0].begin("digest", {"pictures": 1100}, [record, None])
    assert all(one.began("digest") for one in ranks)
    assert not ranks[3].began("another")
    for at, one in enumerate(ranks):
        one.note(done(20 + at, unreadable=1))
    clock.now += 10
    ranks[2].tell()
    ranks[0].tell()
    assert said[-1].startswith("encode 190/1100 pictures  4 rejected  9.0 images/s  2 min left  $18.0")
    clock.now += 90
    ranks[3].note(done(113, unreadable=1))
    ranks[2].tell()
    ranks[0].tell()
    # Of the last minute, about: the first ten seconds count no more.
    assert said[-1].startswith("encode 280/1100 pictures  4 rejected  1.0 images/s  14 min left")
    rows = run.read_metrics("encode")
    assert [(row["pictures"], row["attempt"]) for row in rows] == [(190, 1), (280, 1)]
    assert rows[-1]["usd"] == pytest.approx(18.0, abs=0.1)


def test_figures_of_an_attempt_before_are_not_counted(run: RunDirectory, tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    before = team(run, tmp_path / "node1", 2, clock=clock, said=said)
    before.note(done(500))
    before.tell()
    now = team(run, tmp_path / "node0", 0, clock=clock, said=said, attempt=2)
    now.begin("digest", {"pictures": 10}, [])
    now.note(done(3))
    clock.now += 1
    now.tell()
    assert said[-1].startswith("encode 3/10 pictures")


def test_the_budget_asks_every_worker_to_stop_once(run: RunDirectory, tmp_path: Path) -> None:
    said = list[str]()
    one = team(
        run, tmp_path / "n", 0, clock=Clock(), said=said, budget=Budget(max_usd=10), usd=4.0, spent=2.6
    )
    one.begin("digest", {"pictures": 10}, [])
    one.tell()
    one.tell()
    (event,) = run.events("stop-requested")
    assert event["by"] == "budget"
    assert "budget.max_usd 10 reached" in event["reason"]


def test_a_node_that_stands_still_is_gone_and_one_that_works_is_waited_for(
    run: RunDirectory, tmp_path: Path
) -> None:
    clock, said = Clock(), list[str]()
    waiting = team(run, tmp_path / "node0", 0, clock=clock, said=said)
    other = team(run, tmp_path / "node1", 2, clock=clock, said=said)
    for _ in range(4):
        clock.now += 400
        other.tell()
        waiting.wait()
    clock.now += 599
    waiting.wait()
    clock.now += 2
    with pytest.raises(TrainingFailed, match="node 1 has told nothing for 10 minutes"):
        waiting.wait()


def test_what_is_not_known_is_left_out() -> None:
    assert str(Whole(written=3)) == "encode 3 pictures  0 rejected  0.0 images/s"
    assert json.loads(json.dumps(Whole().row()))["usd"] is None


class _Writer:
    """Takes its time, and fails at one sample."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.taken, self.fails_at = list[int](), fails_at

    def add(self, sample: int) -> None:
        time.sleep(0.01)
        if sample == self.fails_at:
            raise StorageError("the store refuses", where="s3://bucket/x")
        self.taken.append(sample)


def test_a_slow_store_is_written_behind_the_encoders_in_order() -> None:
    writer, begun = _Writer(), time.perf_counter()
    with WriteBehind(writer) as behind:  # type: ignore[arg-type]
        for at in range(40):
            behind.add(at)  # type: ignore[arg-type]
        handed = time.perf_counter() - begun
    assert writer.taken == list(range(40))
    assert handed < 0.3 < time.perf_counter() - begun
    waiting = WriteBehind(_Writer(), waiting=4)  # type: ignore[arg-type]
    with waiting:
        begun = time.perf_counter()
        for at in range(20):
            waiting.add(at)  # type: ignore[arg-type]
        assert time.perf_counter() - begun > 0.1  # no more than four wait


def _write_all(
    writer: _Writer, count: int, *, waiting: int = 128, then: type[Exception] | None = None
) -> None:
    with WriteBehind(writer, waiting=waiting) as behind:  # type: ignore[arg-type]
        for at in range(count):
            behind.add(at)  # type: ignore[arg-type]
        if then is not None:
            raise then


def _hand_over(writer: _Writer, count: int, waiting: int = 99, *, fails: bool = False) -> None:
    with WriteBehind(writer, waiting=waiting) as behind:  # type: ignore[arg-type]
        for at in range(count):
            behind.add(at)  # type: ignore[arg-type]
        if fails:
            raise ZeroDivisionError


def test_a_writers_error_comes_out_once_and_nothing_is_written_after_it() -> None:
    for count, waiting in ((1000, 2), (6, 99)):
        writer = _Writer(fails_at=3)
        with pytest.raises(StorageError, match="the store refuses"):
            _hand_over(writer, count, waiting)
        assert writer.taken == [0, 1, 2]
    writer = _Writer()
    with pytest.raises(ZeroDivisionError):
        _hand_over(writer, 50, fails=True)
    assert len(writer.taken) < 50
