"""Which world sizes lanes and batch sizes admit, and what to change for another one: world size | lanes | batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, isqrt, log

MOST_LISTED = 16
"""A message lists so many world sizes; of more it shows the smallest, the nearest and the largest."""


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending."""
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in reversed(low) if divisor * divisor != number]


def listed(sizes: Sequence[int], near: int) -> str:
    """`sizes`, ascending, for a message: all of them, or the ends and those next to `near` with dots between."""
    if len(sizes) <= MOST_LISTED:
        return ", ".join(map(str, sizes))
    ends, around = 2, MOST_LISTED // 2
    at = sum(size < near for size in sizes)
    start = min(max(0, at - around // 2), len(sizes) - around)
    shown = {*range(ends), *range(start, start + around), *range(len(sizes) - ends, len(sizes))}
    parts, last = [], -1
    for number in sorted(shown):
        parts += ["..."] if number > last + 1 else []
        parts.append(str(sizes[number]))
        last = number
    return f"{', '.join(parts)} ({len(sizes)} in all)"


def nearest_change(world_size: int, lanes: int, batches: Mapping[str, int]) -> str:
    """What to set so that `world_size` ranks can share the lanes and the lanes every batch.

    The batch sizes stay where lanes near the present ones divide them. Where none do, the lanes become a multiple
    of the world size near by, and a batch keeps its rows of a lane, if that changes it by an eighth at most.

    Args:
        batches: the setting's name, such as `stages.0.global_batch_size` -> its value, of every stage.
    """
    new = _lanes_within(lanes, gcd(*batches.values()), multiple_of=world_size)
    changed: dict[str, int] = {}
    if new is None:
        new = _near_lanes(lanes, world_size)
        for name, batch in batches.items():
            kept = batch // lanes * new
            changed[name] = kept if abs(kept - batch) * 8 <= batch else _nearest_multiple(batch, new)
    changes = {"data.lanes": new, **changed}
    before = {"data.lanes": lanes, **batches}
    told = [f"{name} to {value}" for name, value in changes.items() if before[name] != value]
    return "set " + (f"{', '.join(told[:-1])} and {told[-1]}" if len(told) > 1 else told[0])


def fitting_batch(lanes: int, name: str, batches: Mapping[str, int]) -> str:
    """What to set so that the lanes divide the batch size called `name`."""
    change = f"set {name} to {_nearest_multiple(batches[name], lanes)}"
    new = _lanes_within(lanes, gcd(*batches.values()), multiple_of=1)
    return change if new is None else f"{change}, or data.lanes to {new}"


def _lanes_within(lanes: int, batches: int, *, multiple_of: int) -> int | None:
    """The divisor of `batches` nearest to `lanes` by ratio that is a multiple; None when it is twice as far or more."""
    fitting = [size for size in divisors(batches) if size % multiple_of == 0]
    nearest = min(fitting, key=lambda size: abs(log(size / lanes)), default=None)
    # With fewer lanes fewer ranks can share them later; with more, each needs memory for a block of its own.
    return nearest if nearest is not None and lanes < 2 * nearest < 4 * lanes else None


def _near_lanes(lanes: int, world_size: int) -> int:
    """Of the multiples of the world size within an eighth of `lanes` the one that admits most world sizes."""
    nearest = _nearest_multiple(lanes, world_size)
    # Few are looked at: counting the divisors of all multiples of a small world size would take seconds.
    steps = sorted(range(-32, 33), key=abs)
    near = [nearest + step * world_size for step in steps]
    fitting = [number for number in near if number > 0 and abs(number - lanes) * 8 <= lanes]
    return max(fitting, key=lambda number: len(divisors(number)), default=nearest)


def _nearest_multiple(number: int, factor: int) -> int:
    return max(1, (2 * number + factor) // (2 * factor)) * factor
