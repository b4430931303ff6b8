"""An encode job's ranks as one: figures of several nodes in one line, pace, hours left and dollars; the budget; a node that is gone."""

from __future__ import annotations

import heapq
import json
import time
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.encode import rank
from isthmus.core.encode.ahead import default_threads
from isthmus.core.encode.behind import WriteBehind
from isthmus.core.encode.job import Progress
from isthmus.core.encode.pieces import Unit
from isthmus.core.encode.sharing import shared
from isthmus.core.encode.team import JobTeam, Seat, Whole
from isthmus.core.recipe.schema import Budget
from isthmus.core.train.control import BudgetWatch, spent_hours
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
    run: RunDirectory, folder: Path, number: int, *, clock: Clock, said: list[str], budget: Budget | None = None,
    usd: float | None = None, spent: float = 0.0, attempt: int = 1,
) -> JobTeam:  # fmt: skip
    """Of four ranks on two nodes."""
    folder.mkdir(exist_ok=True)
    seat = Seat(rank=number, ranks=4, local_rank=number % 2, local_ranks=2, attempt=attempt)
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


def _units(count: int) -> list[Unit]:
    return [Unit(number, number, number + 1, 1, "") for number in range(count)]


def test_ranks_that_are_done_take_what_slow_ones_have_not_begun_and_nothing_twice(
    run: RunDirectory, tmp_path: Path
) -> None:
    ranks = [team(run, tmp_path / f"node{at // 2}", at, clock=Clock(), said=[]) for at in range(4)]
    lists = [shared(_units(40), {3, 4}, at, 4, ranks[at]) for at in range(4)]
    # Rank 2 is at its first unit while the others do all the rest.
    taken = {2: [next(lists[2])], 0: [], 1: [], 3: []}
    open_lists = {0, 1, 3}
    while open_lists:
        for at in sorted(open_lists):
            unit = next(lists[at], None)
            if unit is None:
                open_lists.remove(at)
            else:
                taken[at].append(unit)
    assert next(lists[2], None) is None
    numbers = [unit.number for units in taken.values() for unit in units]
    assert sorted(numbers) == [at for at in range(40) if at not in (3, 4)]
    assert [unit.number for unit in taken[2]] == [2]
    assert sorted(len(taken[at]) for at in (0, 1, 3)) == [12, 12, 13]
    assert [unit.number for unit in taken[0]][:3] == [0, 8, 12]  # its own first, in order
    assert all(unit.number % 4 == 2 for unit in taken[0][-2:])
    # Another attempt claims anew.
    again = team(run, tmp_path / "node0", 0, clock=Clock(), said=[], attempt=2)
    assert len(list(shared(_units(40), set(), 0, 4, again))) == 40


def test_a_slow_rank_holds_the_job_up_by_one_unit(run: RunDirectory, tmp_path: Path) -> None:
    """Forty units on four ranks, one of them five times slower: each own quarter would take 50 units' time."""
    ranks = [team(run, tmp_path / f"node{at // 2}", at, clock=Clock(), said=[]) for at in range(4)]
    lists = [shared(_units(40), set(), at, 4, ranks[at]) for at in range(4)]
    free = [(0.0, at) for at in range(4)]
    ended = 0.0
    while free:
        now, at = heapq.heappop(free)
        if next(lists[at], None) is not None:
            ended = max(ended, now + (5 if at == 3 else 1))
            heapq.heappush(free, (now + (5 if at == 3 else 1), at))
    assert 40 / 3.2 <= ended <= 40 / 3.2 + 5
    assert ended == 15


def test_fewer_units_than_ranks_are_told_of(run: RunDirectory, tmp_path: Path) -> None:
    said = list[str]()
    one = team(run, tmp_path / "n", 0, clock=Clock(), said=said)
    one.begin("digest", {"pictures": 10, "asked": {"units": [{}, {}, {}, {}]}}, [])
    assert said == []
    one.begin("digest", {"pictures": 10, "asked": {"units": [{}]}}, [])
    assert said[0].startswith("note: 1 work unit for 4 ranks: 3 of them will have nothing to do")


def test_a_claim_whose_answer_was_lost_is_still_the_callers(run: RunDirectory, tmp_path: Path) -> None:
    one, other = (team(run, tmp_path / f"n{at}", at, clock=Clock(), said=[]) for at in range(2))
    assert one.claim(7)
    assert one.claim(7)
    assert not other.claim(7)
    assert other.claimed() == {7}


def test_the_budget_counts_what_an_attempt_was_before_its_first_picture(run: RunDirectory) -> None:
    run.event_once(run.next_event("started", 1000.0), {"attempt": 1})
    run.event_once(run.next_event("preempted", 1000.0 + 1800), {"attempt": 1})
    run.event_once(run.next_event("started", 5000.0), {"attempt": 2})
    spent = spent_hours(run.events("started"), rank._endings(run), 2, now=5000.0 + 900)
    assert spent == pytest.approx(0.75)


def test_decoding_has_the_cores_that_encoders_on_a_gpu_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(cores: int, processes: int = 1) -> tuple[int, int]:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
        return default_threads(processes), default_threads(processes, on_gpu=True)

    assert [threads(cores) for cores in (1, 2, 3, 4, 8)] == [(1, 1), (1, 2), (1, 2), (2, 3), (4, 7)]
    assert threads(192, 8) == (12, 23)
    assert threads(4, 8) == (1, 1)
    assert threads(192) == (16, 32)
