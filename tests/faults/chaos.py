"""Breaks runs in every way that is known, and looks whether anything was lost.

    PYTHONPATH=tests/helpers python tests/faults/chaos.py --seed 7 --events 100 --work build/chaos

Runs of the tiny model (three stages, a checkpoint every three steps) are driven as real processes, our worker and
torchrun with gloo, through events that the seed draws (`chaos_events`): in phases that the trainer itself reports. There
are three kinds of course: on a small disk, on an object store behind a server that fails, and through changes of world
size. After each event every committed checkpoint is read; at the end of a course all that training made is compared with
an uninterrupted run's, bit for bit, or with a fault-free run of the same schedule of world sizes.

It goes on from where an earlier call with the same --work, seed and number ended; --courses says how many to do now.
The log has a line for each event: when, in which course and attempt, the phase, what was done, what followed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos_attempt import Broken
from chaos_checks import (
    RELATIVE_ERROR,
    STEPS,
    check_epochs,
    check_equal,
    delivered,
    dump,
    products,
    recipe_file,
    relative_error,
    schedule_of,
)
from chaos_course import Course
from chaos_events import PHASES, SHARES, Event, draw
from chaos_places import Place, bucket, disk
from training import environment, make_latents

from isthmus.storage.rundir import RunDirectory

TOGETHER = 2


class Chaos:
    """Courses until the events are used up.

    Args:
        work: a folder of its own; holds the state between calls.
        seed: of everything drawn.
        count: events in all.
        kinds: of courses.
    """

    def __init__(self, work: Path, seed: int, count: int, kinds: Sequence[str] = tuple(SHARES)) -> None:
        self.work = work.absolute()
        self.work.mkdir(parents=True, exist_ok=True)
        self.data = str(self.work / "data")
        self._state = self.work / "state.json"
        self.log = self.work / "chaos.log"
        wanted = {"seed": seed, "count": count, "kinds": list(kinds)}
        self.state: dict[str, Any] = json.loads(self._state.read_text()) if self._state.exists() else {}
        if {name: self.state.get(name) for name in wanted} != wanted:
            for path in self.work.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            plans = draw(seed, count, kinds, together=TOGETHER)
            queues = {kind: [[e.to_json() for e in plan] for plan in plans[kind]] for kind in kinds}
            self.state = {
                **wanted, "queues": queues, "done": 0, "seconds": 0.0, "hits": {}, "courses": [], "broken": [],
            }  # fmt: skip
            make_latents(Path(self.data))
        self._course: Course | None = None
        self._began = time.monotonic() - self.state["seconds"]

    @property
    def over(self) -> bool:
        """Whether all events have happened."""
        return not any(self.state["queues"].values())

    def go(self, courses: int) -> None:
        """Runs so many courses, or fewer when the events are used up."""
        self._reference()
        for _ in range(courses):
            # The kind that has most to do: the kinds take turns.
            kind = max(self.state["queues"], key=lambda kind: len(self.state["queues"][kind]) / SHARES[kind])
            if not self.state["queues"][kind]:
                return
            place = bucket(self.data) if kind == "store" else disk(self.work / "disk", self.data)
            with place as where:
                self._run(kind, where)

    def _run(self, kind: str, place: Place) -> None:
        number = len(self.state["courses"]) + 1
        name = f"course-{number:02d}"
        shutil.rmtree(self.work / name, ignore_errors=True)  # of a call that was interrupted
        queue = [[Event(**event) for event in plan] for plan in self.state["queues"][kind]]
        course = Course(kind, name, self.work / name, place, self._say, f"{self.state['seed']} {number}")
        self._course = course
        summary: dict[str, Any] = {"number": number, "kind": kind}
        began = time.monotonic()
        try:
            course.go(queue)
            summary |= self._check(course)
            self._say(
                "end",
                f"attempts {course.attempts}, checkpoints read {course.committed.read}",
                json.dumps(summary),
            )
        except Broken as broken:
            self.state["broken"].append(f"course {number} ({kind}), attempt {course.attempts}: {broken}")
            self._say("end", "BROKEN", str(broken))
            if Path(course.uri).exists():
                shutil.copytree(course.uri, self.work / f"broken-{number:02d}", dirs_exist_ok=True)
        finally:
            course.close()
        self.state["done"] += course.events
        summary |= {"events": course.events, "attempts": course.attempts, "read": course.committed.read}
        summary["seconds"] = round(time.monotonic() - began, 1)
        self.state["courses"].append(summary)
        self.state["queues"][kind] = [[event.to_json() for event in plan] for plan in queue]
        for phase, actions in course.hits.items():
            known = self.state["hits"].setdefault(phase, {})
            for action, times in actions.items():
                known[action] = known.get(action, 0) + times
        self.state["seconds"] = time.monotonic() - self._began
        dump(self._state, self.state)

    def _check(self, course: Course) -> dict[str, Any]:
        """What the whole course has made, against runs that nothing happened to."""
        keys = delivered(course.run)
        reference = RunDirectory(self.work / "reference")
        whole = delivered(reference)
        if any(keys[step][1] != whole[step][1] for step in whole):
            raise Broken("samples differ from the uninterrupted run's")
        found: dict[str, Any] = {"epochs": check_epochs(keys)}
        if course.kind != "sizes":
            check_equal(products(course.run), products(reference))
            return found | {"equal": "bit for bit"}
        schedule = schedule_of(keys)
        place = self.work / f"again-{len(self.state['courses']) + 1:02d}"
        shutil.rmtree(place, ignore_errors=True)
        again = self._train(place, schedule)
        errors = relative_error(course.run, again)
        if max(errors.values()) > RELATIVE_ERROR:
            raise Broken(f"differs from a fault-free run of the same schedule {schedule}: {errors}")
        one_size = relative_error(course.run, reference)
        return found | {"schedule": schedule, "error": errors, "against two ranks all along": one_size}

    def _reference(self) -> None:
        if not (self.work / "reference").exists():
            self._train(self.work / "reference.tmp", [(2, STEPS)])
            (self.work / "reference.tmp").rename(self.work / "reference")

    def _train(self, place: Path, schedule: Sequence[tuple[int, int]]) -> RunDirectory:
        """A run without faults: so many ranks up to each of these steps."""
        for size, until in schedule:
            recipe = recipe_file(place.parent / "recipes", self.data, size, until=until)
            command = [
                sys.executable,
                "-m",
                "isthmus.core.worker",
                "--recipe",
                str(recipe),
                "--run",
                str(place),
            ]
            variables = environment(ISTHMUS_RECORD_KEYS="1")
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=180, check=False
            )
            if done.returncode:
                raise Broken(
                    f"a run without faults ended with {done.returncode}: {done.stdout + done.stderr}"
                )
        return RunDirectory(place)

    def _say(self, where: str, done: str, followed: str) -> None:
        assert self._course is not None
        course = self._course
        count = self.state["done"] + course.events
        line = (
            f"{time.monotonic() - self._began:7.1f} s | event {count}/{self.state['count']} | "
            f"{Path(course.uri).name} {course.kind} attempt {course.attempts} | {where} | {done} | {followed}"
        )
        print(line, flush=True)
        with self.log.open("a") as file:
            file.write(line + "\n")

    def summary(self) -> list[str]:
        """What was done and found, in lines."""
        state = self.state
        lines = [
            f"seed {state['seed']}: {state['done']} events in {len(state['courses'])} courses, {state['seconds']:.0f} s"
        ]
        for phase in PHASES:
            actions = state["hits"].get(phase, {})
            lines.append(
                f"  {phase}: " + (", ".join(f"{k} {v}" for k, v in sorted(actions.items())) or "never hit")
            )
        errors = [course["error"] for course in state["courses"] if "error" in course]
        if errors:
            worst = {name: max(error[name] for error in errors) for name in errors[0]}
            lines.append(f"  largest relative error against fault-free runs of the same schedules: {worst}")
        lines.append(f"  committed checkpoints read: {sum(course['read'] for course in state['courses'])}")
        return lines + [f"BROKEN: {broken}" for broken in state["broken"]]

    def problems(self) -> list[str]:
        """Why this was no success."""
        never = [phase for phase in PHASES if not self.state["hits"].get(phase)]
        missed = [f"no event hit the phase {phase}" for phase in never] if self.state["count"] >= 100 else []
        return [*self.state["broken"], *missed]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 when something broke, or a phase was never hit in a hundred events."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--work", type=Path, default=Path("build/chaos"))
    parser.add_argument("--courses", type=int, default=10**6, help="courses to run now")
    parser.add_argument("--kinds", nargs="+", choices=list(SHARES), default=list(SHARES))
    options = parser.parse_args(arguments)
    chaos = Chaos(options.work, options.seed, options.events, options.kinds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        chaos.go(options.courses)
    print("\n".join(chaos.summary()))
    if not chaos.over:
        print(f"not all events have happened: call it again with --work {options.work}")
        return 1 if chaos.state["broken"] else 0
    problems = chaos.problems()
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
