"""The trainer with one thing wrong, as ALIVE_DO says; in place of `isthmus.core.train`, for tests of staying alive.

ALIVE_DO is one of::

    data RANK STEP       that rank waits for the batch of that step (1 after the first) for ever
    compute RANK STEP    it sleeps for ever where it would compute
    slow RANK SECONDS    it is so much slower in each step
    memory RANK STEP     it runs out of memory
    fail RANK STEP       it meets an error that no other rank does
    poison STEP [WHERE]  the batch that comes at that step has a huge loss, whenever it comes; WHERE kills rank 0 once,
                         while the spike is undone: `removed`, `appended` or `loaded`
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from isthmus.core.train import rewind
from isthmus.core.train.__main__ import main
from isthmus.core.train.step import Stepper
from isthmus.errors import StorageError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.stream.loader import Loader

WHAT, *WORDS = os.environ["ALIVE_DO"].split()
RANK = int(os.environ.get("RANK", "0"))


def at_step(change: Any) -> None:
    """Does something on the chosen rank where the chosen step is prepared."""
    prepare = Stepper.prepare

    def changed(self: Stepper, batch: Any, objective: Any) -> Any:
        if batch.step + 1 == int(WORDS[1]) and int(WORDS[0]) == RANK:
            change()
        return prepare(self, batch, objective)

    Stepper.prepare = changed  # type: ignore[method-assign]


def out_of_memory() -> None:
    """As torch says it."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fail() -> None:
    """An error of one rank."""
    raise StorageError("cannot read: the disk is gone", where="part-00001")


def poison(step: int) -> None:
    """Spoils the batch of a step, whenever its keys come again."""
    prepare = Stepper.prepare
    note = Path(os.environ["ALIVE_NOTES"]) / f"poison-{RANK}"

    def poisoned(self: Stepper, batch: Any, objective: Any) -> Any:
        prepared = prepare(self, batch, objective)
        keys = ",".join(batch.keys)
        if batch.step + 1 == step and not note.exists():
            note.write_text(keys)
        if note.exists() and note.read_text() == keys:
            prepared.noised.target.mul_(100.0)
        return prepared

    Stepper.prepare = poisoned  # type: ignore[method-assign]


def kill_while_undoing(where: str) -> None:
    """Kills rank 0 once, at a point of the rewind."""
    note = Path(os.environ["ALIVE_NOTES"]) / f"killed-{where}"

    def killing(before: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            found = before(*arguments, **named)
            if RANK == 0 and not note.exists():
                note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call

    if where == "removed":
        RunDirectory.remove_checkpoint = killing(RunDirectory.remove_checkpoint)  # type: ignore[method-assign]
    elif where == "appended":
        append = RunDirectory.append_segment
        killed = killing(append)

        def appended(self: RunDirectory, segment: Any) -> int:
            return int((killed if segment["skipped"] else append)(self, segment))

        RunDirectory.append_segment = appended  # type: ignore[method-assign]
    else:
        from isthmus.core.train import loop

        loop.go_back = killing(rewind.go_back)  # type: ignore[attr-defined]


def prepare_all() -> None:
    """Puts the wrong thing in place."""
    if WHAT == "data":
        following = Loader.__next__
        rank, step = int(WORDS[0]), int(WORDS[1])

        def waits(self: Loader) -> Any:
            batch = following(self)
            if batch.step + 1 == step and rank == RANK:
                time.sleep(600)
            return batch

        Loader.__next__ = waits  # type: ignore[method-assign]
    elif WHAT == "compute":
        at_step(lambda: time.sleep(600))
    elif WHAT == "memory":
        at_step(out_of_memory)
    elif WHAT == "fail":
        at_step(fail)
    elif WHAT == "slow":
        prepare = Stepper.prepare

        def slow(self: Stepper, batch: Any, objective: Any) -> Any:
            if int(WORDS[0]) == RANK:
                time.sleep(float(WORDS[1]))
            return prepare(self, batch, objective)

        Stepper.prepare = slow  # type: ignore[method-assign]
    elif WHAT == "poison":
        poison(int(WORDS[0]))
        if len(WORDS) > 1:
            kill_while_undoing(WORDS[1])


if __name__ == "__main__":
    prepare_all()
    sys.exit(main())
