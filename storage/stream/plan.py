"""The plan: which stage and global batch size each global step has. Append-only, so earlier steps keep their meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from isthmus.errors import UsageError


@dataclass(frozen=True, slots=True)
class Segment:
    """From `first_step` on: this stage, this batch size."""

    stage: int
    first_step: int
    """Global step, counted over all stages."""
    first_sample: int
    """Where the stage's samples stand at `first_step`: those that were trained on, and those that were skipped."""
    global_batch_size: int
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges [from, to) of the stage's samples that are jumped over; counted like `first_sample`, whole batches."""

    def __post_init__(self) -> None:
        numbers = (self.stage, self.first_step, self.first_sample, self.global_batch_size - 1)
        if any(not isinstance(number, int) or number < 0 for number in numbers):
            raise UsageError(f"not a segment of a plan: {self}")
        end = self.first_sample
        for start, stop in self.skipped:
            whole = (start - self.first_sample) % self.global_batch_size == 0
            if start < end or stop <= start or not whole or (stop - start) % self.global_batch_size:
                raise UsageError(
                    f"skipped samples {start} to {stop} are not whole batches of {self.global_batch_size} "
                    f"after sample {end}"
                )
            end = stop

    def line_step(self, step: int) -> int:
        """How many batches of the segment's line lie before this global step, skipped ones included."""
        at = step - self.first_step
        for start, stop in self.skipped:
            if at >= (start - self.first_sample) // self.global_batch_size:
                at += (stop - start) // self.global_batch_size
        return at

    def sample_at(self, step: int) -> int:
        """Where the stage's samples stand at this global step, counted like `first_sample`."""
        return self.first_sample + self.line_step(step) * self.global_batch_size

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Segment:
        """The segment that `to_json` described."""
        try:
            return cls(
                stage=data["stage"],
                first_step=data["first_step"],
                first_sample=data["first_sample"],
                global_batch_size=data["global_batch_size"],
                skipped=tuple((start, stop) for start, stop in data.get("skipped", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not a segment of a plan: {data} ({error})") from None


@dataclass(frozen=True)
class Plan:
    """The segments of a run, in the order in which they were appended.

    A segment that starts at or before an earlier one's first step replaces it from there on (a rewind).
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments or self.segments[0].first_step != 0:
            raise UsageError("a plan starts with a segment at step 0")
        _ = self.timeline

    @cached_property
    def timeline(self) -> tuple[Segment, ...]:
        """The segments that are in force, by ascending first step."""
        line: list[Segment] = []
        for segment in self.segments:
            while line and line[-1].first_step >= segment.first_step:
                line.pop()
            expected = _first_sample(line, segment.first_step, segment.stage)
            if segment.first_sample != expected:
                raise UsageError(
                    f"plan segment at step {segment.first_step} says first_sample {segment.first_sample}; "
                    f"the segments before it lead to {expected}"
                )
            line.append(segment)
        return tuple(line)

    def segment_at(self, step: int) -> Segment:
        """The segment in force at a global step."""
        for segment in reversed(self.timeline):
            if segment.first_step <= step:
                return segment
        raise UsageError(f"the plan does not reach back to step {step}")

    def stage_segments(self, segment: Segment) -> tuple[Segment, ...]:
        """The segments in force of the same stage up to this one."""
        at = self.timeline.index(segment)
        return tuple(other for other in self.timeline[: at + 1] if other.stage == segment.stage)

    def next_segment(
        self,
        first_step: int,
        *,
        stage: int,
        global_batch_size: int,
        skipped: Iterable[tuple[int, int]] = (),
    ) -> Segment:
        """The segment that would go on at `first_step`, its `first_sample` worked out."""
        line = [segment for segment in self.timeline if segment.first_step < first_step]
        return Segment(
            stage, first_step, _first_sample(line, first_step, stage), global_batch_size, tuple(skipped)
        )

    def append(self, segment: Segment) -> Plan:
        """The plan with one more segment."""
        return Plan((*self.segments, segment))

    def to_json(self) -> list[dict[str, Any]]:
        """As JSON data: the segments as they were appended."""
        return [segment.to_json() for segment in self.segments]

    @classmethod
    def from_json(cls, data: Iterable[Mapping[str, Any]]) -> Plan:
        """The plan that `to_json` described."""
        return cls(tuple(Segment.from_json(segment) for segment in data))


def _first_sample(before: list[Segment], first_step: int, stage: int) -> int:
    if not before or before[-1].stage < stage:
        return 0
    if before[-1].stage > stage:
        raise UsageError(f"plan segment at step {first_step} goes back to stage {stage}")
    return before[-1].sample_at(first_step)
