"""`isthmus runs copy`: a run's checkpoints and records to another place, where another cloud can go on with it.

Checkpoints are checked by the hashes that their COMMITTED lists while they are copied; COMMITTED comes after the files, and
run.json after everything, so that a copy that was cut off is no run yet, and the same command goes on with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from isthmus.backends.fetch import listed
from isthmus.backends.following import status_of
from isthmus.backends.runs import Record
from isthmus.backends.spec import Status
from isthmus.errors import RunExists, UsageError
from isthmus.storage.copying import Copied, Item, Tree, copy
from isthmus.storage.filesystems import is_local, local_path
from isthmus.storage.rundir import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a copy would do."""

    run: RunDirectory
    target: RunDirectory
    status: Status
    """Of the run, which does not run."""
    first: tuple[Item, ...]
    last: tuple[Item, ...]
    steps: tuple[int, ...]
    """Checkpoints that are carried over."""
    there: int
    """Bytes that an earlier copy brought already, by size."""

    @property
    def bytes(self) -> int:
        """All that belongs to it."""
        return sum(item.size for item in (*self.first, *self.last))


def plan_copy(record: Record, to: str, *, checkpoints: Literal["newest", "all"] = "newest") -> Plan:
    """Looks what there is to copy; writes nothing.

    Raises:
        UsageError: the run is running, or the place is its own.
        RunExists: the place holds another run.
    """
    run, target = RunDirectory.open(record.run_uri), RunDirectory(to)
    if run.uri == target.uri or _inside(target.uri, run.uri):
        raise UsageError("that is the run's own directory", where=to, hint="name another place with --to")
    status = status_of(record)
    if not status.ended:
        raise UsageError(
            f"{record.id} is {status.state}: what it writes now would be missing",
            hint=f"`isthmus stop {record.id}` ends it after a checkpoint",
        )
    if target.exists():
        known = target.read_run_json()
        if known.get("id") != record.id or known.get("copied_from") != run.uri:
            raise RunExists(f"holds run {known.get('id')}", where=to, hint="name an empty place with --to")
        if target.events("submitted")[len(run.events("submitted")) :]:
            raise RunExists("holds a copy that has gone on since", where=to, hint="resume that one")
    committed = run.checkpoints()
    steps = committed if checkpoints == "all" else committed[-1:]
    tree = Tree(run.uri)
    first, last = listed(run, tree, steps=steps)
    there = Tree(target.uri).sizes()
    return Plan(
        run=run,
        target=target,
        status=status,
        first=tuple(first),
        last=tuple(item for item in last if item.name != "run.json"),
        steps=tuple(steps),
        there=sum(item.size for item in (*first, *last) if item.fixed and there.get(item.name) == item.size),
    )


def carry_out(plan: Plan, *, on_file: Callable[[Item, bool], None] = lambda item, kept: None) -> Copied:
    """Copies. Raises DataError, StorageError; the same call goes on where it ended."""
    source, target = Tree(plan.run.uri), Tree(plan.target.uri)
    copied = copy(source, target, plan.first, on_file=on_file)
    if any(name.startswith("checkpoints/") for name in copied.gone):
        raise UsageError(
            "a checkpoint was removed while it was copied", where=plan.run.uri, hint="copy it again"
        )
    ended = copy(source, target, plan.last, on_file=on_file)
    facts = {**plan.run.read_run_json(), "copied_from": plan.run.uri}
    newest = plan.run.submissions().newest()
    if newest is not None:
        # Whoever goes on from the copy need not reach the cloud that the last job ran on.
        answer = {**(newest.answer or {}), "ended": _told(plan.status)}
        name = f"submissions/{newest.number:04d}-answer.json"
        plan.target.write_file(name, (json.dumps(answer, indent=1) + "\n").encode())
    plan.target.write_run_json(facts)
    text = f"copied to {plan.target.uri}"
    if not any(event.get("text") == text for event in plan.run.events("note")):
        plan.run.event("note", text=text)
    return Copied(
        copied.files + ended.files + 1,
        copied.bytes + ended.bytes,
        copied.kept + ended.kept,
        copied.gone + ended.gone,
    )


def _told(status: Status) -> dict[str, Any]:
    return {"state": status.state, "exit_code": status.exit_code, "cause": status.cause}


def _inside(inner: str, outer: str) -> bool:
    if is_local(inner) and is_local(outer):
        return local_path(outer) in local_path(inner).parents
    return inner.startswith(outer.rstrip("/") + "/")
