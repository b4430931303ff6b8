"""How an attempt's end is told in the run directory, by whom of its nodes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from isthmus.core.cluster.joining import Attempt, type_of
from isthmus.core.outcome import EXIT_CODES, Verdict
from isthmus.errors import IsthmusError, StorageError
from isthmus.storage.rundir import RunDirectory

_ENDINGS = frozenset[str](EXIT_CODES)
_PATIENCE_S = 20.0
"""For the node that knows why to say so: its torchrun may still be ending what is left of its ranks."""


def better_word(
    run: RunDirectory,
    verdict: Verdict,
    attempt: Attempt,
    node: int = 0,
    peer: Mapping[str, Any] | None = None,
) -> Verdict:
    """Of a node whose ranks only lost those of another one: what that node says.

    A node that says nothing is gone with its machine, which is no fault of the training: the run is to be resumed, as
    after an eviction.

    Args:
        node: this one's rank.
        peer: a failure of another node that was heard of while the ranks ran.
    """
    if verdict.status != "failed" or not (verdict.echo or (peer is not None and verdict.at is None)):
        return verdict
    # One after the other, so that of many survivors one tells it.
    deadline = time.monotonic() + _PATIENCE_S + 2.0 * min(node, 8)
    while peer is None and time.monotonic() < deadline:
        with contextlib.suppress(IsthmusError):
            peer = _ending_of_another(run, attempt)
        if peer is None:
            time.sleep(0.5)
    if peer is None:
        cause = f"{verdict.cause}; no word from its node, whose machine may be gone"
        return Verdict("preempted", EXIT_CODES["preempted"], cause, at=verdict.at, echo=True)
    status = peer["type"]
    code = int(peer.get("exit_code", EXIT_CODES[status]))
    return Verdict(status, code, peer.get("cause"), peer.get("rank"), peer.get("at"), echo=True)


def _ending_of_another(
    run: RunDirectory, attempt: Attempt, *, echoes: bool = False
) -> Mapping[str, Any] | None:
    """An ending of the attempt that a node has told; with `echoes` also one that only tells of others."""
    for name in reversed(run.file_names("events")):
        kind = type_of(name)
        if kind == "started":
            return None
        event = run.read_event(name) if kind in _ENDINGS else None
        if event is not None and event.get("attempt") == attempt.number and (echoes or not event.get("echo")):
            return event
    return None


def record(run: RunDirectory, verdict: Verdict, attempt: Attempt, node: int) -> None:
    """One event a run from node 0; and each other node tells what failed on it, while the attempt is the run's.

    That node 0 is gone can only be told by the others.
    """
    ours = verdict.status == "failed" or (verdict.status == "preempted" and verdict.echo)
    if node != 0 and (not ours or (verdict.echo and _known(run, attempt))):
        return
    fields: dict[str, Any] = {"attempt": attempt.number, "exit_code": verdict.exit_code}
    if verdict.cause:
        fields["cause"] = verdict.cause
    if verdict.rank is not None:
        fields["rank"] = verdict.rank
    if verdict.at is not None:
        fields["at"] = verdict.at
    if verdict.echo:
        fields["echo"] = True
    if node != 0:
        fields["node"] = node
    try:
        token = run.lease_token()
        if token not in (None, attempt.token):
            return  # another attempt's run by now; its lease went while this node's ranks were dying
        run.event(verdict.status, **fields)
    except StorageError as error:
        # The cause matters more than that it could not be written down: the disk may be what is full.
        print(f"warning: how it ended is not recorded: {error}", file=sys.stderr, flush=True)


def _known(run: RunDirectory, attempt: Attempt) -> bool:
    """Whether it has been told already, as far as this node knows."""
    try:
        return _ending_of_another(run, attempt, echoes=True) is not None
    except IsthmusError:
        return False
