"""Checkpoints in one process: complete or not there, verified, and safe to read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import IDENTITY, engine, step
from training import MODELS

from isthmus.core.models.families import build_from_config
from isthmus.core.models.presets import CLASSES
from isthmus.core.recipe.schema import Checkpoint as Settings
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train import manifest
from isthmus.core.train.checkpoint import Checkpoints, Identity, TrainerState, flat_state, read_weights
from isthmus.core.train.ema import EMA
from isthmus.core.train.parallel import Engine, prepare
from isthmus.core.train.weights import checksum
from isthmus.errors import CheckpointError, DatasetMismatch, LeaseLost, StorageError
from isthmus.storage import uploads
from isthmus.storage.rundir import RunDirectory


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/run"


def checkpoints(place: str, made: Engine, ema: EMA, token: str | None = None, **settings: Any) -> Checkpoints:
    return Checkpoints(RunDirectory(place), made, ema, Settings.model_validate(settings), token)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_what_was_saved_is_what_is_read_whatever_the_strategy(place: str, strategy: str) -> None:
    made, ema = engine(strategy)
    for number in (1, 2, 3):
        step(made, ema, number)
    state = TrainerState(IDENTITY, step=3, stage=0, samples=24, skipped=1)
    checkpoints(place, made, ema).save(state)
    expected = checksum(flat_state(made, ema))
    weights = {name: weight.detach().clone() for name, weight in ema.shadow.items()}
    for other in ("ddp", "fsdp"):
        again, other_ema = engine(other, seed=1)
        assert checksum(flat_state(again, other_ema)) != expected
        found = checkpoints(place, again, other_ema).load(IDENTITY)
        assert found == state.but(ema_updates=3)
        assert checksum(flat_state(again, other_ema)) == expected
        assert other_ema.updates == 3
    plain = read_weights(RunDirectory(place), 3)
    assert set(weights) <= set(plain)
    for name, weight in weights.items():
        assert torch.equal(plain[name], weight.full_tensor() if hasattr(weight, "full_tensor") else weight)
    build_from_config(CLASSES["dit"], MODELS["dit"], 5).load_state_dict(plain, strict=True)


def test_only_the_newest_and_the_kept_ones_stay(place: str) -> None:
    made, ema = engine()
    saver = checkpoints(place, made, ema, keep=2, keep_every=4)
    for number in range(1, 8):
        saver.save(TrainerState(IDENTITY, step=number))
    assert saver.run.checkpoints() == [4, 6, 7]
    events = RunDirectory(place).events("checkpoint-committed")
    assert [event["step"] for event in events] == list(range(1, 8))


def test_a_lost_lease_commits_nothing(place: str) -> None:
    made, ema = engine()
    run = RunDirectory(place)
    with run.lease(30, "me") as lease:
        checkpoints(place, made, ema, token=lease.token).save(TrainerState(IDENTITY, step=1))
        with pytest.raises(LeaseLost):
            checkpoints(place, made, ema, token="0000-other").save(TrainerState(IDENTITY, step=2))
    assert run.checkpoints() == [1]
    assert checkpoints(place, made, ema).load(IDENTITY) is not None
    names = manifest.file_names(run.checkpoint_uri(0).rsplit("/", 1)[0])
    assert names == ["step-00000001"], "the leftover is cleaned when a run starts"


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        del data[len(data) // 2 :]
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "trainer.json", "COMMITTED"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path, how: str, name: str) -> None:
    made, ema = engine()
    saver = checkpoints(str(tmp_path), made, ema)
    for number in (1, 2):
        step(made, ema, number)
        saver.save(TrainerState(IDENTITY, step=number))
    damage(tmp_path / "checkpoints" / "step-00000002" / name, how)
    found = checkpoints(str(tmp_path), *engine()).load(IDENTITY)
    assert found is not None
    assert found.step == 1
    if (name, how) != ("COMMITTED", "gone"):  # Without COMMITTED there never was one.
        (note,) = RunDirectory(tmp_path).events("note")
        assert "step 2" in note["message"]
        assert name in note["message"]
        with pytest.raises(CheckpointError, match=name):
            read_weights(RunDirectory(tmp_path), 2)
        saver.save(TrainerState(IDENTITY, step=2))
        assert read_weights(RunDirectory(tmp_path), 2)


def test_when_all_are_damaged_it_says_so_and_does_not_start_over(tmp_path: Path) -> None:
    made, ema = engine()
    checkpoints(str(tmp_path), made, ema).save(TrainerState(IDENTITY, step=1))
    damage(tmp_path / "checkpoints" / "step-00000001" / "__0_0.distcp", "flipped")
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        checkpoints(str(tmp_path), made, ema).load(IDENTITY)
    assert RunDirectory(tmp_path).checkpoints() == [1]


@pytest.mark.parametrize(
    ("identity", "error", "says"),
    [
        (Identity("other", ("data",), 1), CheckpointError, "another model"),
        (Identity("model", ("other",), 1), DatasetMismatch, "trained on datasets data"),
        (Identity("model", ("data",), 2), CheckpointError, "recipe version 1"),
    ],
)
def test_another_runs_checkpoint_is_refused(
    tmp_path: Path, identity: Identity, error: type[Exception], says: str
) -> None:
    made, ema = engine()
    checkpoints(str(tmp_path), made, ema).save(TrainerState(IDENTITY, step=1))
    with pytest.raises(error, match=says):
        checkpoints(str(tmp_path), made, ema).load(identity)


def test_a_tensor_of_another_shape_is_one_line(tmp_path: Path) -> None:
    made, ema = engine()
    checkpoints(str(tmp_path), made, ema).save(TrainerState(IDENTITY, step=1))
    model = build_from_config(CLASSES["dit"], {**MODELS["dit"], "num_layers": 3}, 0)
    other = prepare(model, Optimizer(), Parallel(precision="fp32"), cpu=True)
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        checkpoints(str(tmp_path), other, EMA(other.parameters)).load(IDENTITY)
    assert "\n" not in str(caught.value)


def test_a_write_that_fails_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ema = engine()
    saver = checkpoints(str(tmp_path), made, ema, keep=1)
    saver.save(TrainerState(IDENTITY, step=1))

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(uploads, "_write", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        saver.save(TrainerState(IDENTITY, step=2))
    monkeypatch.undo()
    assert saver.run.checkpoints() == [1]
    found = checkpoints(str(tmp_path), made, ema).load(IDENTITY)
    assert found is not None
    assert found.step == 1


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("owned",))


@pytest.mark.parametrize("payload", [Evil(), {"a": 1}, torch.nn.Linear(1, 1)])
def test_a_pickle_from_a_stranger_cannot_run(payload: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError):
        manifest.load_metadata(pickle.dumps(payload))
    assert "owned" not in capsys.readouterr().out


def test_committed_lists_every_file_with_size_and_hash(tmp_path: Path) -> None:
    made, ema = engine()
    checkpoints(str(tmp_path), made, ema).save(TrainerState(IDENTITY, step=1))
    folder = tmp_path / "checkpoints" / "step-00000001"
    listed = json.loads((folder / "COMMITTED").read_text())
    assert set(listed["files"]) == {path.name for path in folder.iterdir()} - {"COMMITTED"}
    for name, facts in listed["files"].items():
        assert facts["size"] == (folder / name).stat().st_size
        assert len(facts["sha256"]) == 64
