"""What would go wrong on this machine, found before anything starts. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.backends.spec import Finding, Job
from isthmus.core.recipe.dump import recipe_hash
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import IsthmusError, NotInstalled, PreflightRefused, UsageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

BYTES_PER_PARAMETER = 16
"""Of a checkpoint: weights, EMA and two Adam moments, fp32."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    """CUDA devices of this machine, counted without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(
        [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    )
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def lint(job: Job, usd_per_hour: float | None) -> list[Finding]:
    """The findings that need neither data nor network."""
    compute = job.recipe.compute
    found = []
    if compute.nodes != 1:
        found.append(
            Finding(
                "local.nodes",
                "error",
                f"compute.nodes is {compute.nodes}; this machine is one node",
                "--set compute.nodes=1",
                2,
            )
        )
    if job.recipe.budget.max_usd is not None and usd_per_hour is None:
        found.append(
            Finding(
                "local.price",
                "error",
                "budget.max_usd needs a price for this machine",
                "--set backends.local.usd_per_hour=0.5, or use budget.max_hours",
                2,
            )
        )
    if compute.gpu == "none" and compute.gpus_per_node > cores():
        found.append(
            Finding(
                "local.cores",
                "warning",
                f"{compute.gpus_per_node} processes share {cores()} cores",
                f"--set compute.gpus_per_node={cores()}",
            )
        )
    if compute.gpu != "none" and cuda_devices() < compute.gpus_per_node:
        found.append(
            Finding(
                "local.gpus",
                "error",
                f"compute asks for {compute.gpus_per_node} x {compute.gpu}, this machine has {cuda_devices()} CUDA devices",
                "--set compute.gpu=none --set compute.gpus_per_node=2 trains on CPU",
                2,
            )
        )
    return found


def preflight(job: Job) -> list[Finding]:
    """The findings of looking: torch, data, memory, the run directory, disk space."""
    found: list[Finding] = []

    def try_to(id: str, check: Callable[[], Sequence[Finding] | None]) -> bool:
        try:
            found.extend(check() or [])
        except IsthmusError as error:
            found.append(Finding.of(id, error))
            return False
        return True

    try_to("local.torch", _torch)
    try_to("local.init-from", lambda: _init_from(job.recipe))
    try_to("local.data", lambda: _data(job.recipe, job.world_size))
    if try_to("local.run-directory", lambda: _run_directory(job)):
        try_to("local.disk", lambda: _disk(job))
    return found


def _torch() -> None:
    for module in ("torch", "accelerate", "diffusers"):
        if importlib.util.find_spec(module) is None:
            raise NotInstalled("training", extra="train", module=module)


def _init_from(recipe: Recipe) -> None:
    """The folder that a run's first weights come from is there; what is in it, the trainer looks at."""
    place = recipe.model.init_from
    if isinstance(place, str) and filesystems.is_local(place) and not filesystems.local_path(place).is_dir():
        raise UsageError(
            "no such folder",
            where=f"model.init_from {place}",
            hint="a folder or URI of a diffusers checkpoint",
        )


def _data(recipe: Recipe, world_size: int) -> None:
    """Every dataset is there, was made with the recipe's encoders, has the stages' latents, and fits in memory."""
    from isthmus.storage.shards import open_dataset
    from isthmus.storage.stream.stage import StageReader

    autoencoder = recipe.encoders.autoencoder
    datasets = []
    for source in [*recipe.data.sources, *recipe.validation.sources]:
        dataset = open_dataset(source.uri if isinstance(source.uri, str) else list(source.uri))
        dataset.check_encoders(
            {
                encoder.name: (encoder.max_tokens, encoder.width, encoder.pooled_width)
                for encoder in recipe.encoders.text
            },
            kind=autoencoder.kind,
            latent_channels=autoencoder.latent_channels,
            factor=autoencoder.factor,
        )
        datasets.append(dataset)
    training = datasets[: len(recipe.data.sources)]
    names = {bucket for dataset in training for bucket in dataset.manifest.rows}
    buckets = sorted(names | {bucket for dataset in training for bucket in dataset.spec.buckets})
    for number, stage in enumerate(recipe.stages):
        StageReader(
            number,
            stage.resolution,
            training,
            [source.repeat for source in recipe.data.sources],
            buckets,
            seed=recipe.seed,
            lanes=recipe.data.lanes,
            shuffle_window=recipe.data.shuffle_window,
        ).check_memory(recipe.data.memory_limit, world_size, stage.global_batch_size)


def _run_directory(job: Job) -> None:
    """It can be written, and holds no run of another recipe."""
    run = RunDirectory(job.run_uri)
    if job.attempt == 1:
        run.check_same_recipe(recipe_hash(job.source))
    probe = f"events/.probe-{secrets.token_hex(4)}"
    place = run.local_path("events")
    missing = [] if place is None else [folder for folder in (place, *place.parents) if not folder.exists()]
    try:
        run.write_file(probe, b"")
        run.remove_file(probe)
    finally:
        # A launch that is refused after all leaves no empty folders.
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _disk(job: Job) -> list[Finding]:
    """Room for the checkpoints that are kept, and one more while it is written."""
    from isthmus.core.models.profiles import profile

    figures = profile(job.recipe.model)
    if figures is None or not filesystems.is_local(job.run_uri):
        return []
    folder = filesystems.local_path(job.run_uri)
    while not folder.exists():
        folder = folder.parent
    need = figures.parameters * BYTES_PER_PARAMETER * (job.recipe.checkpoint.keep + 1)
    free = shutil.disk_usage(folder).free
    if need <= free:
        return []
    raise PreflightRefused(
        f"{job.recipe.checkpoint.keep} checkpoints and one being written need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
        where=str(folder),
        hint="lower checkpoint.keep, or choose another run_directory",
    )
