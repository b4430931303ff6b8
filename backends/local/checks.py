"""What would go wrong on this machine, found before anything starts. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.backends import encoding
from isthmus.backends.local import rules
from isthmus.backends.preflight import check_data, check_init_from, check_run_directory
from isthmus.backends.rules import Rule
from isthmus.backends.spec import Finding, Job
from isthmus.errors import IsthmusError, NotInstalled, PreflightRefused
from isthmus.storage import filesystems

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
        found.append(rules.NODES.found(f"compute.nodes is {compute.nodes}; this machine is one node"))
    if job.recipe.budget.max_usd is not None and usd_per_hour is None:
        found.append(rules.PRICE.found("budget.max_usd needs a price for this machine"))
    if compute.gpu == "none" and compute.gpus_per_node > cores():
        message = f"{compute.gpus_per_node} processes share {cores()} cores"
        found.append(rules.CORES.found(message, f"--set compute.gpus_per_node={cores()}"))
    if compute.gpu != "none" and cuda_devices() < compute.gpus_per_node:
        asked = f"{compute.gpus_per_node} x {compute.gpu}"
        message = f"compute asks for {asked}, this machine has {cuda_devices()} CUDA devices"
        found.append(rules.GPUS.found(message))
    return found


def preflight(job: Job) -> list[Finding]:
    """The findings of looking: torch, data, memory, the run directory, disk space."""
    found: list[Finding] = []

    def try_to(rule: Rule, check: Callable[[], Sequence[Finding] | None]) -> bool:
        try:
            found.extend(check() or [])
        except IsthmusError as error:
            found.append(Finding.of(rule.id, error))
            return False
        return True

    try_to(rules.TORCH, _torch)
    if job.recipe.encode is not None:
        try_to(rules.RUN_DIRECTORY, lambda: check_run_directory(job))
        return [*found, *encoding.look(job)]
    try_to(rules.INIT_FROM, lambda: check_init_from(job.recipe))
    try_to(rules.DATA, lambda: check_data(job.recipe, job.world_size))
    if try_to(rules.RUN_DIRECTORY, lambda: check_run_directory(job)):
        try_to(rules.DISK, lambda: _disk(job))
    return found


def _torch() -> None:
    for module in ("torch", "accelerate", "diffusers"):
        if importlib.util.find_spec(module) is None:
            raise NotInstalled("training", extra="train", module=module)


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
