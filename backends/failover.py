"""Which of a run's destinations is next, and what speaks against one: pure decisions over what others found."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from isthmus.backends.destinations import Destination
from isthmus.backends.prepare import Launch
from isthmus.backends.spec import Finding, Status
from isthmus.core.recipe import Recipe, resolve
from isthmus.errors import IsthmusError, PreflightRefused, RecipeError
from isthmus.storage.filesystems import join, scheme_of
from isthmus.storage.rundir.submissions import Submission

QUICK_S = 3600.0
"""An attempt that was taken away sooner than this was taken away quickly."""
QUICK_ATTEMPTS = 3
"""So many quick ones in a row on one destination, and the next one is tried."""
_NO_ROOM = re.compile(
    r"capacity|quota|limit exceeded|resourcelimit|insufficient|out of stock|allocationfailed|skunotavailable"
    r"|no (such )?machine",
    re.IGNORECASE,
)


def choose(
    count: int, make: Callable[[int], Launch], check: Callable[[Launch], Launch]
) -> tuple[Launch, list[Finding]]:
    """The first launch that nothing refuses, and a note for each destination before it that refused.

    Only a refusal (exit code 3) leads on to the next: what the user has to put right is an error wherever it is met.

    Raises:
        IsthmusError: what a destination raised, when it is no refusal or there is no other.
    """
    notes: list[Finding] = []
    first: Launch | None = None
    error: IsthmusError | None = None
    for index in range(count):
        try:
            launch = check(make(index))
        except PreflightRefused as refused:
            error = error or refused
            notes.append(Finding("launch.destination", "note", f"destination {index + 1}: {refused}"))
            continue
        errors = [finding for finding in launch.findings if finding.level == "error"]
        if not errors or any(finding.exit_code != 3 for finding in errors):
            return launch, notes
        first = first or launch
        place = launch.destinations[launch.choice] if launch.destinations else launch.backend.name
        notes += [replace(one, level="note", message=f"not {place}: {one.message}") for one in errors]
    if first is not None:
        return first, [note for note in notes if note.message.partition(": ")[2] not in _messages(first)]
    assert error is not None
    raise error


def _messages(launch: Launch) -> set[str]:
    return {finding.message for finding in launch.findings}


def has_no_room(status: Status) -> bool:
    """Whether the job ended because the cloud has no machines or no quota for it."""
    return bool(_NO_ROOM.search(f"{status.cause or ''} {status.detail or ''}"))


def why_leave(submissions: Sequence[Submission], status: Status, now: float) -> str | None:
    """Why the next attempt should be made elsewhere; None: where the last one was.

    Args:
        submissions: of the run, in order.
        status: of the last one, which has ended.
        now: seconds since 1970.
    """
    if has_no_room(status):
        return "no capacity or no quota"
    choice = submissions[-1].data.get("choice", 0)
    begun = [float(one.data["created"]) for one in submissions]
    lasted = [after - before for before, after in zip(begun, [*begun[1:], now], strict=True)]
    recent = list(zip(submissions, lasted, strict=True))[-QUICK_ATTEMPTS:]
    quick = [one for one, seconds in recent if seconds < QUICK_S and one.data.get("choice", 0) == choice]
    if len(quick) == QUICK_ATTEMPTS:
        return f"taken away {QUICK_ATTEMPTS} times within an hour each"
    return None


def order_from(choice: int, count: int) -> list[int]:
    """The other destinations in the order in which they are tried: those after this one, then from the first again."""
    return [(choice + step) % count for step in range(1, count)]


def unreachable(launch: Launch) -> list[Finding]:
    """A note for each of the run's other destinations that cannot take it over as it is."""
    job = launch.job
    others = [place for index, place in enumerate(launch.destinations) if index != launch.choice]
    told = {
        why: place for place in others if (why := cannot_move(job.source, job.run_uri, job.run_id, place))
    }
    return [
        Finding("launch.destination", "note", f"not later to {place}: {why}") for why, place in told.items()
    ]


def cannot_move(recipe: Recipe, run_uri: str, run_id: str, destination: Destination) -> str | None:
    """Why a run that lives at `run_uri` cannot go on at a destination, as the recipe's own places tell; None: it can.

    A run directory is one place: a backend whose runs the recipe keeps in another kind of store gets there by a copy.
    """
    try:
        there = resolve(recipe, destination.backend)
    except RecipeError as error:
        return str(error)
    assert isinstance(there.run_directory, str)
    here, wanted = scheme_of(run_uri), scheme_of(there.run_directory)
    if here == wanted:
        return None
    target = join(there.run_directory, run_id)
    return (
        f"{destination.backend} keeps its runs at {wanted}://, this one is at {here}://; "
        f"`isthmus runs copy {run_id} --to {target}` carries it over"
    )
