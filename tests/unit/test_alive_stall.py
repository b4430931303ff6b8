"""Who is to blame for a hang, from what the ranks say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.train.stall import Position, judge, ranks_text, report

STACK = '  File "/x/loop.py", line 12, in advance\n    step()\n  File "/x/step.py", line 99, in prepare\n    wait()\n'


def at(rank: int, phase: str = "compute", **changes: Any) -> Position:
    values: dict[str, Any] = {"host": "h", "step": 7, "age": 20.0, "limit": 10.0, "collectives": 50}
    return Position(**values | {"rank": rank, "phase": phase} | changes)


def test_a_rank_without_data_is_named_with_what_its_loader_waits_for() -> None:
    late = at(1, "data", collectives=49, doing="part-0001, row group 3")
    stall = judge([at(0, "reduce"), late, at(2)])
    assert stall is not None
    assert (stall.kind, stall.ranks) == ("data", (1,))
    assert stall.cause == (
        "rank 1 of 3 made no progress for 20 s at step 7: waiting for data, part-0001, row group 3; 2 wait for it"
    )


def test_of_ranks_in_the_same_phase_the_one_that_began_fewer_exchanges_is_late() -> None:
    stall = judge([at(0, age=19.9), at(1, collectives=49, stack=STACK)])
    assert stall is not None
    assert (stall.kind, stall.ranks) == ("compute", (1,))
    assert "computing, in prepare (step.py:99); 1 waits for it" in stall.cause


def test_a_rank_that_does_not_answer_is_named() -> None:
    stall = judge([at(0), None, at(2), None])
    assert stall is not None
    assert (stall.kind, stall.ranks) == ("silent", (1, 3))
    assert stall.cause.startswith("ranks 1, 3 of 4 do not answer at step 7: stopped")


def test_all_in_the_same_exchange_is_the_network() -> None:
    stall = judge([at(rank, "reduce", stack=STACK) for rank in range(4)])
    assert stall is not None
    assert (stall.kind, stall.ranks) == ("network", ())
    assert "all 4 ranks wait in the same exchange" in stall.cause


def test_all_without_data_are_all_named() -> None:
    stall = judge([at(0, "data"), at(1, "data", age=21.0)])
    assert stall is not None
    assert (stall.kind, stall.ranks) == ("data", (0, 1))


@pytest.mark.parametrize(
    "positions",
    [
        [at(0), at(1, "checkpoint", collectives=49, limit=30.0)],
        [at(0), at(1, "data", age=3.0, collectives=49)],
        [at(0, age=1.0), at(1, age=2.0)],
        [at(0, "reduce", age=11.0), at(1, "reduce", age=9.0)],
    ],
    ids=["a long phase", "just arrived", "none is late", "one has only just begun"],
)
def test_who_may_still_take_its_time_is_not_blamed(positions: list[Position]) -> None:
    assert judge(positions) is None


def test_the_report_has_a_line_for_each_rank_and_each_stack_once() -> None:
    positions = [at(rank, stack=STACK) for rank in range(5)]
    positions[3] = at(3, "data", collectives=49, stack="elsewhere", doing="part-0001")
    stall = judge(positions)
    assert stall is not None
    text = report(stall, positions)
    assert text.startswith(stall.cause)
    assert "* rank 3 on h: step 7, waiting for data (part-0001); no progress for 20.0 s" in text
    assert text.count("in prepare") == 1
    assert "of ranks 0-2, 4, innermost call last" in text
    assert text.index("elsewhere") < text.index("in prepare"), "the one to blame comes first"
    assert Position.from_json(positions[3].to_json()) == positions[3]


def test_ranks_are_written_as_spans() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([7, 0, 1, 2]) == "ranks 0-2, 7"
