"""Trackers: TensorBoard, MLflow and Weights & Biases for real where they are installed; and what fails or hangs."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train import trackers as module
from isthmus.core.train.tracker_sinks import make_sink
from isthmus.core.train.trackers import Point, Trackers, TrackerThread, check_installed, numbers
from isthmus.errors import NotInstalled
from isthmus.storage.rundir import RunDirectory


class Fake:
    """A sink that does what it is told."""

    def __init__(self, write: Callable[[Sequence[Point]], None] = lambda points: None) -> None:
        self.batches: list[list[Point]] = []
        self.opened = self.closed = 0
        self._write = write

    def open(self) -> None:
        self.opened += 1

    def write(self, points: Sequence[Point]) -> None:
        self._write(points)
        self.batches.append(list(points))

    def close(self) -> None:
        self.closed += 1

    @property
    def steps(self) -> list[int]:
        """Of all points that came."""
        return [point.step for batch in self.batches for point in batch]


def recipe(*trackers: str) -> Recipe:
    return load_recipe("quickstart", [f"trackers=[{', '.join(trackers)}]"]).recipe


def started(run: RunDirectory, *sinks: Fake, every: int = 1) -> Trackers:
    names = ("tensorboard", "mlflow", "wandb")[: len(sinks)]
    waiting = iter(sinks)
    settings = [f"{{name: {name}, every: {every}}}" for name in names]
    found = Trackers(recipe(*settings), run, attempt=1, step=0, sinks=lambda *_, **__: next(waiting))
    found.start()
    return found


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short waits, and no trace of what was left behind."""
    monkeypatch.setattr(module, "GATHER_S", 0.05)
    monkeypatch.setattr(module, "_PAUSE_S", (0.01, 0.05))
    yield
    TrackerThread.left_behind = False


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "time": 1.7e9 + step, "attempt": 1, "loss": 1.0 / step, **values}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_rows_come_in_order_in_batches_and_every_nth_is_shown(tmp_path: Path) -> None:
    sink = Fake()
    trackers = started(RunDirectory(tmp_path), sink, every=10)
    for step in range(1, 2001):
        trackers.row("train", row(step))
    trackers.row("validation", row(2001, bins=[0.5, 0.25]))
    trackers.picture(2001, b"png")
    trackers.close()
    assert sink.steps == [*range(10, 2001, 10), 2001, 2001]
    assert len(sink.batches) < 100
    assert (sink.opened, sink.closed) == (1, 1)
    points = [point for batch in sink.batches for point in batch]
    assert dict(points[-2].values) == {
        "validation/loss": 1 / 2001, "validation/bins/0": 0.5, "validation/bins/1": 0.25,
    }  # fmt: skip
    assert points[-1].picture == b"png"


def test_numbers_of_a_row_are_what_can_be_drawn() -> None:
    found = numbers("train", row(2, skipped=True, bucket="1:1", grad_norm=None, mfu=float("nan"), stage=1))
    assert found == {"train/loss": 0.5, "train/skipped": 1.0, "train/stage": 1.0}


def test_a_tracker_that_hangs_delays_no_step_and_drops_what_it_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "WAITING", 100)
    release = threading.Event()
    hung, other = Fake(lambda _: release.wait(60) and None), Fake()
    trackers = started(RunDirectory(tmp_path), hung, other)
    slowest = 0.0
    for step in range(1, 1001):
        began = time.perf_counter()
        trackers.row("train", row(step))
        slowest = max(slowest, time.perf_counter() - began)
        if step % 50 == 0:
            until(trackers._threads[1]._queue.empty)
    began = time.perf_counter()
    trackers.close(limit=0.5)
    assert time.perf_counter() - began < 5
    assert slowest < 5  # it hangs for a minute
    assert other.steps == list(range(1, 1001)), "it holds up no other tracker"
    said = capsys.readouterr().err
    assert "tracker tensorboard did not end within 0 s" in said.replace("within 1 s", "within 0 s")
    assert "points were not delivered" in said
    assert TrackerThread.left_behind
    release.set()


def test_a_tracker_that_fails_is_told_once_and_gets_everything_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = iter([ConnectionError("server away")] * 3)

    def refuse(points: Sequence[Point]) -> None:
        error = next(failures, None)
        if error is not None:
            raise error

    sink = Fake(refuse)
    run = RunDirectory(tmp_path)
    trackers = started(run, sink)
    for step in range(1, 101):
        trackers.row("train", row(step))
    until(lambda: len(sink.steps) == 100)
    trackers.close()
    assert sink.steps == list(range(1, 101))
    said = capsys.readouterr().err
    assert said.count("tracker tensorboard fails and is tried again, training goes on: ConnectionError") == 1
    assert [event["type"] for event in run.events()] == ["note"]


def test_what_a_tracker_never_takes_is_given_up_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(points: Sequence[Point]) -> None:
        raise SystemExit("a client that ends the process")

    trackers = started(RunDirectory(tmp_path), Fake(refuse))
    for step in range(1, 11):
        trackers.row("train", row(step))
    trackers.close()
    said = capsys.readouterr().err
    assert said.count("warning: ") == 2
    assert "tracker tensorboard: 10 points were not delivered" in said


def test_a_missing_package_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match=r"tracker wandb needs wandb.*isthmus\[trackers\]"):
        check_installed(recipe("wandb").trackers)
    check_installed([])


def grid() -> bytes:
    """A PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (8, 4), (255, 0, 0)).save(buffer, format="PNG")
    return buffer.getvalue()


def send(recipe: Recipe, run: RunDirectory, steps: range, *, done: int = 0) -> None:
    """What a training sends to the real trackers of a recipe."""
    from accelerate.state import PartialState

    PartialState(cpu=True)
    trackers = Trackers(recipe, run, attempt=1, step=done, sinks=make_sink)
    trackers.start()
    for step in steps:
        trackers.row("train", row(step, samples_per_s=100.0))
    trackers.row("validation", row(steps[-1], bins=[0.5, 0.25]))
    trackers.picture(steps[-1], grid())
    trackers.close(limit=60)
    assert not TrackerThread.left_behind


def curves(folder: Path) -> Any:
    """TensorBoard's own reading of its files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_tensorboard_shows_curves_grid_and_recipe_and_a_resume_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = RunDirectory(tmp_path)
    send(recipe("tensorboard"), run, range(1, 51))
    # A later attempt that resumed from step 40: what came after it is of a course that was given up.
    send(recipe("tensorboard"), run, range(41, 61), done=40)
    found = curves(tmp_path / "tensorboard")
    losses = found.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 61))
    assert losses[9].value == pytest.approx(1 / 10)
    assert losses[9].wall_time == 1.7e9 + 10
    assert found.Scalars("validation/bins/1")[-1].value == 0.25
    assert found.Images("samples")[-1].step == 60
    assert found.Tensors("recipe/text_summary")


def test_tensorboards_files_reach_a_store_that_cannot_append(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = RunDirectory(f"memory://{tmp_path.name}/run")
    send(recipe("tensorboard"), run, range(1, 51))
    import fsspec

    fsspec.filesystem("memory").get(
        f"/{tmp_path.name}/run/tensorboard", str(tmp_path / "copy"), recursive=True
    )
    found = curves(tmp_path / "copy")
    assert [event.step for event in found.Scalars("train/loss")] == list(range(1, 51))


def test_mlflow_has_one_run_over_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlflow")
    run = RunDirectory(tmp_path / "run")
    settings = recipe("{name: mlflow, project: colours, options: {tags: {team: blue}}}")
    send(settings, run, range(1, 2001))
    send(settings, run, range(2001, 2011), done=2000)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("colours")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == json.loads(run.read_file("trackers/mlflow.json") or b"")["run_id"]
    assert found.data.tags["team"] == "blue"
    assert found.data.params["stages.0.resolution"] == str(settings.stages[0].resolution)
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == list(range(1, 2011))
    assert {file.path for file in client.list_artifacts(found.info.run_id, "samples")} == {
        "samples/step-00002000.png", "samples/step-00002010.png",
    }  # fmt: skip


def test_weights_and_biases_writes_its_files_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    send(recipe("{name: wandb, options: {group: tests}}"), run, range(1, 51))
    (written,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    data = written.read_bytes()
    assert b"train/loss" in data
    assert b"validation/bins/1" in data
    assert b"tests" in data
    assert list((tmp_path / "run/wandb").glob("offline-run-*/files/media/images/samples_*.png"))
