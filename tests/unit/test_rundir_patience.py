"""A run directory whose store is away for a while: waited out by those who train, said at once to everybody else."""

from __future__ import annotations

import uuid

import pytest

from isthmus.errors import StorageError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.patience import PatientStore, persistently
from isthmus.storage.rundir.store import ObjectStore, storage_error


class Away:
    """A store that refuses the next `times` operations."""

    def __init__(self, store: ObjectStore, times: int) -> None:
        self.store, self.times, self.uri = store, times, store.uri

    def __getattr__(self, name):
        def operation(*arguments):
            if self.times > 0:
                self.times -= 1
                cause = ConnectionResetError(104, "reset")
                raise storage_error(cause, self.uri, name) from cause
            return getattr(self.store, name)(*arguments)

        return operation


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(f"memory://patience-{uuid.uuid4().hex}")


def test_every_operation_is_tried_again(store: ObjectStore) -> None:
    away = Away(store, 0)
    patient = PatientStore(away, 30)
    for work, expected in [
        (lambda: patient.write("a/b", b"1"), None),
        (lambda: patient.read("a/b"), b"1"),
        (lambda: patient.create("a/b", b"2"), False),
        (lambda: patient.names("a"), ["b"]),
        (lambda: patient.remove("a/b"), None),
    ]:
        away.times = 2
        assert work() == expected
        assert away.times == 0
    assert store.read("a/b") is None


def test_the_budget_ends_and_tries_within_tries_do_not_double_it(store: ObjectStore) -> None:
    patient = PatientStore(Away(store, 10**6), 0.3)
    waits: list[float] = []
    with pytest.raises(StorageError, match=r"tried \d+ times in \d s$"):
        persistently(lambda: patient.read("a"), 0.3, pause=waits.append)
    assert waits == []


def test_without_patience_it_is_said_at_once() -> None:
    run = RunDirectory("memory://impatient")
    assert not isinstance(run._store, PatientStore)
    assert isinstance(RunDirectory("memory://patient", patience=5)._store, PatientStore)


def test_what_will_not_pass_is_not_tried_again(store: ObjectStore) -> None:
    tries = []

    def full() -> None:
        tries.append(1)
        cause = OSError(28, "No space left on device")
        raise storage_error(cause, "disk", "write") from cause

    with pytest.raises(StorageError, match="the disk is full"):
        persistently(full, 30)
    assert len(tries) == 1
