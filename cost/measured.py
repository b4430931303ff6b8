"""What was measured of a recipe's speed, as it is kept: one JSON file for each recipe, place and time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from isthmus.core.recipe.schema import Recipe
from isthmus.errors import StorageError, UsageError
from isthmus.files import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpeed:
    """Of one stage, over the steps that were measured."""

    stage: int
    resolution: int
    global_batch_size: int
    images_per_s: float
    """Of all ranks; the median step."""
    low: float
    high: float
    """An 80 % interval of what the whole stage will reach."""
    steps: int
    """Measured, without the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A short run of a recipe on real machines, and what it says of the whole one."""

    key: str
    """Of what was measured: see :func:`speed_key`."""
    recipe: str
    backend: str
    region: str
    sku: str
    nodes: int
    gpus_per_node: int
    gpu: str
    stages: tuple[StageSpeed, ...]
    start_s: float
    """From the start of the attempt (on this machine: from its submission) to its first step, compile included."""
    checkpoint_stall_s: float | None
    """Of one checkpoint: what its step took longer than others; None where none was written between steps."""
    first_validation_s: float | None
    """Of the first validation, which reads its samples; None where none was done."""
    validation_s: float | None
    """Of the ones after it."""
    end_s: float
    """From the last step to the end: the last checkpoint and validation included."""
    seconds: float
    """That the whole measurement ran."""
    time: float
    """When it ended, seconds since 1970."""
    run_uri: str
    gpu_figures: Mapping[str, float] | None = None
    """Means over the measured steps of what the GPUs said: percent busy, percent of memory used; None on a CPU."""
    predicted_s: float | None = None
    """The prediction for the whole run that was written down then."""

    def to_json(self) -> dict[str, Any]:
        """As it is kept and printed."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Reads what `to_json` wrote. Raises TypeError, KeyError or ValueError when it is something else."""
        stages = tuple(StageSpeed(**stage) for stage in data["stages"])
        found = cls(**{**data, "stages": stages})
        for stage in stages:
            if not (math.isfinite(stage.images_per_s) and 0 < stage.low <= stage.images_per_s <= stage.high):
                raise ValueError("a speed that cannot be")
        return found


def speed_key(recipe: Recipe) -> str:
    """What a recipe's speed depends on, machines aside: model, encoders' shapes, batches, parallelism, how data is read.

    Lengths, learning rates, prompts and places are not in it, so that a longer run of the same kind finds the measurement.
    """
    facts = {
        "model": recipe.model.model_dump(mode="json"),
        "latent": recipe.encoders.autoencoder.model_dump(mode="json", include={"latent_channels", "factor"}),
        "text": [
            encoder.model_dump(mode="json", include={"max_tokens", "width", "pooled_width"})
            for encoder in recipe.encoders.text
        ],
        "parallel": recipe.parallel.model_dump(mode="json"),
        "optimizer": recipe.optimizer.name,
        "access": recipe.data.access,
        "stages": [
            [stage.resolution, stage.global_batch_size, stage.micro_batch_size, stage.token_mask_ratio]
            for stage in recipe.stages
        ],
    }
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def record(folder: Path, measurement: Measurement) -> Path:
    """Keeps a measurement in a folder; returns its file. Raises StorageError."""
    place = f"{measurement.backend}-{measurement.region}-{measurement.sku}-{measurement.nodes}x{measurement.gpus_per_node}"
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in place)
    path = folder / f"{measurement.key}-{safe}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(measurement.to_json(), indent=1) + "\n")
    except OSError as error:
        raise StorageError(
            f"cannot keep the measurement: {error.strerror}",
            where=str(path),
            hint="set XDG_STATE_HOME to a folder that can be written",
        ) from error
    return path


def measurements(folder: Path, key: str) -> list[Measurement]:
    """Those of a key, the newest first. Raises UsageError on a file that cannot be read."""
    found = []
    for path in sorted(folder.glob(f"{key}-*.json")) if folder.is_dir() else []:
        try:
            found.append(Measurement.from_json(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"not a measurement: {error}", where=str(path), hint="remove it and measure again"
            ) from None
    return sorted(found, key=lambda measurement: -measurement.time)


def fitting(
    found: list[Measurement], *, backend: str, sku: str, nodes: int, gpus_per_node: int
) -> Measurement | None:
    """The newest one on the same machines of the same backend, in whatever region; None without one.

    Args:
        sku: `placing.ANY_CPU` for whatever machine without a GPU the backend chose.
    """
    from isthmus.cost.placing import ANY_CPU

    for measurement in found:
        same = (measurement.backend, measurement.nodes, measurement.gpus_per_node)
        machine = measurement.gpu == "none" if sku == ANY_CPU else measurement.sku == sku
        if same == (backend, nodes, gpus_per_node) and machine:
            return measurement
    return None
