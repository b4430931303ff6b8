"""The arithmetic of what a run takes, from a known speed."""

from __future__ import annotations


def run_hours(images: float, images_per_s: float) -> float:
    """Wall-clock hours in which `images` are seen once at `images_per_s` (of the whole cluster).

    Nothing is added for start-up, validation, checkpoints or preemption. Stages add up.

    Raises:
        ValueError: a negative number of images, or a speed that is not above zero.
    """
    if images < 0:
        raise ValueError(f"images must not be negative, got {images:g}")
    if images_per_s <= 0:
        raise ValueError(f"images_per_s must be above zero, got {images_per_s:g}")
    return images / images_per_s / 3600


def run_usd(hours: float, gpus: int, usd_per_gpu_hour: float) -> float:
    """US dollars for `gpus` GPUs over `hours` at a price for each GPU and hour.

    Raises:
        ValueError: negative hours, no GPU, or a price that is not above zero (a free GPU is a wrong price).
    """
    if hours < 0:
        raise ValueError(f"hours must not be negative, got {hours:g}")
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}")
    if usd_per_gpu_hour <= 0:
        raise ValueError(f"usd_per_gpu_hour must be above zero, got {usd_per_gpu_hour:g}")
    return hours * gpus * usd_per_gpu_hour
