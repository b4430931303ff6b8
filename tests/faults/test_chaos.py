"""The chaos script in its short form; `make chaos` is the long one, with every kind of event in every phase."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from chaos import Chaos
from chaos_events import COMBINATIONS, ENDING, PHASES, SHARES, Event, draw

pytestmark = pytest.mark.faults

SEED = 170884
"""Eight events in three attempts: each start takes seconds."""
EVENTS = 8


def test_the_same_seed_draws_the_same_events_and_a_hundred_reach_every_phase() -> None:
    for seed in range(20):
        drawn = draw(seed, 100, list(SHARES))
        assert drawn == draw(seed, 100, list(SHARES))
        events = [event for plans in drawn.values() for plan in plans for event in plan]
        assert len(events) == 100
        assert {event.phase for event in events} >= set(PHASES)
        assert {event.action for event in events} >= {
            action for both in COMBINATIONS.values() for action, _ in both
        }
        for plans in drawn.values():
            assert not any(event.action in ENDING for plan in plans for event in plan[:-1])
            assert all(Event(**event.to_json()) == event for plan in plans for event in plan)
    assert draw(1, 100, list(SHARES)) != draw(2, 100, list(SHARES))


@pytest.mark.long
def test_a_run_that_is_killed_evicted_damaged_and_contested_loses_nothing(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "chaos", SEED, EVENTS, ["disk"])
    chaos.go(3)
    print("\n".join(chaos.summary()))
    assert chaos.problems() == [], chaos.log.read_text()
    assert chaos.over
    assert chaos.state["done"] == EVENTS


@pytest.mark.long
@pytest.mark.parametrize("phase", ["staged", "writing"])
def test_an_attempt_that_slept_through_its_lease_changes_nothing_when_it_wakes(
    tmp_path: Path, phase: str
) -> None:
    """Slow: four starts. It would have cleared and written the step that its successor has committed."""
    chaos = Chaos(tmp_path / "chaos", SEED, 1, ["disk"])
    pause = Event(action="pause", phase=phase, nth=2, hold=0.25)
    chaos.state["queues"] = {"disk": [[pause.to_json()]]}
    chaos.go(1)
    assert chaos.problems() == [], chaos.log.read_text()
    assert "woke up | exit 1" in chaos.log.read_text()
