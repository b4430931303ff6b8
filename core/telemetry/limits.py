"""Thresholds that could never be measured or met, found before a launch."""

from __future__ import annotations

import math

from isthmus.core.recipe.schema import Compute, Monitor, Threshold

BOARD_WATTS = {
    "a100-40gb": 400,
    "a100-80gb": 400,
    "h100-80gb": 700,
    "h200-141gb": 700,
    "b200-180gb": 1000,
    "l40s-48gb": 350,
    "a10g-24gb": 300,
}
"""Highest power limit of a board, watts: NVIDIA's data sheets, the SXM form where there is one."""

PERCENT = ("gpu_utilization", "gpu_memory", "data_wait")


def thresholds_of(monitor: Monitor) -> dict[str, Threshold]:
    """The thresholds that are set, by metric."""
    found = {name: getattr(monitor, name) for name in type(monitor).model_fields}
    return {name: threshold for name, threshold in found.items() if threshold is not None}


def unmeasurable(monitor: Monitor, compute: Compute) -> list[tuple[str, str]]:
    """Thresholds of a recipe that make no sense on its machines.

    Returns:
        ``(field path, what is wrong and what to do)``, empty when all can be watched.
    """
    problems: list[tuple[str, str]] = []
    for metric, threshold in thresholds_of(monitor).items():
        message = _problem(metric, threshold, compute)
        if message:
            problems.append((f"monitor.{metric}", message))
    return problems


def _problem(metric: str, threshold: Threshold, compute: Compute) -> str | None:
    if threshold.min is None and threshold.max is None:
        return "neither min nor max is set, so it would watch nothing"
    if threshold.min == "auto" and metric != "fabric_gigabytes_per_s":
        return "auto is known for fabric_gigabytes_per_s only; give a number"
    if metric.startswith("gpu_") and compute.gpu == "none":
        return "cannot be measured: compute.gpu is none; leave it out"
    if metric == "fabric_gigabytes_per_s" and compute.nodes == 1:
        return "cannot be measured: compute.nodes is 1, so no traffic crosses a fabric; leave it out"
    numbers = [bound for bound in (threshold.min, threshold.max) if isinstance(bound, (int, float))]
    if any(bound < 0 for bound in numbers):
        return "cannot be below zero"
    if metric in PERCENT and any(bound > 100 for bound in numbers):
        # SageMaker's own GPUUtilization is 0 to 100 times the number of GPUs.
        return "is a mean percentage, 0 to 100, whatever the number of GPUs"
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        return f"min {numbers[0]:g} is above max {numbers[1]:g}"
    if metric == "gpu_energy_kilojoules" and isinstance(threshold.min, (int, float)):
        return _unreachable_energy(threshold.min, threshold.for_, compute)
    return None


def _unreachable_energy(kilojoules: float, seconds: float, compute: Compute) -> str | None:
    watts = BOARD_WATTS[compute.gpu] * compute.gpus_per_node
    most = watts * seconds / 1000
    if kilojoules <= most:
        return None
    return (
        f"min {kilojoules:g} kJ within {seconds:g} s cannot be reached: {compute.gpus_per_node} x {compute.gpu} at "
        f"{BOARD_WATTS[compute.gpu]} W use at most {most:.4g} kJ; `for` must be at least {math.ceil(1000 * kilojoules / watts)} s"
    )
