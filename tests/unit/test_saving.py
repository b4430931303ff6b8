"""Checkpoints in the background, in one process: what the step loop sees of them, and what stays when one fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from saving import IDENTITY, engine, step
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from isthmus.core.recipe.schema import Checkpoint as Settings
from isthmus.core.train import manifest, phases
from isthmus.core.train.checkpoint import Checkpoints, TrainerState, flat_state
from isthmus.core.train.control import Signals
from isthmus.core.train.ema import EMA
from isthmus.core.train.parallel import Engine
from isthmus.core.train.saving import Saving
from isthmus.core.train.weights import checksum
from isthmus.errors import CheckpointError, LeaseLost, StorageError
from isthmus.storage import uploads
from isthmus.storage.rundir import RunDirectory

Hold = Callable[[str], None]


class Trainer:
    """A model whose steps and checkpoints a test asks for."""

    def __init__(self, place: str, token: str | None = None, **settings: Any) -> None:
        self.engine: Engine
        self.ema: EMA
        self.engine, self.ema = engine("ddp")
        self.run = RunDirectory(place)
        self.checkpoints = Checkpoints(
            self.run, self.engine, self.ema, Settings.model_validate(settings), token
        )
        self.checkpoints.prepare()
        self.said: list[str] = []
        self.signals = Signals()
        self.saving = Saving(self.checkpoints, self.signals, saved_step=-1, say=self.said.append)
        self.state = TrainerState(IDENTITY)

    def step(self) -> str:
        """One step; returns the checksum of the state after it."""
        self.state = self.state.but(step=self.state.step + 1)
        step(self.engine, self.ema, self.state.step)
        self.saving.check(self.saving.signals_of_rank()[1] > 0)
        return checksum(flat_state(self.engine, self.ema))

    def landed(self) -> None:
        """Waits for the checkpoint in flight, as the next step would find it."""
        assert self.saving._flight is not None
        assert self.saving._flight.ended.wait(30)


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """`hold("writing=0.5")`: phases last at least so long, in whichever trainer is made."""

    def held(text: str) -> None:
        monkeypatch.setenv("ISTHMUS_TRACE_PHASES", str(tmp_path / "phases"))
        monkeypatch.setenv("ISTHMUS_HOLD_PHASES", text)
        phases.start_tracing(RunDirectory(tmp_path), 0)

    yield held
    phases.stop_tracing()


def test_training_goes_on_and_the_checkpoint_is_of_the_moment_it_was_begun(
    tmp_path: Path, hold: Hold
) -> None:
    trainer = Trainer(str(tmp_path / "run"))
    hold("writing=1")
    expected = trainer.step()
    started = time.perf_counter()
    trainer.saving.save(trainer.state)
    assert time.perf_counter() - started < 0.9
    for _ in range(3):
        assert trainer.step() != expected
    assert trainer.run.checkpoints() == []
    trainer.saving.save(trainer.state, last=True)
    assert trainer.run.checkpoints() == [1, 4]
    trainer.run.remove_checkpoint(4)
    again = Trainer(str(tmp_path / "run"))
    found = again.checkpoints.load(IDENTITY)
    assert found is not None
    assert found.step == 1
    assert checksum(flat_state(again.engine, again.ema)) == expected


def test_synchronous_is_synchronous(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path / "run"), asynchronous=False)
    trainer.step()
    trainer.saving.save(trainer.state)
    assert trainer.run.checkpoints() == [1]
    assert trainer.saving.take_stall() > 0
    assert trainer.saving.take_stall() == 0


def test_what_the_event_and_the_log_say(tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(str(tmp_path / "run"))
    hold("writing=0.2")
    trainer.step()
    trainer.saving.save(trainer.state)
    trainer.landed()
    trainer.step()
    (event,) = trainer.run.events("checkpoint-committed")
    assert event["step"] == 1
    assert event["bytes"] == trainer.run.read_commit(1)["bytes"]
    assert event["background_s"] >= 0.2
    assert 0 < event["stall_s"] < event["seconds"]
    assert event["seconds"] == pytest.approx(event["background_s"] + event["stall_s"], abs=0.002)
    assert len(trainer.said) == 1
    assert "checkpoint of step 1 committed in" in trainer.said[0]
    # A signal's grace is measured from the signal.
    monkeypatch.setenv("ISTHMUS_GRACE_S", "10")
    trainer.signals.received_at = time.monotonic() - 4
    trainer.saving.save(trainer.state, last=True, told=True)
    last = trainer.run.events("checkpoint-committed")[-1]
    assert 4 <= last["after_signal_s"] < 8
    assert last["grace_left_s"] == pytest.approx(10 - last["after_signal_s"], abs=0.02)
    assert "s of the grace left" in trainer.said[-1]


def test_a_grace_that_is_too_short_is_said(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(str(tmp_path / "run"))
    hold("writing=0.5")
    trainer.step()
    trainer.saving.save(trainer.state)
    trainer.landed()
    trainer.step()
    monkeypatch.setenv("ISTHMUS_GRACE_S", "4.3")
    trainer.signals.received_at = time.monotonic() - 4
    trainer.saving.save(trainer.state, last=True, told=True)
    assert any("may be cut short" in line for line in trainer.said)
    assert trainer.run.checkpoints() == [1, 2]


@pytest.mark.parametrize("every", ["1 steps", "0.001 s"])
def test_one_that_is_due_too_early_waits_then_is_left_out(tmp_path: Path, hold: Hold, every: str) -> None:
    trainer = Trainer(str(tmp_path / "run"), every=every, wait_limit="0.1 s")
    hold("writing=1")
    clock = trainer.saving.rhythm.by_clock
    for _ in range(3):
        trainer.step()
        due = trainer.saving.rhythm.due(trainer.state.step) or trainer.saving.signals_of_rank()[0] > 0
        # By the clock, nothing is due any more until the one in flight has ended.
        assert due or (clock and trainer.state.step == 3)
        if due:
            trainer.saving.save(trainer.state)
    assert 0.1 <= trainer.saving.take_stall() < 0.9
    notes = [event["message"] for event in trainer.run.events("note")]
    assert len(notes) == (1 if clock else 2)
    assert "checkpoint of step 2 is left out: the one of step 1 is still being written" in notes[0]
    assert notes == trainer.said
    trainer.landed()
    trainer.step()
    assert trainer.saving.rhythm.due(4) or trainer.saving.signals_of_rank()[0] > 0
    trainer.saving.save(trainer.state, last=True)
    assert trainer.run.checkpoints() == [1, 4]


def test_one_that_is_due_waits_for_the_one_in_flight(tmp_path: Path, hold: Hold) -> None:
    trainer = Trainer(str(tmp_path / "run"), wait_limit="30 s")
    hold("writing=0.3")
    for _ in range(3):
        trainer.step()
        trainer.saving.save(trainer.state)
    trainer.saving.save(trainer.state, last=True)  # the same step again: only waits
    assert trainer.run.checkpoints() == [1, 2, 3]
    assert len(trainer.run.events("checkpoint-committed")) == 3


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_failure_is_raised_after_the_next_step_and_older_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(str(tmp_path / "run"), keep=1)
    trainer.step()
    trainer.saving.save(trainer.state, last=True)
    trainer.step()
    monkeypatch.setattr(uploads, "_write", fail)
    trainer.saving.save(trainer.state)
    trainer.landed()
    with pytest.raises(StorageError, match="cannot write the checkpoint: the disk is full") as caught:
        trainer.step()
    assert "step-00000002" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert trainer.run.checkpoints() == [1]
    monkeypatch.undo()
    assert Trainer(str(tmp_path / "run")).checkpoints.load(IDENTITY) is not None
    assert not (tmp_path / "run" / "checkpoints" / "step-00000002").exists()


def test_a_failure_is_raised_by_the_last_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(str(tmp_path / "run"))
    trainer.step()
    monkeypatch.setattr(uploads, "_write", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        trainer.saving.save(trainer.state, last=True)


def test_a_lease_lost_meanwhile_commits_nothing(tmp_path: Path, hold: Hold) -> None:
    run = RunDirectory(tmp_path / "run")
    lease = run.lease(60, "me")
    trainer = Trainer(str(tmp_path / "run"), lease.token)
    hold("before-commit=0.3")
    trainer.step()
    trainer.saving.save(trainer.state)
    lease.release()
    with run.lease(60, "another"):
        trainer.landed()
        with pytest.raises(LeaseLost, match="may no longer write"):
            trainer.step()
    assert run.checkpoints() == []


def test_a_store_that_is_away_for_a_while_is_ridden_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = {"left": 4}
    pipe = MemoryFileSystem.pipe_file

    def away(self: MemoryFileSystem, path: str, value: bytes, *rest: Any, **more: Any) -> None:
        if "/step-" in path and refusals["left"]:
            refusals["left"] -= 1
            raise ConnectionError("away")
        pipe(self, path, value, *rest, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", away)
    trainer = Trainer(f"memory://{tmp_path.name}/run")
    trainer.step()
    trainer.saving.save(trainer.state, last=True)
    assert trainer.run.checkpoints() == [1]
    assert refusals["left"] == 0
    refusals["left"] = 10**6
    trainer = Trainer(f"memory://{tmp_path.name}/run", retry_budget="0.3 s")
    trainer.state = TrainerState(IDENTITY, step=1)
    trainer.step()
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"the connection was reset, tried \d+ times"):
        trainer.saving.save(trainer.state, last=True)
    assert 0.2 < time.monotonic() - started < 5
    assert trainer.run.checkpoints() == [1]


def test_a_store_that_is_away_when_reading_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(f"memory://{tmp_path.name}/run", retry_budget="0.2 s")
    for _ in range(2):
        trainer.step()
        trainer.saving.save(trainer.state, last=True)

    def away(*_: Any, **__: Any) -> Any:
        raise ConnectionError("away")

    monkeypatch.setattr(MemoryFileSystem, "_open", away)
    with pytest.raises(StorageError, match="the connection was reset"):
        trainer.checkpoints.load(IDENTITY)
    monkeypatch.undo()
    found = trainer.checkpoints.load(IDENTITY)
    assert found is not None
    assert found.step == 2
    assert trainer.run.events("note") == []


def test_a_newer_format_is_refused_not_passed_over(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path / "run"))
    for _ in range(2):
        trainer.step()
        trainer.saving.save(trainer.state, last=True)
    committed = tmp_path / "run" / "checkpoints" / "step-00000002" / "COMMITTED"
    body = json.loads(committed.read_text()) | {"format": manifest.FORMAT + 1}
    committed.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"step-00000002: was written by a newer isthmus") as caught:
        trainer.checkpoints.load(IDENTITY)
    assert "upgrade" in str(caught.value)
    found = trainer.checkpoints.load(IDENTITY, before=2)
    assert found is not None
    assert found.step == 1


def test_nothing_is_removed_before_the_new_one_is_committed(tmp_path: Path, hold: Hold) -> None:
    trainer = Trainer(str(tmp_path / "run"), keep=1)
    trainer.step()
    trainer.saving.save(trainer.state, last=True)
    hold("before-commit=0.2,pruning=0.3")
    trainer.step()
    trainer.saving.save(trainer.state)
    seen = set()
    while not trainer.saving._flight.ended.is_set():  # type: ignore[union-attr]
        seen.add(tuple(trainer.run.checkpoints()))
        time.sleep(0.01)
    assert seen == {(1,), (1, 2)} | ({(2,)} & seen)
    assert trainer.run.checkpoints() == [2]


def test_a_later_one_of_a_course_that_was_given_up_pushes_no_good_one_out(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path / "run"), keep=1)
    for number in (2, 9):
        trainer.checkpoints.save(TrainerState(IDENTITY, step=number))
    committed = tmp_path / "run" / "checkpoints" / "step-00000009" / "COMMITTED"
    committed.write_text(committed.read_text().replace("9", "8", 1))
    trainer.checkpoints.save(TrainerState(IDENTITY, step=5))
    found = trainer.checkpoints.load(IDENTITY)
    assert found is not None
    assert found.step == 5


def test_a_store_that_refuses_to_remove_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(f"memory://{tmp_path.name}/run", keep=1)
    trainer.step()
    trainer.saving.save(trainer.state, last=True)
    monkeypatch.setattr(trainer.run, "remove_checkpoint", RefusingRemoval(trainer.run))
    for _ in range(2):
        trainer.step()
        trainer.saving.save(trainer.state, last=True)
    assert trainer.run.checkpoints() == [1, 2, 3]
    assert capsys.readouterr().out.count("older checkpoints could not be removed") == 1


class RefusingRemoval:
    """A bucket whose policy forbids to delete what is committed."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def __call__(self, step: int) -> None:
        if step in self.run.checkpoints():
            raise StorageError("cannot remove: permission denied", where=self.run.uri)


def test_checkpoints_of_before_load_and_dcp_alone_reads_the_new_ones(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path / "run"))
    expected = trainer.step()
    # As they were written before: DCP's own writer, hashes by a second read, no stages in trainer.json.
    old = tmp_path / "run" / "checkpoints" / "step-00000001"
    dcp_save(flat_state(trainer.engine, trainer.ema), storage_writer=FileSystemWriter(old))
    identity = {"model": IDENTITY.model, "datasets": list(IDENTITY.datasets), "recipe_version": 1}
    (old / "trainer.json").write_text(json.dumps({"identity": identity, "step": 1, "ema_updates": 1}))
    files = manifest.describe(str(old), [path.name for path in old.iterdir()])
    trainer.run.commit_checkpoint(1, manifest.make(files, step=1, bytes=1, world_size=1))
    again = Trainer(str(tmp_path / "run"))
    found = again.checkpoints.load(IDENTITY)
    assert found is not None
    assert (found.step, found.stages) == (1, ())
    assert checksum(flat_state(again.engine, again.ema)) == expected

    after = again.step()
    again.checkpoints.save(TrainerState(IDENTITY, step=2))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in flat_state(again.engine, again.ema).items()}
    dcp_load(tensors, storage_reader=FileSystemReader(tmp_path / "run" / "checkpoints" / "step-00000002"))
    assert checksum(tensors) == after
    new = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-00000002").iterdir()}
    assert new == {path.name for path in old.iterdir()}


def test_phases_are_reported_in_order_and_only_when_asked(tmp_path: Path, hold: Hold) -> None:
    trainer = Trainer(str(tmp_path / "run"))
    trainer.step()
    trainer.saving.save(trainer.state, last=True)
    assert not (tmp_path / "phases").exists()
    hold("")
    trainer.step()
    trainer.saving.save(trainer.state, last=True)
    rows = [
        json.loads(line) for line in (tmp_path / "phases" / "phases-rank0.jsonl").read_text().splitlines()
    ]
    names = ["staged", "writing", "uploaded", "before-commit", "committed", "pruning"]
    assert [row["phase"] for row in rows] == names
    assert {(row["rank"], row["step"]) for row in rows} == {(0, 2)}
    assert sorted(row["time"] for row in rows) == [row["time"] for row in rows]
    assert phases.start_tracing(RunDirectory("memory://phases-nowhere"), 0) is not None
