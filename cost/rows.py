"""Published throughputs, as rows that the estimator is fitted on (`cost/data/throughputs.csv`)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from isthmus.core.models.presets import PRESETS
from isthmus.core.models.profiles import Profile, profile
from isthmus.core.recipe.schema import Model
from isthmus.cost.gpus import GPUS, Gpu
from isthmus.cost.resolutions import figure_at
from isthmus.cost.speed import Work, work

FILE = Path(__file__).with_name("data") / "throughputs.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run."""

    publication: str
    submitter: str
    system: str
    model: str
    """A preset's name."""
    family: str
    gpu: Gpu
    gpus: int
    batch: int
    """Images of one step, all GPUs."""
    resolution: int
    images_per_s: float
    work: Work

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.batch / self.images_per_s

    @property
    def at_scale(self) -> bool:
        """Whether it is one of many nodes: where communication and waiting count."""
        return self.gpus >= AT_SCALE


AT_SCALE = 64
"""GPUs."""


@cache
def preset_profile(name: str) -> Profile:
    """The stored profile of a preset.

    Raises:
        KeyError: no such preset.
    """
    model = Model.model_validate({"family": PRESETS[name].family, "preset": name})
    found = profile(model)
    assert found is not None, f"profiles.json lacks {name}"
    return found


def published() -> list[Row]:
    """Every row whose accelerator is a GPU that the estimator knows; TPUs are kept in the file, not fitted."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [_row(row) for row in csv.DictReader(file) if row["gpu"] in GPUS]


def _row(row: dict[str, str]) -> Row:
    gpu, gpus, batch = GPUS[row["gpu"]], int(row["gpus"]), int(row["global_batch"])
    known, resolution = preset_profile(row["model"]), int(row["resolution"])
    return Row(
        publication=row["publication"],
        submitter=row["submitter"],
        system=row["system"],
        model=row["model"],
        family=PRESETS[row["model"]].family,
        gpu=gpu,
        gpus=gpus,
        batch=batch,
        resolution=resolution,
        images_per_s=float(row["images_per_s"]),
        work=work(
            gpu,
            images=batch / gpus,
            flops=figure_at(known, known.train_flops, resolution),
            activation_bytes=figure_at(known, known.activation_bytes, resolution),
            parameters=known.parameters,
            gpus=gpus,
            gpus_per_node=gpus // int(row["nodes"]),
        ),
    )
