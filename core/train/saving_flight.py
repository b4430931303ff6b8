"""A checkpoint on its way to the store, in a thread of its own and on a process group of its own.

The order, on all ranks: the place is emptied; each rank sends its files and hashes them meanwhile; when all have,
rank 0 checks that it still holds the lease and writes COMMITTED; only then are old ones removed. Whatever fails
before leaves the older checkpoints as they were, and reaches every rank with the same cause.

The process group is its own because training's collectives and these come in no common order: on one group they
deadlock.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isthmus.core.train import manifest
from isthmus.core.train.agreement import everywhere, shared
from isthmus.core.train.phases import phase
from isthmus.core.train.saving_plan import Planned
from isthmus.core.train.trainer_state import STATE_FILE
from isthmus.errors import IsthmusError, StorageError
from isthmus.storage.rundir.patience import persistently
from isthmus.storage.uploads import Uploads

if TYPE_CHECKING:
    from isthmus.core.train.checkpoint import Run

FILES_AT_ONCE = 4
"""Files of a rank that are sent at the same time."""
_PIECE = 16 << 20


@dataclass(kw_only=True)
class Flight:
    """One checkpoint between the copy of its state and its end.

    The files' memory belongs to it until `ended`. Every rank must start one for the same step.
    """

    run: Run
    uploads: Uploads
    """Of the folder of all checkpoints."""
    step: int
    state: bytes
    """The content of `trainer.json`."""
    planned: Planned
    group: Any
    """Process group of all ranks for this alone; None for one rank."""
    rank: int
    world_size: int
    token: str | None
    retry_budget: float
    stall_s: float
    """How long training stood still for the copy."""
    before_commit: Callable[[], None] | None
    """On rank 0, when all files are there."""
    prune: Callable[[int], None]
    """On rank 0, after the commit, with its step."""
    facts: Callable[[], Mapping[str, Any]] = dict
    """More for the event."""
    ended: threading.Event = field(default_factory=threading.Event)
    committed: bool = False
    error: Exception | None = None
    background_s: float = 0.0
    """From the copy to COMMITTED."""
    bytes: int = 0
    """Of all files of all ranks; known on rank 0."""

    def start(self) -> None:
        """Goes on in the background."""
        # A daemon: a store that hangs must not keep a process from ending that has failed otherwise.
        threading.Thread(target=self.fly, name=f"checkpoint-{self.step}", daemon=True).start()

    def fly(self) -> None:
        """Writes and commits; sets `committed` or `error`, and `ended` in the end."""
        try:
            self._write_and_commit()
        except Exception as error:  # noqa: BLE001 - whatever it is, the step loop raises it
            self.error = error
        finally:
            self.ended.set()

    def _write_and_commit(self) -> None:
        started = time.perf_counter()
        uri = self.run.checkpoint_uri(self.step)
        self._on_rank_0(self._clear)
        phase("writing", self.step)
        parts = everywhere(lambda: _saying(uri, self._send), self.group)
        phase("uploaded", self.step)
        files = {name: facts for part in parts for name, facts in part.items()}
        self.bytes = sum(int(facts["size"]) for facts in files.values())
        self._on_rank_0(lambda: self._commit(files, started))
        self.committed = True
        if self.rank == 0:
            phase("pruning", self.step)
            self.prune(self.step)

    def _clear(self) -> None:
        self._check_token()
        # What is there is an attempt's leftover, or one that was found damaged: its step is being done again.
        self._keep_trying(lambda: self.run.remove_checkpoint(self.step))

    def _check_token(self) -> None:
        # An attempt that slept through its lease must touch nothing that its successor has written meanwhile.
        if self.token is not None:
            token = self.token
            self._keep_trying(lambda: self.run.check_token(token))

    def _send(self) -> dict[str, dict[str, Any]]:
        self._check_token()
        files: dict[str, memoryview | bytes] = dict(self.planned.image.files())
        if self.rank == 0:
            files |= {".metadata": self.planned.metadata, STATE_FILE: self.state}
        return send(self.uploads, self.run.checkpoint_uri(self.step).rsplit("/", 1)[1], files)

    def _commit(self, files: Mapping[str, Mapping[str, Any]], started: float) -> None:
        if self.before_commit is not None:
            self.before_commit()
        phase("before-commit", self.step)
        listed = manifest.make(files, step=self.step, bytes=self.bytes, world_size=self.world_size)
        self._keep_trying(lambda: self.run.commit_checkpoint(self.step, listed, token=self.token))
        phase("committed", self.step)
        self.background_s = time.perf_counter() - started
        event = {
            "step": self.step,
            "seconds": round(self.stall_s + self.background_s, 3),
            "stall_s": round(self.stall_s, 4),
            "background_s": round(self.background_s, 3),
            "bytes": self.bytes,
            **self.facts(),
        }
        self._keep_trying(lambda: self.run.event("checkpoint-committed", **event))

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        uri = self.run.checkpoint_uri(self.step)
        everywhere(lambda: _saying(uri, work) if self.rank == 0 else None, self.group)

    def _keep_trying(self, work: Callable[[], Any]) -> None:
        persistently(work, self.retry_budget)


def send(uploads: Uploads, folder: str, files: Mapping[str, memoryview | bytes]) -> dict[str, dict[str, Any]]:
    """Sends files into a folder, several at a time, and hashes them from the same memory meanwhile.

    Returns:
        Name -> {size, sha256}.

    Raises:
        StorageError: of the first file that could not be written; no more were begun.
    """
    waiting: list[str] = list(files)[::-1]
    lock = threading.Lock()
    errors: list[Exception] = []

    def work() -> None:
        if uploads.local:
            _give_way()
        while True:
            with lock:
                if not waiting or errors:
                    return
                name = waiting.pop()
            try:
                uploads.put(f"{folder}/{name}", files[name])
            except Exception as error:  # noqa: BLE001 - raised below
                with lock:
                    errors.append(error)

    described: dict[str, dict[str, Any]] = {}

    def describe() -> None:
        _give_way()
        for name, data in files.items():
            digest, view = hashlib.sha256(), memoryview(data)
            for start in range(0, len(view), _PIECE):
                digest.update(view[start : start + _PIECE])  # lets go of the interpreter's lock
                if errors:
                    return
            described[name] = {"size": len(view), "sha256": digest.hexdigest()}

    targets = [describe] + [work] * min(FILES_AT_ONCE, len(files))
    threads = [threading.Thread(target=target, name="checkpoint-files", daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if described.keys() != files.keys():
        raise StorageError("a thread ended without its hashes")
    return described


def _give_way() -> None:
    """This thread runs only when a core has nothing better to do: training does not wait for a checkpoint's hash."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with suppress(OSError):
            if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
                os.sched_setscheduler(
                    0, os.SCHED_OTHER, os.sched_param(0)
                )  # of a trainer in real time; niceness is ignored there
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _saying(uri: str, work: Callable[[], Any]) -> Any:
    """`work`, with its error as one line that says that it was a checkpoint that could not be written.

    Whatever it is: a rank that ended without telling the others would have them wait for it.
    """
    try:
        return work()
    except StorageError as error:
        raise _cannot_write(error, uri) from error
    except IsthmusError:
        raise
    except Exception as error:
        text = f"cannot write the checkpoint: {type(error).__name__}: {error}"
        raise StorageError(text, where=uri) from error


def _cannot_write(error: StorageError, uri: str) -> StorageError:
    message = f"cannot write the checkpoint: {error.message.removeprefix('cannot write: ')}"
    hint = error.hint or ("free some space, then resume" if "disk is full" in message else None)
    return StorageError(message, where=error.where or uri, hint=hint)


def as_shared(error: Exception) -> Exception:
    """The error of a flight as the step loop raises it: the same on all ranks, so that one says it."""
    return shared(error) if isinstance(error, IsthmusError) else error
