"""One status out of a cloud's word and the run directory's events."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.backends.names import AZURE_ALLOWED, AZURE_LIMIT, SAGEMAKER_LIMIT, job_name
from isthmus.backends.settle import NativeState, settle


def event(type: str, time: float = 0.0, **fields: Any) -> dict[str, Any]:
    """An event."""
    return {"type": type, "time": time, **fields}


SUBMITTED = event("submitted", job_id="j-01")
STARTED = event("started", attempt=3, job="j-01")


def settled(native: NativeState, *events: dict[str, Any], **facts: Any) -> tuple[str, int | None, str | None]:
    """State, exit code and cause of job j-01."""
    status = settle(native, [SUBMITTED, *events], job_id="j-01", **facts)
    return status.state, status.exit_code, status.cause


@pytest.mark.parametrize("native", ["pending", "running", "restarting"])
def test_of_a_living_job_the_clouds_word_counts(native: NativeState) -> None:
    assert settled(native, STARTED)[:2] == (native, None)
    old = [STARTED, event("preempted", cause="evicted", exit_code=75)]
    assert settled(native, *old)[:2] == (native, None)
    assert settled("restarting", *old)[2] == "evicted"
    assert settle(native, [SUBMITTED, STARTED], job_id="j-01").attempt == 3


def test_of_an_ended_job_the_events_count() -> None:
    assert settled("finished", STARTED, event("finished", exit_code=0)) == ("finished", 0, None)
    evicted = event("preempted", exit_code=75, cause="evicted")
    assert settled("failed", STARTED, evicted, cause="ExitCode 75") == ("preempted", 75, "evicted")
    failed = event("failed", exit_code=2, cause="no such column")
    assert settled("failed", STARTED, failed, cause="AlgorithmError") == ("failed", 2, "no such column")
    assert settled("stopped", STARTED, event("stopped", exit_code=4, cause="budget")) == (
        "stopped", 4, "budget",
    )  # fmt: skip
    # A supervisor ended it for good after an eviction.
    assert settled("failed", STARTED, evicted, event("stopped", cause="10 restarts"))[0] == "stopped"
    # The cloud's own restart began another attempt, which finished.
    assert (
        settled("finished", STARTED, evicted, {**STARTED, "attempt": 4}, event("finished"))[0] == "finished"
    )


def test_a_stop_by_the_budget_says_which_cap() -> None:
    ended = event("stopped", exit_code=4)
    rank = event("stop-requested", by="budget", reason="budget.max_usd 5 reached (0.10 h at 50)")
    assert settled("finished", STARTED, rank, ended) == ("stopped", 4, rank["reason"])
    supervisor = event("stop-requested", by="budget", cause="budget.max_hours 2 reached")
    assert settled("stopped", STARTED, supervisor, ended) == ("stopped", 4, supervisor["cause"])
    assert settled("stopped", STARTED, event("stop-requested", by="user"), ended) == ("stopped", 4, None)


def test_the_first_cause_in_time_counts_and_an_echo_last() -> None:
    lost = event("failed", 10, at=9.0, cause="rank 0 lost contact with another rank", echo=True)
    killed = event("failed", 12, at=9.1, cause="rank 9 was killed by signal 9", node=1)
    later = event("failed", 11, at=9.4, cause="rank 5 found a closed file", node=2)
    assert settled("failed", STARTED, lost, later, killed)[2] == killed["cause"]
    assert settled("failed", STARTED, lost)[2] == lost["cause"]
    # Node 0 was evicted; node 1's ranks only lost it.
    assert settled("failed", STARTED, {**lost, "node": 1}, event("preempted", exit_code=75))[:2] == (
        "preempted", 75,
    )  # fmt: skip


def test_a_job_that_ended_without_a_word() -> None:
    assert settled("interrupted", STARTED, cause="spot capacity") == ("preempted", 75, "spot capacity")
    assert settled("interrupted")[:2] == ("preempted", 75)
    assert settled("failed", STARTED, exit_code=75)[:2] == ("preempted", 75)
    assert settled("failed", STARTED, cause="CapacityError") == ("failed", 1, "CapacityError")
    assert settled("failed", exit_code=2, cause="the image lacks torch")[:2] == ("failed", 2)
    assert settled("failed", exit_code=137)[:2] == ("failed", 1)
    assert settled("stopped", STARTED)[:2] == ("stopped", 4)
    # Asked to stop, and killed before it could say so: not to be restarted.
    assert settled("interrupted", STARTED, event("stop-requested"))[:2] == ("stopped", 4)
    state, code, cause = settled("finished", STARTED)
    assert (state, code) == ("failed", 1)
    assert "tells of no end" in str(cause)


def test_only_the_jobs_own_time_counts() -> None:
    before = [event("submitted", job_id="j-00"), event("started", attempt=1), event("finished", exit_code=0)]
    events = [
        *before,
        SUBMITTED,
        STARTED,
        event("preempted", exit_code=75),
        event("submitted", job_id="j-02"),
    ]
    events += [event("started", attempt=4), event("failed", cause="disk full")]
    assert settle("failed", events, job_id="j-01").state == "preempted"
    assert settle("failed", events, job_id="j-02").cause == "disk full"
    assert settle("finished", events, job_id="j-00").state == "finished"
    assert settle("failed", events).cause == "disk full"
    # Submitted by somebody whose event is not there: nothing of others is taken for its own.
    assert settle("failed", events, job_id="j-09", cause="no image").cause == "no image"
    copied = [*before, {**STARTED, "job": "j-09"}, event("failed", cause="boom")]
    assert settle("failed", copied, job_id="j-09").cause == "boom"


def test_names_of_jobs() -> None:
    assert (
        job_name("sdxl-20261130-191500-a1b2c3", 1, limit=SAGEMAKER_LIMIT) == "sdxl-20261130-191500-a1b2c3-01"
    )
    assert job_name("run", 100, limit=SAGEMAKER_LIMIT) == "run-100"
    long = "x" * 128
    names = {
        job_name(run, attempt, limit=SAGEMAKER_LIMIT)
        for run in (long, f"{long}y", "a.b", "a_b", "a-b", "...", "a--", "-")
        for attempt in (1, 2)
    }
    assert len(names) == 16, "what is cut or changed stays unique"
    import re

    for name in names:
        assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name), name
        assert len(name) <= 63
        assert re.search(r"-\d\d$", name)
    assert job_name("a_b", 1, limit=AZURE_LIMIT, allowed=AZURE_ALLOWED) == "a_b-01"
    assert job_name(long, 1, limit=AZURE_LIMIT, allowed=AZURE_ALLOWED) == f"{long}-01"
