"""Finds a loss that left its range and stayed outside. Pure: the same losses give the same answer on every rank.

The score is robust, since a spike must not widen the range that it is judged by: with m the median of the window
and d = 1.4826 x the median of |loss - m| (which is the standard deviation of a normal distribution), z = (loss - m) / d.
Iglewicz and Hoaglin 1993 call it the modified z-score. What to do about a spike follows PaLM (Chowdhery et al. 2022,
5.1): back to a checkpoint from before it, and on without the batches before and during it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from isthmus.core.recipe.alive import LossSpike
from isthmus.storage.stream.plan import Plan, Segment

_NORMAL = 1.4826
_LEAST = 1e-3
"""Of the median: a deviation below it would call rounding a spike."""


@dataclass(frozen=True, slots=True)
class Spike:
    """A loss outside of its range."""

    first: int
    """The global step (1 after the first) whose loss was the first outside."""
    last: int
    """The step that made it a spike."""
    loss: float
    """Of the last."""
    median: float
    z_score: float

    @property
    def message(self) -> str:
        """One line."""
        steps = f"step {self.last}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return (
            f"loss spike at {steps}: {self.loss:.4g} against a median of {self.median:.4g} "
            f"({self.z_score:.1f} robust standard deviations)"
        )


class SpikeDetector:
    """Watches the losses in the order of steps.

    Args:
        settings: the recipe's.
        losses: of the steps before, from a checkpoint.
    """

    def __init__(self, settings: LossSpike, losses: Iterable[float] = ()) -> None:
        self.settings = settings
        self._window: deque[float] = deque(losses, maxlen=settings.window)
        self._outside: list[int] = []
        self._told = False

    @property
    def losses(self) -> tuple[float, ...]:
        """The window, to be put into a checkpoint: with it a resumed run judges as it would have."""
        return tuple(self._window)

    def observe(self, step: int, loss: float, *, finite: bool = True) -> Spike | None:
        """Takes the loss of a global step (1 after the first); returns the spike that it completes.

        A step that was not finite is outside and has no place in the window. A spike is told once, until the loss
        is inside again.
        """
        if len(self._window) < max(4, self.settings.window // 2):
            if finite:
                self._window.append(loss)
            return None
        middle = median(self._window)
        spread = _NORMAL * median(abs(value - middle) for value in self._window)
        score = (loss - middle) / max(spread, _LEAST * abs(middle)) if finite else float("inf")
        inside = score <= self.settings.z_score
        if finite and (inside or self._told):
            # Once it was told, a loss that stays there becomes the range; before, it would hide itself.
            self._window.append(loss)
        if inside:
            self._outside.clear()
            self._told = False
            return None
        self._outside.append(step)
        if self._told or len(self._outside) < self.settings.lasts:
            return None
        self._told = True
        return Spike(self._outside[0], step, loss, middle, score)


def first_skipped(plan: Plan, last: int, skip: int) -> int:
    """The first of the steps (0 for the first of all) whose samples are left out: `skip` steps up to step index `last`.

    Not before the segment of `last` begins: a range of samples is of one stage, in whole batches.
    """
    return max(plan.segment_at(last).first_step, last + 1 - skip)


def without(plan: Plan, first: int, last: int) -> Segment:
    """The segment, to be appended, under which the samples of steps `first` to `last`, both included, do not come.

    It takes the place of the one that is in force there, from its first step on: what comes when is drawn for a
    segment as a whole, so one that began at `first` would come to the same samples in another order. Steps before
    `first` keep their meaning, and what was left out before stays left out.
    """
    current = plan.segment_at(last)
    if first < current.first_step:
        raise ValueError(f"step {first} is of another segment than step {last}")
    merged: list[tuple[int, int]] = []
    range_ = (current.sample_at(first), current.sample_at(last) + current.global_batch_size)
    for start, end in sorted([*current.skipped, range_]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return replace(current, skipped=tuple(merged))


def rewinds(plan: Plan) -> int:
    """How often the run has gone back so far: its segments that leave something out."""
    return sum(bool(segment.skipped) for segment in plan.segments)
