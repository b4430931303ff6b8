"""Training in the test's own process, and everything that came of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from training import recipe_data, rows, weights

from isthmus.core.recipe import parse_recipe, resolve
from isthmus.core.train.loop import train
from isthmus.storage.rundir import RunDirectory

EPSILON = {"objective__prediction_type": "epsilon", "objective__timestep_sampling": "uniform"}
"""Changes to a recipe of flow."""


def run(tmp_path: Path, data: str, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train in this process, and everything that came of it."""
    base = {"stages__0__steps": 4, "parallel__strategy": "ddp", "compute__gpus_per_node": 1}
    base["stages__0__lr_warmup_steps"] = 1
    if "stages" in changes:
        base = {key: value for key, value in base.items() if not key.startswith("stages")}
    text = json.dumps(recipe_data(data, **(base | changes)))
    recipe = resolve(parse_recipe(text, filename=name).recipe, "local")
    place = tmp_path / name
    ending = train(recipe, RunDirectory(place), cpu=True)
    found = rows(place)
    validation = rows(place, "validation")
    digest = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(place.glob("samples/*"))
    }
    return {
        "ending": ending,
        "losses": [row["loss"] for row in found],
        "norms": [row["grad_norm"] for row in found],
        "rates": [row["learning_rate"] for row in found],
        "samples": [row["samples"] for row in found],
        "stages": [row["stage"] for row in found],
        "model": weights(place, "model"),
        "ema": weights(place, "ema"),
        "checkpoints": RunDirectory(place).checkpoints(),
        "validation": [(row["step"], row["loss"], row["held_out"]) for row in validation],
        "bins": [len(row["bins"]) for row in validation],
        "grids": digest,
    }
