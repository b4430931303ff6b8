"""One run from its first attempt to its last step, with what happens to it on the way."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from chaos_attempt import Attempt, Broken, Line
from chaos_checks import STAGES, STEPS, Committed, events_of, recipe_file
from chaos_events import BETWEEN, ENDING, WRITING, Event, Plan
from chaos_places import Bucket, Disk, Place

from isthmus.storage.rundir import RunDirectory

LAST_BORDER = sum(steps for *_, steps in STAGES[:-1])
SHORT_LEASE_S = 3
MOST_ATTEMPTS = 10
"""After these nothing more happens to a run: a course takes two to three minutes."""
_SLOWLY = 0.3
"""How long training stands still at each checkpoint where another process must start beside it."""


class Course:
    """A run and its attempts.

    Args:
        kind: of `chaos_events.COMBINATIONS`.
        name: of the run directory.
        folder: for what attempts print and report.
        say: takes what is to be logged of each event.
        seed: for what is drawn while it goes.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        folder: Path,
        place: Place,
        say: Callable[[str, str, str], None],
        seed: str,
    ) -> None:
        self.kind, self.folder, self.place, self.say = kind, folder, place, say
        self.uri = place.run_uri(name)
        # By this process's own environment: past the server that fails.
        self.run = RunDirectory(self.uri)
        self.committed = Committed(self.run)
        self.size = 2
        self.attempts = 0
        self.frozen: Attempt | None = None
        self.events = 0
        self.hits: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.finished = False
        self._dice = random.Random(seed)
        self._alive: list[Attempt] = []

    def go(self, queue: list[Plan]) -> None:
        """Takes plans from the queue while they are possible, then trains to the end; puts back what did not happen.

        Raises:
            Broken: something did not hold.
        """
        while not self.finished:
            plan = next((plan for plan in queue if self._possible(plan)), None)
            if self.attempts >= MOST_ATTEMPTS:
                plan = None
            if plan is not None:
                queue.remove(plan)
            left = self.attempt(plan or [])
            if left:
                queue.insert(0, left)
            if plan is None and not self.finished:
                raise Broken("an attempt that nothing happened to did not finish")

    def close(self) -> None:
        """Ends what is left of processes."""
        for attempt in self._alive:
            attempt.kill()

    def _possible(self, plan: Plan) -> bool:
        at = self.committed.newest()
        flips = sum(event.action == "flip" for event in plan)
        if flips and len(self.committed.check()) <= flips:
            return False
        if any(event.action == "fill-disk" for event in plan) and not isinstance(self.place, Disk):
            return True  # to be skipped, with a line
        need = 0
        for event in plan:
            if event.phase == "stage-change":
                if at + need >= LAST_BORDER:
                    return False
                need = max(need, LAST_BORDER - at if at >= STAGES[0][3] else STAGES[0][3] - at)
            elif event.phase == "validating":
                need += 12
            elif event.phase in {"training", *WRITING}:
                need += 3 * event.nth
        return at + need < STEPS

    # -- an attempt

    def attempt(self, plan: Plan) -> Plan:
        """Runs one attempt through its events; returns those that could not happen, because it was over before."""
        before = [event for event in plan if event.action in BETWEEN]
        during = [event for event in plan if event.action not in BETWEEN]
        if any(event.action == "fill-disk" for event in during) and not isinstance(self.place, Disk):
            during = [event for event in during if event.action != "fill-disk"]
            self.say("-", "fill-disk", "skipped: mounting a small disk needs root")
        flipped: list[tuple[int, str]] = []
        for event in before:
            if event.action == "resize":
                self._did(event, f"world size {self.size} -> {event.size}", "")
                self.size = event.size
            else:
                flipped.append(self._flip(event))
        if self.frozen is not None:
            phase = self._dice.choice(["staged", "writing", "before-commit"])
            # The second one: by then the step at which the other one fell asleep is committed.
            during.insert(0, Event(action="thaw", phase=phase, nth=2))
        newest = self.committed.newest()
        attempt = self._start(during)
        try:
            left = self._strike(attempt, during)
        finally:
            if self.frozen is not attempt:
                self._alive.remove(attempt)
                attempt.kill()
        if self.frozen is not None and self.frozen is not attempt:
            self._thaw(Event(action="thaw", phase="end"), None)
        self._check_resumed(attempt, newest, flipped)
        return left

    def _start(self, during: Plan) -> Attempt:
        self.attempts += 1
        hold = {event.phase: event.hold for event in during if event.hold}
        if any(event.action in {"second", "thaw", "unavailable"} for event in during):
            hold["staged"] = max(_SLOWLY, hold.get("staged", 0.0))
        short = any(event.action == "pause" for event in during)
        attempt = Attempt(
            self.attempts,
            self.folder / f"attempt-{self.attempts:03d}",
            recipe_file(self.folder, self.place.data, self.size),
            self.uri,
            self.size,
            hold=hold,
            variables=self.place.environment,
            arguments=("--lease-seconds", str(SHORT_LEASE_S)) if short else (),
        )
        self._alive.append(attempt)
        return attempt

    def _strike(self, attempt: Attempt, during: Plan) -> Plan:
        """The events of an attempt, one after the other; returns those it did not live to see."""
        for number, event in enumerate(during):
            line = attempt.wait_for(event)
            if line is None:
                self._end_well(attempt)
                return [left for left in during[number:] if left.action != "thaw"]
            act = getattr(self, "_" + event.action.replace("-", "_"))
            ended = act(event, line) if event.action == "thaw" else act(event, line, attempt)
            attempt.look()
            attempt.mark = len(attempt.lines)
            if event.action in ENDING:
                return []
            if ended:
                return during[number + 1 :]
        self._end_well(attempt)
        return []

    def _end_well(self, attempt: Attempt) -> None:
        code = attempt.end()
        if code != 0:
            raise Broken(
                f"attempt {attempt.number} ended with {code}: {attempt.last_word() or attempt.output()[-2000:]}"
            )
        self._check_output(attempt)
        self.finished = True
        self.committed.check()

    def _check_resumed(self, attempt: Attempt, newest: int, flipped: list[tuple[int, str]]) -> None:
        """That an attempt went on from the newest good checkpoint, and named the damaged ones."""
        steps = [event["step"] for event in events_of(self.run, attempt.number) if event["type"] == "resumed"]
        if steps and steps[0] != newest:
            raise Broken(
                f"attempt {attempt.number} resumed from step {steps[0]}, the newest good one is {newest}"
            )
        for step, name in flipped if steps else []:
            words = [line for line in attempt.output().splitlines() if f"step {step} is damaged" in line]
            if not words or name not in words[0]:
                raise Broken(f"the flipped byte in {name} of step {step} was not named: {words}")

    def _check_output(self, attempt: Attempt) -> None:
        if "Traceback" in attempt.output():
            raise Broken(f"attempt {attempt.number} printed a traceback, see {attempt.printed}")

    # -- what is done, and what must follow

    def _over(
        self, attempt: Attempt, event: Event, line: Line, done: str, *codes: int, hit: bool | None = None
    ) -> int:
        """An attempt that was told to end: how it did, and what is left."""
        hit = attempt.was_in(line, event) if hit is None else hit
        started = time.monotonic()
        code = attempt.end()
        seconds = time.monotonic() - started
        if code not in codes:
            raise Broken(
                f"{done} in {event.phase}: exit code {code}, not {codes}: {attempt.output()[-2000:]}"
            )
        self._check_output(attempt)
        good = self.committed.check()
        followed = (
            f"exit {code} after {seconds:.1f} s; {attempt.last_word() or 'no word'}; good checkpoints {good}"
        )
        self._did(event, done, followed, line, hit=hit)
        return code

    def _kill_rank(self, event: Event, line: Line, attempt: Attempt) -> None:
        attempt.send(event)
        code = self._over(attempt, event, line, f"kill -9 of rank {event.rank} of {self.size}", 1, 0)
        if code == 0:
            self.finished = True
            return
        failed = [found for found in events_of(self.run, attempt.number) if found["type"] == "failed"]
        if not failed or failed[0].get("rank") != event.rank or "SIGKILL" not in failed[0].get("cause", ""):
            raise Broken(f"rank {event.rank} was killed, the event says {failed}")

    def _kill_worker(self, event: Event, line: Line, attempt: Attempt) -> None:
        attempt.send(event)
        self._over(attempt, event, line, "kill -9 of the worker", -9)

    def _evict(self, event: Event, line: Line, attempt: Attempt) -> None:
        attempt.send(event)
        whom = f"rank {event.rank} of {self.size}" if event.action == "evict-rank" else "the worker"
        code = self._over(attempt, event, line, f"SIGTERM to {whom}", 75, 0)
        if code == 0:
            self.finished = True
            return
        last = [found["type"] for found in events_of(self.run, attempt.number)][-1]
        steps = [
            row["step"]
            for row in self.run.read_metrics("train", all_attempts=True)
            if row["attempt"] == attempt.number
        ]
        if last != "preempted" or (steps and self.committed.newest() != max(steps)):
            raise Broken(f"evicted at step {max(steps)}, saved {self.committed.newest()}, last event {last}")

    _evict_rank = _evict

    def _fill_disk(self, event: Event, line: Line, attempt: Attempt) -> None:
        assert isinstance(self.place, Disk)
        self.place.fill()
        hit = attempt.was_in(line, event)
        try:
            attempt.end()
        finally:
            self.place.free()
        self._over(attempt, event, line, "disk filled", 1, hit=hit)
        if "the disk is full" not in attempt.output():
            raise Broken(f"a full disk was not named: {attempt.output()[-2000:]}")

    def _pause(self, event: Event, line: Line, attempt: Attempt) -> None:
        attempt.freeze()
        self.frozen = attempt
        self._did(event, "all processes stopped", "", line, hit=attempt.was_in(line, event))

    def _thaw(self, event: Event, line: Line | None) -> None:
        frozen, self.frozen = self.frozen, None
        assert frozen is not None
        self.committed.check()
        frozen.thaw()
        code = frozen.end(60)
        self._alive.remove(frozen)
        if code == 0 or not any(word in frozen.output() for word in ("took over", "may no longer write")):
            raise Broken(f"a fenced attempt ended with {code}: {frozen.output()[-2000:]}")
        self._check_output(frozen)
        after = self.committed.check()
        self._note(
            event,
            line,
            f"attempt {frozen.number} woke up",
            f"exit {code}; {frozen.last_word()}; good {after}",
        )

    def _second(self, event: Event, line: Line, attempt: Attempt) -> None:
        hit = attempt.was_in(line, event)
        started = len(self.run.events("started"))
        other = Attempt(
            self.attempts,
            self.folder / f"attempt-{self.attempts:03d}-second-{self.events}",
            recipe_file(self.folder, self.place.data, self.size),
            self.uri,
            self.size,
            hold={},
            variables=self.place.environment,
            arguments=("--lease-wait", "0.3"),
        )
        self._alive.append(other)
        code = other.end(60)
        self._alive.remove(other)
        if code != 1 or "another attempt is running" not in other.last_word():
            raise Broken(f"a second attempt beside the first ended with {code}: {other.output()[-2000:]}")
        if len(self.run.events("started")) != started:
            raise Broken("a second attempt announced itself beside the first")
        good = self.committed.check()
        followed = f"refused, exit {code}; {other.last_word()}; good checkpoints {good}"
        self._did(event, "a second worker on the run directory", followed, line, hit=hit)

    def _unavailable(self, event: Event, line: Line, attempt: Attempt) -> bool:
        assert isinstance(self.place, Bucket)
        refuse = self._dice.random() < 0.3
        hit = attempt.was_in(line, event)
        back = self.place.unavailable(event.seconds, refuse=refuse)
        done = f"the store {'refuses connections' if refuse else 'answers 503'} for {event.seconds:.1f} s"
        wanted = Event(action="watch", phase="committed")
        while True:
            found = attempt.wait_for(wanted)
            if found is None or found.time > back:
                break
            attempt.mark = attempt.lines.index(found) + 1
        if found is not None:
            good = self.committed.check()
            followed = f"committed step {found.step} {found.time - back:.1f} s after it was back; good {good}"
            self._did(event, done, followed, line, hit=hit)
            return False
        if event.phase == "starting" and attempt.process.returncode == 1:
            # Nothing was begun: whoever restarts the worker waits for the store.
            self._over(attempt, event, line, done, 1)
            return True
        self._end_well(attempt)
        self._did(event, done, "the run finished", line, hit=hit)
        return True

    def _flip(self, event: Event) -> tuple[int, str]:
        step = self.committed.newest()
        names = sorted(self.run.read_commit(step)["files"])
        name = self._dice.choice([*names, "COMMITTED"])
        self.committed.damage(step, name, event.place)
        self._did(event, f"one byte of {name} of step {step} flipped", "")
        return step, name

    def _did(
        self, event: Event, done: str, followed: str, line: Line | None = None, *, hit: bool = True
    ) -> None:
        self.events += 1
        if line is not None and hit:
            self.hits[event.phase][event.action] += 1
        self._note(event, line, done, followed, hit=hit)

    def _note(self, event: Event, line: Line | None, done: str, followed: str, *, hit: bool = True) -> None:
        where = "between attempts" if line is None else event.phase
        if line is not None and line.step >= 0:
            where += f" of step {line.step}"
        if not hit:
            where += " (over when struck)"
        self.say(where, done, followed)
