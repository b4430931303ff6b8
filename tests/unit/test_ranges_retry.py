"""The loop around every try: what is tried again, for how long, and who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from isthmus.errors import StorageError
from isthmus.storage.ranges.causes import Kind, ReadFailed, by_status
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.pace import Pace
from isthmus.storage.ranges.retry import Gate, Retry, RetryPolicy, gate_of


class Refused(Exception):
    """What an HTTP client raises, by its shape."""

    def __init__(self, status: int, retry_after: str | None = None) -> None:
        super().__init__(f"status {status}, https://store/x?sig=SECRET")
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": retry_after}


def failing(*failures: Exception) -> Callable[[], str]:
    """A try that fails so often, then succeeds."""
    left = list(failures)

    def attempt() -> str:
        if left:
            raise left.pop(0)
        return "bytes"

    return attempt


def retry(policy: RetryPolicy | None = None, store: str = "s3://one") -> Retry:
    policy = policy or RetryPolicy(budget_s=5, first_delay_s=0.01)
    return Retry("s3://one/data", policy, Counters(), store=store)


def test_passing_failures_are_tried_again_and_counted() -> None:
    loop = retry()
    attempt = failing(ConnectionResetError(104, "reset"), TimeoutError(), Refused(500), OSError(116, "stale"))
    assert loop.run("a", attempt) == "bytes"
    assert loop.counters.count("requests") == 5
    assert loop.counters.count("retries") == 4


def test_the_budget_counts_from_the_first_failure_and_the_line_says_how_often_how_long_and_why() -> None:
    loop = retry(RetryPolicy(budget_s=0.3, first_delay_s=0.05))
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        loop.run("part-1", failing(*[Refused(502)] * 1000))
    assert 0.25 < time.monotonic() - began < 3
    line = str(caught.value)
    assert line.startswith("s3://one/data/part-1: cannot read: the store failed (502), tried ")
    assert "times in 0." in line
    assert "SECRET" not in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("status", "words"), [(403, "denies access"), (401, "credentials"), (400, "refused the request")]
)
def test_final_refusals_are_not_tried_again(status: int, words: str) -> None:
    loop = retry()
    with pytest.raises(StorageError, match=words):
        loop.run("a", failing(*[Refused(status)] * 9))
    assert loop.counters.count("requests") == 1


def test_credentials_are_refreshed_once() -> None:
    refreshed: list[int] = []

    def refresh() -> bool:
        refreshed.append(1)
        return True

    loop = retry()
    assert loop.run("a", failing(Refused(403)), refresh=refresh) == "bytes"
    with pytest.raises(StorageError, match="tried 2 times"):
        loop.run("a", failing(Refused(403), Refused(403)), refresh=refresh)
    assert len(refreshed) == 2


def test_a_missing_file_and_a_mistake_of_ours_pass_through() -> None:
    loop = retry()
    with pytest.raises(FileNotFoundError, match="s3://one/data/a"):
        loop.run("a", failing(Refused(404)))
    with pytest.raises(KeyError):
        loop.run("a", failing(KeyError("x")))


def test_retry_after_is_respected_by_all_threads_of_a_store_and_by_nobody_else() -> None:
    policy = RetryPolicy(budget_s=30, first_delay_s=0.01)
    first, neighbour, stranger = retry(policy), retry(policy), retry(policy, "s3://two")
    began = time.monotonic()
    waited: dict[str, float] = {}

    def read(name: str, loop: Retry) -> None:
        loop.run(name, failing())
        waited[name] = time.monotonic() - began

    threads = [threading.Thread(target=lambda: first.run("a", failing(Refused(429, "0.4"))))]
    threads[0].start()
    deadline = time.monotonic() + 5
    while not first.gate.wait_s() and time.monotonic() < deadline:
        time.sleep(0.005)
    threads += [threading.Thread(target=read, args=pair) for pair in (("near", neighbour), ("far", stranger))]
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert waited["far"] < 0.3
    assert waited["near"] >= 0.35
    assert first.counters.count("throttled") == 1


def test_the_gate_pauses_longer_each_time_and_not_once_per_request_in_flight() -> None:
    policy = RetryPolicy(first_delay_s=0.1, max_delay_s=1)
    gate = Gate()
    sent = time.monotonic()
    for _ in range(20):
        gate.throttled(sent, None, policy)
    assert 0 < gate.wait_s() <= 0.2
    for _ in range(10):
        gate.throttled(time.monotonic() + 100, None, policy)
    assert 0.9 < gate.wait_s() <= 2
    for _ in range(20):
        gate.served()
    assert gate_of("s3://one") is not gate_of("s3://two")


def test_close_wakes_sleepers_at_once() -> None:
    loop = retry(RetryPolicy(budget_s=60, first_delay_s=60, max_delay_s=60))
    threading.Timer(0.05, loop.close).start()
    began = time.monotonic()
    with pytest.raises(StorageError, match="the reader was closed"):
        loop.run("a", failing(*[ReadFailed(Kind.PASSING, "x")] * 1000))
    assert time.monotonic() - began < 5


def test_slow_reads_are_known_after_a_few_and_second_requests_are_few() -> None:
    pace = Pace(RetryPolicy(hedge_factor=3, hedge_share=0.03))
    assert pace.slow_after_s(1000) is None
    for _ in range(20):
        pace.served(1000, 0.1)
    assert pace.slow_after_s(1000) == pytest.approx(0.3)
    assert pace.slow_after_s(1_000_000) is None
    assert sum(pace.may_hedge() for _ in range(100)) <= 2
    assert Pace(RetryPolicy(hedge=False)).slow_after_s(1000) is None


def test_retry_after_may_be_a_date() -> None:
    cause = by_status(503, "SlowDown", "Wed, 21 Oct 2015 07:28:00 GMT")
    assert cause is not None
    assert cause.kind is Kind.THROTTLED
    assert cause.retry_after_s == 0


def test_counters_tell_percentiles_and_a_histogram() -> None:
    counters = Counters()
    for milliseconds in range(1, 1001):
        counters.observe(milliseconds / 1000)
    counters.observe(100)
    seen = counters.snapshot()
    latency, histogram = seen["latency_s"], seen["latency_histogram"]
    assert isinstance(latency, dict)
    assert isinstance(histogram, dict)
    assert latency["p50"] == pytest.approx(0.5, rel=0.1)
    assert latency["p90"] == pytest.approx(0.9, rel=0.1)
    assert latency["max"] == 100
    assert sum(histogram.values()) == 1001
    assert histogram["<=1"] == 1
    assert histogram["<=512"] == 256
    assert histogram[">65536"] == 1
