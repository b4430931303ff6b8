"""A rehearsal from the emulated cloud's opening to its report."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.backends.fetch import fetch
from isthmus.backends.launch import start
from isthmus.backends.prepare import launch_folder, preflight, prepare, refuse_errors
from isthmus.backends.spec import LogLine
from isthmus.backends.staying import stay
from isthmus.backends.supervisor import Look, Supervisor
from isthmus.core.recipe import LoadedRecipe
from isthmus.errors import IsthmusError, TrainingFailed, UsageError
from isthmus.rehearsal.clouds import Cloud, check_installed, open_cloud
from isthmus.rehearsal.latents import make
from isthmus.rehearsal.report import Report, judge
from isthmus.rehearsal.shrink import AFTER, STEPS, Small, nodes_of, shrink
from isthmus.rehearsal.striking import Plan, Striker
from isthmus.rehearsal.trainer import VARIABLE, Course
from isthmus.storage import copying
from isthmus.storage.rundir import RunDirectory

MINUTES = 10.0
PACE_S = 0.1
"""Of a step at least: a step of the small model would be over before anything could strike it."""
_LOOK_S = 1.0
_OTHERS = ("AWS_", "AZURE", "IDENTITY_", "MSI_", "ISTHMUS_")
"""Beginnings of variables that could lead to a real cloud, or into the containers."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked for."""

    backend: str
    evict_at: int | None = None
    kill_node: int | None = None
    minutes: float = MINUTES
    keep: Path | None = None

    @property
    def evicts(self) -> bool:
        """Without a wish it is an eviction that is rehearsed."""
        return self.evict_at is not None or self.kill_node is None


def rehearse(
    loaded: LoadedRecipe,
    wishes: Wishes,
    *,
    say: Say = lambda text: None,
    write: Callable[[LogLine], None] | None = None,
) -> Report:
    """Runs the rehearsal.

    Args:
        say: gets what happens, a line each.
        write: gets the jobs' log.

    Raises:
        NotInstalled: an extra is missing; UsageError: a wish that cannot be granted; PreflightRefused: the launch is refused.
        TrainingFailed: the time is over.
    """
    check_installed(wishes.backend)
    steps, plans = planned(loaded, wishes)
    began = time.monotonic()
    _lint_itself(loaded, wishes.backend, say)
    with contextlib.ExitStack() as stack:
        # Short: the hosts make sockets below it.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
        if wishes.keep is not None:
            wishes.keep.mkdir(parents=True, exist_ok=True)
        (folder / "course").mkdir()
        course = Course(folder=folder / "course", pace=PACE_S, hold=tuple(plan.step for plan in plans))
        stack.enter_context(_environment({"XDG_STATE_HOME": str(folder / "state")}))
        cloud = open_cloud(wishes.backend, loaded.recipe, folder / "cloud", _variables(course))
        stack.callback(cloud.close)
        stack.enter_context(_environment(cloud.environment()))
        place = cloud.place(loaded.recipe, "spot" if wishes.evicts else None)
        small = shrink(loaded.recipe, place, steps=steps)
        for change in small.changes:
            say(f"small: {change}")
        _upload(small, folder)
        return _run(cloud, small, plans, course, wishes, began, say, write)


def planned(loaded: LoadedRecipe, wishes: Wishes) -> tuple[int, list[Plan]]:
    """Steps of the small run, and what strikes it when.

    Raises:
        UsageError: a step or a node that there is not.
    """
    evict_at, node = wishes.evict_at, wishes.kill_node
    if evict_at is not None and evict_at < 1:
        raise UsageError(f"{evict_at} is no step", where="--evict-at", hint="from 1 on")
    nodes = nodes_of(loaded.recipe)
    if node is not None and not 0 <= node < nodes:
        told = f"the rehearsal has node{'s 0 and 1' if nodes > 1 else ' 0 only'}"
        raise UsageError(f"there is no node {node}", where="--kill-node", hint=told)
    plans = []
    if wishes.evicts:
        plans.append(Plan("evict", evict_at or STEPS // 3))
    if node is not None:
        # Not right after a checkpoint: what a killed node takes with it shall be seen.
        plans.append(Plan("kill-node", (plans[-1].step if plans else STEPS // 3) + 4, node))
    steps = max(STEPS, 4 * len(loaded.recipe.stages), plans[-1].step + AFTER)
    return steps, plans


def _lint_itself(loaded: LoadedRecipe, backend: str, say: Say) -> None:
    """What is wrong with the recipe as it is, offline: the small one goes elsewhere, on other machines."""
    try:
        findings = prepare(loaded, backend=backend, offline=True).findings
    except IsthmusError as error:
        say(f"the recipe itself would be refused: {error}")
        return
    for finding in findings:
        if finding.level == "error":
            say(f"the recipe itself would be refused: {finding.message}  [{finding.id}]")


def _variables(course: Course) -> dict[str, str]:
    """Of the containers."""
    return {
        "ISTHMUS_TRAINER_MODULE": "isthmus.rehearsal.trainer",
        VARIABLE: course.to_json(),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process as a client of the emulated cloud alone."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_OTHERS) and name not in ("ISTHMUS_DEBUG", "ISTHMUS_TEST_CACHE"):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _upload(small: Small, folder: Path) -> None:
    recipe = small.recipe
    listed = [*recipe.data.sources, *recipe.validation.sources]
    for number, uri in enumerate(dict.fromkeys(str(source.uri) for source in listed)):
        here = folder / f"latents{number}"
        make(recipe, str(here), number=number)
        source = copying.Tree(str(here))
        items = [copying.Item(name, size) for name, size in source.sizes().items()]
        copying.copy(source, copying.Tree(uri), items)


def _run(
    cloud: Cloud,
    small: Small,
    plans: Sequence[Plan],
    course: Course,
    wishes: Wishes,
    began: float,
    say: Say,
    write: Callable[[LogLine], None] | None,
) -> Report:
    deadline = began + 60 * wishes.minutes
    launch = preflight(prepare(small.loaded, backend=wishes.backend))
    for finding in launch.findings:
        if finding.level == "warning":
            say(f"warning: {finding.message}")
    refuse_errors(launch)
    handle = start(launch, launch_folder(small.loaded))
    run = RunDirectory(launch.job.run_uri, patience=30.0)
    say(f"launched {handle.native['job_id']} on {wishes.backend} (emulated), run directory {run.uri}")
    job: list[str] = [str(handle.native["job_id"])]

    def on_look(look: Look) -> None:
        job.append(str(look.handle.native.get("job_id")))
        if time.monotonic() > deadline:
            raise TrainingFailed(
                f"not done after {wishes.minutes:g} minutes: {job[-1]} is {look.status.state}",
                where=launch.job.run_id,
                hint="--minutes gives it longer",
            )

    striker = Striker(cloud, course, plans, lambda: job[-1], say)
    striker.start()
    try:
        look = stay(
            Supervisor(run.uri, say=say), say, write=write, on_look=on_look, interval=_LOOK_S
        )  # fmt: skip
    finally:
        striker.stop()
        kept = _keep(run, wishes.keep)
    return judge(
        backend=wishes.backend,
        run_id=launch.job.run_id,
        state=look.status.state,
        cause=look.status.cause,
        steps=small.steps,
        events=run.events(),
        rows=run.read_metrics("train", all_attempts=True),
        strikes=striker.strikes,
        planned=len(plans),
        jobs=tuple(run.read_run_json().get("job_ids", ())),
        seconds=time.monotonic() - began,
        changes=small.changes,
        notes=(cloud.note,) if cloud.note else (),
        kept=kept,
    )


def _keep(run: RunDirectory, folder: Path | None) -> str | None:
    """The run directory in a folder of the user's, where it is wanted; the emulated store ends with the rehearsal."""
    if folder is None:
        return None
    target = folder.absolute() / run.uri.rstrip("/").rpartition("/")[2]
    try:
        fetch(run, target)
    except IsthmusError as error:
        logging.getLogger(__name__).warning("the run directory cannot be kept: %s", error)
        return None
    return str(target)
