"""Which units a rank of a job encodes: its own share first, then what slower ranks have not begun.

Every `ranks`-th unit is a rank's own. Before a unit is begun it is claimed, by a conditional create, once an attempt of the run:
so none is encoded by two ranks at a time, and which rank does it changes no byte. A claim has no time limit: a rank that is
lost ends the attempt of all, and the next attempt claims anew what is not done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from isthmus.core.encode.pieces import Unit


class Claims(Protocol):
    """The claims of one attempt."""

    def claim(self, unit: int) -> bool:
        """Whether the unit is the caller's from here on; False when another rank was first."""

    def claimed(self) -> set[int]:
        """Numbers of the units that any rank has claimed."""


def shared(
    units: Sequence[Unit], done: Collection[int], rank: int, ranks: int, claims: Claims
) -> Iterator[Unit]:
    """The units that are this rank's to encode, one when it is asked for.

    A rank without units of its own left takes the last one of whichever rank has the most that nobody has begun.

    Args:
        done: units that need no encoding, as found before this attempt's first claim was looked at.
    """
    left = [unit for unit in units if unit.number not in done]
    for unit in left:
        if unit.number % ranks == rank and claims.claim(unit.number):
            yield unit
    while True:
        taken = claims.claimed()
        left = [unit for unit in left if unit.number not in taken]
        if not left:
            return
        waiting: dict[int, list[Unit]] = {}
        for unit in left:
            waiting.setdefault(unit.number % ranks, []).append(unit)
        # Ties by distance, so that ranks which end together look at different ones.
        owner = max(waiting, key=lambda one: (len(waiting[one]), -((one - rank) % ranks)))
        unit = waiting[owner][-1]
        if claims.claim(unit.number):
            yield unit
