"""What a rehearsal showed: attempts, strikes, and every step of the run counted over all of them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Event = Mapping[str, Any]
_ENDINGS = ("finished", "failed", "stopped", "preempted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Something that was done to the job."""

    kind: Literal["evict", "kill-node"]
    step: int
    """After which step."""
    job: str
    at: float
    """Seconds since 1970."""
    node: int | None = None

    def __str__(self) -> str:
        return "evicted" if self.kind == "evict" else f"node {self.node} killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A strike, and how the run came back."""

    strike: Strike
    checkpoint: int | None
    """Step of the checkpoint that it came back from."""
    saved_s: float | None
    """From the eviction to the commit of that checkpoint; None of a checkpoint from before."""
    back_s: float | None
    """From the strike until training went on."""
    redone: int
    """Steps that were done again because their state had died with the machine."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        strike = self.strike
        return {
            "kind": strike.kind, "step": strike.step, "node": strike.node, "job": strike.job,
            "checkpoint": self.checkpoint, "saved_s": self.saved_s, "back_s": self.back_s, "redone": self.redone,
        }  # fmt: skip

    def __str__(self) -> str:
        line = f"{self.strike} after step {self.strike.step}: "
        if self.checkpoint is None:
            return line + "did not come back from a checkpoint"
        line += f"back from the checkpoint of step {self.checkpoint}"
        if self.saved_s is not None:
            line += f", committed {self.saved_s:.1f} s after the signal"
        if self.back_s is not None:
            line += f", training again after {self.back_s:.0f} s"
        return line + (f"; {self.redone} steps done again" if self.redone else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole rehearsal."""

    backend: str
    run_id: str
    state: str
    cause: str | None
    steps: int
    """Of the small recipe."""
    attempts: int
    jobs: tuple[str, ...]
    struck: tuple[Struck, ...]
    planned: int
    """Strikes that were asked for."""
    missing: tuple[int, ...]
    """Steps that no attempt did."""
    repeated: tuple[int, ...]
    """Steps that were done more than once, apart from those that a killed node takes with it."""
    unequal: tuple[int, ...]
    """Steps that were done again with another loss."""
    seconds: float
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kept: str | None = None
    problems: tuple[str, ...] = field(default=())
    """Why it is not good; empty: it is."""

    @property
    def good(self) -> bool:
        """Whether the run came back each time, and finished."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """For `--json`; times in seconds."""
        return {
            "ok": self.good, "problems": list(self.problems), "backend": self.backend, "run": self.run_id,
            "state": self.state, "cause": self.cause, "steps": self.steps, "attempts": self.attempts,
            "jobs": list(self.jobs), "struck": [one.to_json() for one in self.struck], "missing": list(self.missing),
            "repeated": list(self.repeated), "unequal": list(self.unequal), "seconds": round(self.seconds, 1),
            "changes": list(self.changes), "notes": list(self.notes), "kept": self.kept,
        }  # fmt: skip

    def __str__(self) -> str:
        jobs = f"{len(self.jobs)} job{'s' * (len(self.jobs) != 1)}"
        lines = [
            f"{'ok' if self.good else 'not ok'}: {self.run_id} {self.state} on {self.backend} (emulated) in"
            f" {self.seconds:.0f} s, {self.attempts} attempts, {jobs}",
            *(f"  {one}" for one in self.struck),
            f"  steps   {self.steps}; lost {len(self.missing) or 'none'}, repeated {len(self.repeated) or 'none'}",
            *(f"  problem {problem}" for problem in self.problems),
            *(f"  note    {note}" for note in self.notes),
            *([f"  kept    {self.kept}"] if self.kept else []),
        ]
        return "\n".join(lines)


def judge(
    *,
    state: str,
    cause: str | None,
    steps: int,
    events: Sequence[Event],
    rows: Sequence[Mapping[str, Any]],
    strikes: Sequence[Strike],
    planned: int,
    **facts: Any,
) -> Report:
    """The report.

    Args:
        state, cause: how the run ended.
        steps: of the small recipe.
        events: of the run directory.
        rows: of the train metrics, of all attempts.
        strikes: what was done, in order.
        planned: how many strikes were asked for.
        facts: the other fields of the report.
    """
    done: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
    for row in rows:
        done[int(row["step"])].append((row["loss"], row["grad_norm"]))
    missing = tuple(step for step in range(1, steps + 1) if step not in done)
    struck = tuple(_struck(strike, events, rows) for strike in strikes)
    excused: set[int] = set()
    for one in struck:
        if one.strike.kind == "kill-node" and one.checkpoint is not None:
            excused |= set(range(one.checkpoint + 1, one.checkpoint + one.redone + 1))
    again = {step for step, figures in done.items() if len(figures) > 1}
    repeated = tuple(sorted(again - excused))
    unequal = tuple(sorted(step for step in again if len(set(done[step])) > 1))
    problems = []
    if state != "finished":
        problems.append(f"the run {state}" + (f": {cause}" if cause else ""))
    if len(strikes) < planned:
        problems.append(f"{planned - len(strikes)} of {planned} strikes did not happen")
    problems += [f"{one}" for one in struck if one.checkpoint is None]
    if missing and state == "finished":
        problems.append(f"steps lost: {_listed(missing)}")
    if repeated:
        problems.append(f"steps repeated: {_listed(repeated)}")
    if unequal:
        problems.append(f"steps done again with another loss: {_listed(unequal)}")
    return Report(
        state=state, cause=cause, steps=steps, struck=struck, planned=planned, missing=missing, repeated=repeated,
        unequal=unequal, attempts=sum(event["type"] == "started" for event in events), problems=tuple(problems),
        **facts,
    )  # fmt: skip


def _struck(strike: Strike, events: Sequence[Event], rows: Sequence[Mapping[str, Any]]) -> Struck:
    after = [event for event in events if event["time"] >= strike.at]
    resumed = next((event for event in after if event["type"] == "resumed"), None)
    if resumed is None:
        return Struck(strike=strike, checkpoint=None, saved_s=None, back_s=None, redone=0)
    step = int(resumed["step"])
    saved = next(
        (one for one in after if one["type"] == "checkpoint-committed" and one["time"] <= resumed["time"]),
        None,
    )
    before = [int(row["step"]) for row in rows if row["time"] <= float(resumed["time"])]
    if strike.kind == "kill-node":
        before.append(strike.step)  # its rows may have died with the machine
    return Struck(
        strike=strike,
        checkpoint=step,
        saved_s=saved["time"] - strike.at if saved is not None else None,
        back_s=resumed["time"] - strike.at,
        redone=max(0, max(before, default=step) - step),
    )


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:12]))
    return shown + (", ..." if len(steps) > 12 else "")
