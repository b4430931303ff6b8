"""What can happen to a run, and the drawing of what does: a seed gives the same events, in the same order, each time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PHASES = (
    "starting", "training", "staged", "writing", "uploaded", "before-commit", "committed", "pruning", "stage-change",
    "validating",
)  # fmt: skip
"""Those of `isthmus.core.train.phases`, which the trainer reports itself, and two between its lines: starting (the ranks
are there, the first line is not) and training (some moment after a checkpoint was staged)."""

WRITING = ("staged", "writing", "uploaded", "before-commit", "committed", "pruning")
"""One follows the other in the life of a checkpoint."""

ENDING = {"kill-rank", "kill-worker", "evict", "evict-rank", "fill-disk", "pause"}
"""Actions after which an attempt is over."""
BETWEEN = {"flip", "resize"}
"""Actions before an attempt starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happens.

    kill-rank       SIGKILL to a rank
    kill-worker     SIGKILL to the worker
    evict           SIGTERM to the worker
    evict-rank      SIGTERM to a rank
    fill-disk       the run directory's file system is filled to the last byte
    pause           the worker and all ranks stand still for longer than the lease lasts, another attempt takes over,
                    then they wake up (`thaw`, an event of the next attempt, in a phase of that one)
    second          a second worker on the same run directory while the first is at work
    unavailable     the store answers every request with 503, or refuses connections, for `seconds`
    flip            one byte of the newest checkpoint is changed before the next attempt
    resize          the next attempt has `size` ranks
    """

    action: str
    phase: str = ""
    nth: int = 1
    """Which one in the attempt, counted from the event before."""
    rank: int = 0
    hold: float = 0.0
    """How long the phase is made to last at least, in seconds."""
    delay: float = 0.0
    """Seconds after the trainer's line: less than `hold` is before the phase's work, more is amid it or after it."""
    seconds: float = 0.0
    size: int = 0
    place: float = 0.0
    """Of a flip: which byte, as a share of the whole."""

    def to_json(self) -> dict[str, Any]:
        """For the state file."""
        return asdict(self)


Plan = list[Event]
"""The events of one attempt: those before it, those during it, and one that ends it."""

COMBINATIONS: dict[str, list[tuple[str, str]]] = {
    "disk": [
        *(("kill-rank", phase) for phase in PHASES),
        *(("kill-worker", p) for p in ("starting", "training", "writing", "before-commit", "pruning", "stage-change")),
        *(("evict", phase) for phase in ("starting", "training", "writing", "before-commit", "pruning", "validating")),
        *(("evict-rank", phase) for phase in ("staged", "stage-change")),
        *(("fill-disk", phase) for phase in ("staged", "writing", "before-commit")),
        *(("second", phase) for phase in ("training", "staged", "writing", "before-commit", "validating")),
        *(("pause", phase) for phase in ("staged", "writing", "before-commit")),
        *[("flip", "")] * 4,
    ],
    "store": [
        *(("unavailable", phase) for phase in PHASES),
        *(("kill-rank", phase) for phase in ("writing", "uploaded", "before-commit", "pruning")),
        ("kill-worker", "uploaded"),
        ("evict", "writing"),
        ("second", "staged"),
        ("flip", ""),
    ],
    "sizes": [
        *(("kill-rank", phase) for phase in ("training", "writing", "before-commit", "stage-change")),
        *(("evict", phase) for phase in ("training", "staged", "validating")),
        ("evict-rank", "pruning"),
        ("kill-worker", "committed"),
        *[("flip", "")] * 2,
    ],
}  # fmt: skip
"""Kind of course -> what can happen in it. Each comes once before any comes twice."""

SHARES = {"disk": 0.48, "store": 0.24, "sizes": 0.28}
"""Kind -> its share of all events."""
SIZES = (1, 2, 4)


def draw(seed: int, count: int, kinds: Sequence[str], *, together: int = 2) -> dict[str, list[Plan]]:
    """Kind -> the plans of its attempts; `count` events in all.

    Args:
        together: events during an attempt before the one that ends it, at most.
    """
    total = sum(SHARES[kind] for kind in kinds)
    drawn: dict[str, list[Plan]] = {}
    left = count
    for kind in kinds:
        share = left if kind == kinds[-1] else round(count * SHARES[kind] / total)
        left -= share
        drawn[kind] = _plans(random.Random(f"{seed} {kind}"), kind, share, together)
    return drawn


def _plans(dice: random.Random, kind: str, count: int, together: int) -> list[Plan]:
    plans: list[Plan] = [[]]
    deck: list[tuple[str, str]] = []
    size, made = 2, 0

    def close() -> None:
        plans.append([])

    while made < count:
        plan = plans[-1]
        if kind == "sizes" and not plan and dice.random() < 0.75:
            size = dice.choice([other for other in SIZES if other != size])
            plan.append(Event(action="resize", size=size))
            made += 1
            continue
        if not deck:
            deck = dice.sample(COMBINATIONS[kind], len(COMBINATIONS[kind]))
        action, phase = deck.pop()
        event = _event(dice, action, phase, size)
        during = [known for known in plan if known.action not in BETWEEN]
        if action in BETWEEN and (during or not any(plans[:-1])):
            # Between two attempts: there must have been one, and this one has begun.
            if not any(plans[:-1]):
                deck.insert(0, (action, phase))
                continue
            close()
            plan = plans[-1]
        if phase == "starting" and during:
            # That is over by then.
            if any(other != "starting" for _, other in deck):
                deck.insert(0, (action, phase))
                continue
            close()
            plan, during = plans[-1], []
        plan.append(event)
        made += 1
        if action in ENDING or len(during) + 1 >= together + 1:
            close()
    return [plan for plan in plans if plan]


def _event(dice: random.Random, action: str, phase: str, size: int) -> Event:
    hold, delay = 0.0, 0.0
    if phase == "starting":
        delay = dice.uniform(0.0, 5.0)
    elif phase == "training":
        delay = dice.uniform(0.0, 0.2)
    elif phase:
        hold = 0.25
        # Before the phase's work, or while it is done: that takes a few milliseconds here.
        delay = dice.uniform(0.0, 0.2) if dice.random() < 0.5 else hold + dice.uniform(0.0, 0.012)
    if action in {"second", "unavailable", "pause", "fill-disk"}:
        delay = 0.0
    nth = dice.randint(1, 3) if phase in {"training", *WRITING} else 1
    return Event(
        action=action,
        phase=phase,
        nth=nth,
        rank=dice.randrange(size),
        hold=hold,
        delay=delay,
        seconds=dice.uniform(1.0, 4.0) if action == "unavailable" else 0.0,
        place=dice.random(),
    )
