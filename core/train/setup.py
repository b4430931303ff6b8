"""Everything that training needs, opened, checked and in agreement on all ranks."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from dataclasses import dataclass
from typing import Any

import torch

import isthmus
from isthmus.core.models.families import build_denoiser, resolved_config
from isthmus.core.recipe.dump import dump_recipe, recipe_data, recipe_hash
from isthmus.core.recipe.schema import Recipe, Source
from isthmus.core.train.agreement import on_rank_0
from isthmus.core.train.checkpoint import Checkpoints
from isthmus.core.train.control import spent_hours, usd_per_hour
from isthmus.core.train.data import make_inputs
from isthmus.core.train.ema import EMA
from isthmus.core.train.initial import settled, start_weights
from isthmus.core.train.objective import Objective
from isthmus.core.train.own_code import bring_code, check_same_weights
from isthmus.core.train.parallel import Engine, join_processes, prepare
from isthmus.core.train.randomness import Randomness, spare_threads
from isthmus.core.train.resuming import changes, check_same_recipe, stages_of
from isthmus.core.train.sources import Sources, open_sources
from isthmus.core.train.stages import Schedule
from isthmus.core.train.step import Inputs
from isthmus.core.train.trackers import check_installed
from isthmus.core.train.trainer_state import CHANGED_DATA_HINT, Identity, TrainerState
from isthmus.core.train.validation import check_prompts
from isthmus.errors import DatasetMismatch
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.stream.order import check_world_size

_PACKAGES = ("torch", "accelerate", "diffusers", "isthmus")


@dataclass(slots=True)
class Setup:
    """What :func:`set_up` made."""

    recipe: Recipe
    run: RunDirectory
    attempt: int
    engine: Engine
    ema: EMA
    inputs: Inputs
    randomness: Randomness
    sources: Sources
    held_out: Sources | None
    schedule: Schedule
    checkpoints: Checkpoints
    state: TrainerState
    resumed: bool
    spent_hours: float
    usd_per_hour: float | None


def set_up(recipe: Recipe, run: RunDirectory, *, cpu: bool | None = None) -> Setup:
    """Open the data, build and prepare the model, and load the newest checkpoint that verifies.

    Args:
        recipe: resolved for a backend.
        run: where the run lives; may be empty.
        cpu: train on the CPU even where there is a GPU; default: as `compute.gpu` says.

    Raises:
        UsageError and its kinds: what the user can fix.
        CheckpointError: no checkpoint verifies, or it is of another model.
    """
    cpu = recipe.compute.gpu == "none" or not torch.cuda.is_available() if cpu is None else cpu
    timeout = recipe.watchdog.collective_timeout_s(recipe.data.wait_limit)
    _, world_size = join_processes(cpu=cpu, timeout=datetime.timedelta(seconds=timeout))
    check_same_recipe(recipe)
    # Everything a user can get wrong is checked on rank 0 first, so that it is said once.
    on_rank_0(lambda: _check(recipe, world_size))
    sources = _open(recipe, recipe.data.sources)
    held_out = _open(recipe, recipe.validation.sources) if recipe.validation.sources else None
    on_rank_0(lambda: check_prompts(recipe, sources.datasets[0].prompts))
    attempt = on_rank_0(lambda: _open_run(recipe, run, sources, world_size))
    spent = on_rank_0(
        lambda: spent_hours(
            run.events("started"), run.read_metrics("train", all_attempts=True), attempt, now=time.time()
        )
    )
    counted_to = time.monotonic()

    bring_code(recipe, run)
    recipe = settled(recipe, run)
    denoiser = build_denoiser(recipe.model, recipe.seed)
    check_same_weights(denoiser, recipe)
    start_weights(denoiser, recipe, run)
    config = resolved_config(denoiser)
    inputs = make_inputs(recipe, sources, config)
    identity = Identity(_model_hash(denoiser, config), sources.fingerprints, recipe.version)
    engine = prepare(denoiser, recipe.optimizer, recipe.parallel, cpu=cpu)
    inputs = inputs.on(engine.device, engine.compute_dtype)
    ema = EMA(engine.parameters)
    checkpoints = Checkpoints(run, engine, ema, recipe.checkpoint, os.environ.get("ISTHMUS_LEASE_TOKEN"))
    loaded = checkpoints.load(identity, allow_changed_data=recipe.data.allow_changed)
    if loaded is not None:
        on_rank_0(lambda: _announce(recipe, run, loaded, attempt, world_size))
    return Setup(
        recipe=recipe,
        run=run,
        attempt=attempt,
        engine=engine,
        ema=ema,
        inputs=inputs,
        randomness=Randomness(
            recipe.seed,
            pin=engine.device.type == "cuda",
            threads=spare_threads() if engine.device.type == "cuda" else 1,
        ),
        sources=sources,
        held_out=held_out,
        schedule=Schedule(recipe.stages),
        checkpoints=checkpoints,
        state=(loaded or TrainerState(identity)).but(identity=identity, stages=stages_of(recipe)),
        resumed=loaded is not None,
        spent_hours=spent + (time.monotonic() - counted_to) / 3600,
        usd_per_hour=usd_per_hour(),
    )


def _announce(recipe: Recipe, run: RunDirectory, loaded: TrainerState, attempt: int, world_size: int) -> None:
    """Say from where training goes on, and what the recipe changes about the run."""
    lines = changes(recipe, loaded)
    run.event("resumed", step=loaded.step, attempt=attempt, world_size=world_size)
    print(f"resumed from the checkpoint of step {loaded.step}", flush=True)
    for line in lines:
        print(f"changed: {line}", flush=True)
        run.event("note", message=f"changed: {line}", step=loaded.step)


def _open(recipe: Recipe, sources: list[Source]) -> Sources:
    opened: list[Sources] = []
    on_rank_0(lambda: opened.append(open_sources(recipe, sources)))
    return opened[0] if opened else open_sources(recipe, sources)


def _check(recipe: Recipe, world_size: int) -> None:
    check_installed(recipe.trackers)
    batches = {
        f"stages.{index}.global_batch_size": stage.global_batch_size
        for index, stage in enumerate(recipe.stages)
    }
    for index, stage in enumerate(recipe.stages):
        Objective(stage.objective_over(recipe.objective))
        check_world_size(
            world_size,
            recipe.data.lanes,
            stage.global_batch_size,
            what=f"stages.{index}.",
            batches=batches,
        )


def _open_run(recipe: Recipe, run: RunDirectory, sources: Sources, world_size: int) -> int:
    """Record what is trained on, refuse other data than before; returns the number of this attempt."""
    fingerprints = list(sources.fingerprints)
    if not run.exists():
        facts = {
            "id": run.uri.rstrip("/").rsplit("/", 1)[-1],
            "name": recipe.name,
            "backend": None,
            "created": time.time(),
            "recipe": recipe_data(recipe),
            "recipe_hash": recipe_hash(recipe),
        }
        run.create(dump_recipe(recipe), facts)
    before = run.read_run_json().get("dataset_fingerprints")
    if before and before != fingerprints:
        if not recipe.data.allow_changed:
            raise DatasetMismatch(
                "the data is not the run's: its fingerprint changed since the run began",
                where=sources.datasets[0].uri,
                hint=CHANGED_DATA_HINT,
            )
        message = (
            "the data is not the run's: samples come in another order from here on, some twice or not at all"
        )
        print(f"warning: {message}", flush=True)
        run.event("note", message=message)
    run.update_run_json(
        dataset_fingerprints=fingerprints,
        packages={name: _version(name) for name in _PACKAGES},
        python=platform.python_version(),
        world_size=world_size,
    )
    told = os.environ.get("ISTHMUS_ATTEMPT")
    if told is not None:
        return int(told)
    # No worker started this process: it announces itself, as a worker would have.
    attempt = len(run.events("started")) + 1
    run.event("started", attempt=attempt, host=platform.node(), nodes=1, world_size=world_size)
    return attempt


def _version(package: str) -> str | None:
    if package == "isthmus":
        return isthmus.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _model_hash(denoiser: torch.nn.Module, config: dict[str, Any]) -> str:
    settings = {key: value for key, value in config.items() if not key.startswith("_")}
    text = json.dumps([type(denoiser).__name__, settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
