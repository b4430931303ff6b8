"""What strikes a rehearsed job, when training says that it has come to the step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.errors import IsthmusError
from isthmus.rehearsal.clouds import Cloud
from isthmus.rehearsal.report import Strike
from isthmus.rehearsal.trainer import Course

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """One strike that is to come."""

    kind: Literal["evict", "kill-node"]
    step: int
    node: int | None = None


class Striker:
    """A thread that does what is planned, one after the other.

    Args:
        job: gives the name of the job that runs now, or None.
        say: gets a line for each strike.
    """

    def __init__(
        self,
        cloud: Cloud,
        course: Course,
        plans: Sequence[Plan],
        job: Callable[[], str | None],
        say: Callable[[str], None],
    ) -> None:
        self.strikes: list[Strike] = []
        self._cloud, self._course, self._plans, self._job, self._say = cloud, course, plans, job, say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="striker", daemon=True)

    def start(self) -> None:
        """Begins to wait for the first step."""
        self._thread.start()

    def stop(self) -> None:
        """Nothing strikes any more."""
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        for plan in self._plans:
            while not self._course.at(plan.step).exists():
                if self._over.wait(_LOOK_S):
                    return
            try:
                self._strike(plan)
            except IsthmusError as error:
                self._say(f"cannot strike: {error}")
            self._course.struck(plan.step).touch()

    def _strike(self, plan: Plan) -> None:
        job = self._job()
        if job is None:
            return
        at = time.time()
        if plan.kind == "evict":
            self._cloud.evict(job)
        else:
            assert plan.node is not None
            self._cloud.kill_node(job, plan.node)
        strike = Strike(kind=plan.kind, step=plan.step, job=job, at=at, node=plan.node)
        self.strikes.append(strike)
        self._say(f"{strike} after step {plan.step}")
