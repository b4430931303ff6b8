"""Announces the denoiser; a recipe names it in `model.family`. Imported on every rank."""

from __future__ import annotations

from isthmus.core.plugins import DenoiserEntry, hookimpl


@hookimpl
def isthmus_denoisers() -> list[DenoiserEntry]:
    """`small-dit`."""
    return [("small-dit", "small_dit:SmallDiT")]
