"""Where trackers' points go: Accelerate's trackers, opened and written to in the tracker's own thread.

Accelerate opens and closes them, so that its conventions hold (MLflow's variables, `wandb.init`'s arguments); points
are written in batches, which its `log` does not know. Nothing secret is in a recipe: MLflow takes its server and
credentials from MLFLOW_TRACKING_URI and its kin, which Azure ML sets, and SageMaker's plugin too; Weights & Biases
from WANDB_API_KEY or its own file.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.core.recipe.alive import Tracker
from isthmus.core.recipe.dump import dump_recipe, recipe_data
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train.trackers import BATCH, Point, Sink
from isthmus.storage.rundir import RunDirectory


def make_sink(tracker: Tracker, recipe: Recipe, run: RunDirectory, *, attempt: int, step: int) -> Sink:
    """The sink of a recipe's tracker.

    Args:
        step: that was done last in the run.
    """
    if tracker.name == "tensorboard":
        return TensorBoard(tracker, recipe, run, step=step)
    if tracker.name == "mlflow":
        return MLflow(tracker, recipe, run)
    return WeightsAndBiases(tracker, recipe, run, attempt=attempt)


class TensorBoard:
    """Event files in the run directory's `tensorboard/`; on an object store a new one each time points are written."""

    def __init__(self, tracker: Tracker, recipe: Recipe, run: RunDirectory, *, step: int) -> None:
        self._options, self._recipe, self._run, self._step = tracker.options, recipe, run, step
        self._local = run.local_path()
        self._tracker: Any = None
        self._temporary: Any = None

    def open(self) -> None:
        """Makes the writer; what an earlier attempt wrote of later steps is hidden."""
        self._temporary = None if self._local is not None else tempfile.TemporaryDirectory()
        folder = self._local if self._local is not None else self._temporary.name
        options = {"purge_step": self._step + 1} if self._step else {}
        self._tracker = _accelerates("tensorboard")(
            run_name="tensorboard", logging_dir=str(folder), **options | self._options
        )
        self._tracker.start()
        text = "    " + dump_recipe(self._recipe).replace(
            "\n", "\n    "
        )  # indented: Markdown takes it as it is
        self._tracker.tracker.add_text("recipe", text, self._step)

    def write(self, points: Sequence[Point]) -> None:
        """Adds scalars and pictures, flushes once."""
        writer = self._tracker.tracker
        for point in points:
            for name, value in point.values.items():
                writer.add_scalar(name, value, point.step, walltime=point.time)
            if point.picture is not None:
                pixels = {"samples": _pixels(point.picture)[None]}
                self._tracker.log_images(pixels, step=point.step, dataformats="NHWC")
        writer.flush()
        if self._temporary is not None:
            self._upload()

    def close(self) -> None:
        """Ends the file."""
        self._tracker.finish()
        if self._temporary is not None:
            self._upload()
            self._temporary.cleanup()

    def _upload(self) -> None:
        # Objects do not grow: the file is ended, and the writer begins another with the next point.
        self._tracker.tracker.close()
        folder = Path(self._temporary.name) / "tensorboard"
        for path in sorted(folder.glob("events.*")):
            self._run.write_file(f"tensorboard/{path.name}", path.read_bytes())
            path.unlink()


class MLflow:
    """A run of MLflow, the same over all attempts unless its variables name another."""

    _KNOWN = "trackers/mlflow.json"

    def __init__(self, tracker: Tracker, recipe: Recipe, run: RunDirectory) -> None:
        self._settings, self._recipe, self._run = tracker, recipe, run
        self._tracker: Any = None
        self._client: Any = None

    def open(self) -> None:
        """Starts the run, or goes on with the one of an earlier attempt."""
        import mlflow

        mlflow.end_run()  # one that was begun before a try failed
        known = self._run.read_file(self._KNOWN)
        run_id = json.loads(known)["run_id"] if known else None
        options: dict[str, Any] = {
            "experiment_name": self._settings.project or self._recipe.name,
            "run_id": run_id,
            "run_name": _run_name(self._run),
        }
        self._tracker = _accelerates("mlflow")(**options | self._settings.options)
        self._tracker.start()
        self._client = mlflow.MlflowClient()
        found = self._tracker.tracker.info.run_id
        if found != run_id:
            self._tracker.store_init_configuration(dict(_flat(recipe_data(self._recipe))))
            self._run.write_file(self._KNOWN, json.dumps({"run_id": found}).encode())

    def write(self, points: Sequence[Point]) -> None:
        """Logs metrics in as few requests as MLflow allows, and grids as artifacts."""
        from mlflow.entities import Metric

        run_id = self._tracker.tracker.info.run_id
        metrics = [
            Metric(name, value, int(1000 * point.time), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(run_id, metrics=metrics[start : start + BATCH])
        for point in points:
            if point.picture is not None:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / f"step-{point.step:08d}.png"
                    path.write_bytes(point.picture)
                    self._client.log_artifact(run_id, str(path), "samples")

    def close(self) -> None:
        """Ends the run."""
        self._tracker.finish()


class WeightsAndBiases:
    """A run of Weights & Biases, the same over all attempts."""

    def __init__(self, tracker: Tracker, recipe: Recipe, run: RunDirectory, *, attempt: int) -> None:
        self._settings, self._recipe, self._run, self._attempt = tracker, recipe, run, attempt
        self._tracker: Any = None

    def open(self) -> None:
        """Starts the run, or goes on with it."""
        local = self._run.local_path()
        options: dict[str, Any] = {
            "id": re.sub(r"[^A-Za-z0-9_-]", "-", _run_name(self._run))[-64:],
            "name": _run_name(self._run),
            "resume": "allow",
            "dir": str(local if local is not None else tempfile.gettempdir()),
        }
        project = self._settings.project or self._recipe.name
        self._tracker = _accelerates("wandb")(project, **options | self._settings.options)
        self._tracker.start()
        self._tracker.store_init_configuration(recipe_data(self._recipe))
        # A step of its own: theirs must not go back, and training does after a restart or a rewind.
        self._tracker.tracker.define_metric("step")
        self._tracker.tracker.define_metric("*", step_metric="step")

    def write(self, points: Sequence[Point]) -> None:
        """Logs points; their client sends them in a process of its own."""
        for point in points:
            values: dict[str, Any] = {"step": point.step, **point.values}
            if point.picture is not None:
                import wandb
                from PIL import Image

                values["samples"] = wandb.Image(Image.open(io.BytesIO(point.picture)))
            self._tracker.log(values)

    def close(self) -> None:
        """Waits for their client."""
        self._tracker.finish()


def _accelerates(name: str) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS[name]


def _run_name(run: RunDirectory) -> str:
    return run.uri.rstrip("/").rsplit("/", 1)[-1]


def _pixels(png: bytes) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path -> value of a recipe, for trackers that know no sections."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    elif isinstance(data, list) and any(isinstance(item, (Mapping, list)) for item in data):
        for at, value in enumerate(data):
            yield from _flat(value, f"{path}.{at}")
    else:
        yield path, data if isinstance(data, (str, int, float, bool)) else json.dumps(data)
