"""How many reads are in flight: against a model of a store, in a time of its own."""

from __future__ import annotations

import heapq

import pytest

from isthmus.storage.stream import depth as module
from isthmus.storage.stream.depth import Depth

BLOCK = 10_000_000


class Model:
    """Reads of one size from a store with a latency, a limit on its connections and one on the whole, and who consumes them.

    Blocks become useful `window` at a time, as the rows of a shuffle window do.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, latency_s: float, per_s: float, whole_per_s: float
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.latency_s, self.per_s, self.whole_per_s = latency_s, per_s, whole_per_s

    def run(self, depth: Depth, seconds: float, *, window: int = 16, step_s: float = 0.0) -> float:
        """Consumes for so long; the share of the time that was waited."""
        begin = self.now
        flying: list[tuple[float, float]] = []
        held, waited = 0, 0.0

        def read_on(until: float) -> None:
            nonlocal held
            while True:
                while len(flying) < depth.value and held < 4 * window:
                    rate = min(self.per_s, self.whole_per_s / max(depth.value, 1))
                    heapq.heappush(flying, (self.now + self.latency_s + BLOCK / rate, self.now))
                if not flying or flying[0][0] > until:
                    self.now = max(self.now, until)
                    return
                self.now, sent = heapq.heappop(flying)
                held += 1
                depth.read(self.now - sent, BLOCK)

        while self.now < begin + seconds:
            if held < window:
                since = self.now
                depth.waiting()
                while held < window:
                    read_on(flying[0][0] if flying else self.now)
                depth.waited()
                waited += self.now - since
            held -= window
            for _ in range(window):
                depth.served()
                read_on(self.now + step_s)
        return waited / (self.now - begin)


def test_a_far_store_gets_as_many_as_bring_more_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, latency_s=0.02, per_s=80e6, whole_per_s=2.5e9)
    depth = Depth(4, 64)
    model.run(depth, 4)
    assert depth.value >= 28


def test_more_that_bring_nothing_are_taken_back_and_not_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(monkeypatch, latency_s=0.0, per_s=3e9, whole_per_s=3e9)
    depth = Depth(4, 64)
    model.run(depth, 10)
    assert depth.value == 4


def test_a_trainer_with_time_keeps_few_in_flight_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, latency_s=0.02, per_s=80e6, whole_per_s=2.5e9)
    depth = Depth(4, 64)
    model.run(depth, 5, step_s=0.05)
    assert model.run(depth, 100, step_s=0.05) < 0.02
    assert depth.value <= 8
    # The store slows down to a quarter: more are needed, and found.
    model.per_s = 20e6
    model.run(depth, 10, step_s=0.05)
    assert model.run(depth, 20, step_s=0.05) < 0.05
    assert 8 <= depth.value <= 32


def test_a_fixed_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, latency_s=0.02, per_s=80e6, whole_per_s=2.5e9)
    depth = Depth(4, 64, fixed=6)
    model.run(depth, 5)
    assert depth.value == 6
