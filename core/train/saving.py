"""When checkpoints are begun, and what the step loop does about one that is still being written.

One at a time, and training never waits long:

- Due by steps or by the clock, a checkpoint copies the state and is written in the background.
- Due while one is being written, it waits for that one, at most `checkpoint.wait_limit` for any one; after that it is
  left out and a note says so. By steps the next chance is the next multiple, by the clock it is the first step after
  the one in flight has ended.
- One that failed (disk full, store away past its retries, lease lost) is raised on all ranks after the next step. The
  older ones are untouched.
- The last one (end, stop, budget, SIGTERM) waits for the one in flight and is written before training ends. If the
  grace of the cloud runs out meanwhile, the one in flight, begun earlier, is the likelier to be there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from isthmus.core.train.agreement import gather, is_shared, shared
from isthmus.core.train.checkpoint import WRITE_LIMIT_S, Checkpoints
from isthmus.core.train.control import Rhythm, Signals
from isthmus.core.train.saving_flight import Flight, as_shared
from isthmus.core.train.trainer_state import TrainerState
from isthmus.errors import StorageError

_FAREWELL_S = 60.0
"""How long a run that ends by an error of its own waits for the checkpoint in flight, which may still be committed."""


class Saving:
    """The checkpoints of a training loop. Every method but `take_stall` must be entered by all ranks at the same step.

    Args:
        checkpoints: writes them.
        signals: when this process was told to end.
        saved_step: of the checkpoint that training resumed from, -1 without.
        say: prints a line, on rank 0.
        before_commit: called on rank 0, in the background, when all files of a checkpoint are there.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        signals: Signals,
        *,
        saved_step: int,
        say: Callable[[str], None],
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self.settings = checkpoints.settings
        self.signals = signals
        self.rhythm = Rhythm(self.settings.every)
        self.saved_step = saved_step
        """Of the last checkpoint that was begun."""
        self._say = say
        self._before_commit = before_commit
        self._lead = checkpoints.engine.rank == 0
        self._flight: Flight | None = None
        self._waited = False
        self._told: Flight | None = None
        self._stall_s = 0.0

    def signals_of_rank(self) -> list[float]:
        """For the step's all-reduce: due by rank 0's clock; this rank saw a checkpoint fail."""
        flight = self._flight
        flying = flight is not None and not flight.ended.is_set()
        self._tell()
        return [
            float(self._lead and self.rhythm.clock_due() and not (flying and self._waited)),
            float(flight is not None and flight.error is not None),
        ]

    def check(self, failed: bool) -> None:
        """After each step, with what ranks told each other: raises what the checkpoint in flight failed of.

        Raises:
            StorageError, LeaseLost: on all ranks.
        """
        if failed and not self._land(_FAREWELL_S):
            raise shared(StorageError("cannot write the checkpoint: a rank failed, and others never ended"))

    def save(self, state: TrainerState, *, last: bool = False, told: bool = False) -> None:
        """Begin a checkpoint of `state`, or leave it out; see the module.

        Args:
            state: of the trainer.
            last: training ends here: return when it is committed.
            told: because a signal said so; its grace is running.

        Raises:
            StorageError, LeaseLost: on all ranks.
        """
        started = time.perf_counter()
        try:
            self._save(state, last, told)
        finally:
            self._stall_s += time.perf_counter() - started

    def land(self) -> None:
        """Wait for the checkpoint in flight. Raises what it failed of, on all ranks."""
        if not self._land(None):
            raise shared(StorageError(f"cannot write the checkpoint: not done within {WRITE_LIMIT_S:.0f} s"))

    def take_stall(self) -> float:
        """Seconds that training stood still for checkpoints since this was last asked."""
        stall, self._stall_s = self._stall_s, 0.0
        return stall

    def close(self) -> None:
        """At the end of training, however it ends: a checkpoint in flight may end where all ranks are still there."""
        flight, error = self._flight, sys.exception()
        if flight is not None and (error is None or is_shared(error)):
            flight.ended.wait(_FAREWELL_S)

    def _save(self, state: TrainerState, last: bool, told: bool) -> None:
        step = state.step
        grace = _Grace(self.signals) if told else None
        if step != self.saved_step:
            if self._flight is not None and not self._land(
                None if last else (0.0 if self._waited else self.settings.wait_limit)
            ):
                self._leave_out(step)
                return
            if grace is not None and self._lead:
                grace.warn(self._told.background_s if self._told else 0.0, self._say)
            background = self.settings.asynchronous and not last
            self.saved_step = step
            self._waited = False
            self._flight = self.checkpoints.begin(
                state,
                background=background,
                before_commit=self._before_commit,
                facts=grace.facts if grace is not None else dict,
            )
            self.rhythm.done()
            if background:
                return
        self.land()

    def _leave_out(self, step: int) -> None:
        assert self._flight is not None
        if self._waited and self.rhythm.by_clock:
            return
        text = (
            f"checkpoint of step {step} is left out: the one of step {self._flight.step} is still being written "
            f"(checkpoint.wait_limit {self.settings.wait_limit:g} s); a longer checkpoint.every leaves it the time"
        )
        self._waited = True
        if self._lead:
            self._say(text)
            self.checkpoints.run.event("note", message=text, step=step)

    def _land(self, limit_s: float | None) -> bool:
        """Wait for the checkpoint in flight; whether it has ended on all ranks. Raises what it failed of."""
        flight = self._flight
        if flight is None:
            return True
        flight.ended.wait(WRITE_LIMIT_S if limit_s is None else limit_s)
        mine = flight.error
        states = gather((flight.ended.is_set(), None if mine is None else str(mine)))
        if mine is not None:
            raise as_shared(mine)
        for rank, (_, problem) in enumerate(states):
            if problem is not None:
                raise shared(StorageError(f"cannot write the checkpoint: rank {rank}: {problem}"))
        if not all(ended for ended, _ in states):
            return False
        self._tell()
        self._flight = None
        return True

    def _tell(self) -> None:
        flight = self._flight
        if flight is None or not flight.committed or not flight.ended.is_set() or flight is self._told:
            return
        self._told = flight
        text = f"checkpoint of step {flight.step} committed in {flight.stall_s + flight.background_s:.1f} s"
        if self.settings.asynchronous:
            text += f", training stood still {flight.stall_s:.2f} s"
        left = flight.facts().get("grace_left_s")
        self._say(text if left is None else f"{text}; {left:.0f} s of the grace left")


class _Grace:
    """What is left between the signal and the kill."""

    def __init__(self, signals: Signals) -> None:
        # Another rank may have been told, not this one: then the clock starts when ranks agreed.
        self.began = signals.received_at if signals.received_at is not None else time.monotonic()
        try:
            self.total: float | None = float(os.environ["ISTHMUS_GRACE_S"])
        except (KeyError, ValueError):
            self.total = None

    def facts(self) -> Mapping[str, Any]:
        since = time.monotonic() - self.began
        facts = {"after_signal_s": round(since, 2)}
        if self.total is not None:
            facts["grace_left_s"] = round(self.total - since, 2)
        return facts

    def warn(self, expected_s: float, say: Callable[[str], None]) -> None:
        left = self.facts().get("grace_left_s")
        if left is not None and left < expected_s:
            say(
                f"{left:.0f} s of the grace are left, the last checkpoint took {expected_s:.0f} s: "
                "this one may be cut short"
            )
