"""A run's averaged weights as a folder that diffusers' own classes load.

Always written: the denoiser (``unet/`` or ``transformer/``, safetensors) and ``scheduler/``. Where diffusers has a
pipeline that does what the run trained (:mod:`isthmus.core.sample.pipelines`), the whole pipeline, for
``DiffusionPipeline.from_pretrained``; of a team's own family, or with a patch mixer, weights, configuration and code.

Whether it does is not assumed: the pipeline's own text embedding is compared with the one that was trained on.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from isthmus.core.models.conditioning import Condition
from isthmus.core.models.families import resolved_config
from isthmus.core.models.presets import CLASSES
from isthmus.core.packaging import file_name
from isthmus.core.sample.load import SampleableRun, load_run
from isthmus.core.sample.pipelines import PROBE, Plan, plan_pipeline
from isthmus.core.sample.sampling import TRAIN_TIMESTEPS, make_scheduler
from isthmus.errors import StorageError, UsageError


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: str
    step: int
    """Of the checkpoint."""
    pipeline: str | None
    """The diffusers class that opens the folder; None: denoiser and scheduler only."""
    denoiser: str
    """The denoiser's subfolder."""
    denoiser_class: str
    scheduler_class: str
    note: str | None
    """Why there is no pipeline, or what to pass when calling it."""

    def describe(self) -> str:
        """For people: what is there and how to open it."""
        opener = (
            f'DiffusionPipeline.from_pretrained("{self.folder}")'
            if self.pipeline
            else f'safetensors.torch.load_file("{self.folder}/denoiser/diffusion_pytorch_model.safetensors")'
            if self.denoiser == "denoiser"
            else f'{self.denoiser_class}.from_pretrained("{self.folder}", subfolder="{self.denoiser}")'
        )
        what = self.pipeline or f"{self.denoiser_class} and {self.scheduler_class}, no pipeline"
        lines = [f"wrote step {self.step}, EMA weights: {what}, to {self.folder}", f"open with: {opener}"]
        return "\n".join([*lines, *([f"note: {self.note}"] if self.note else [])])


def export(run_uri: str, folder: str, *, step: int | None = None) -> Exported:
    """Write a checkpoint's averaged weights for diffusers.

    Args:
        run_uri: the run directory.
        folder: a local folder that is empty or does not exist.
        step: of the checkpoint; default the newest committed one.

    Raises:
        UsageError: the folder holds something, or is no local path.
        StorageError: it cannot be written.
    """
    target = Path(folder)
    if "://" in folder:
        raise UsageError(
            f"{folder} is no local folder", hint="diffusers writes local files; copy the folder afterwards"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{folder} is not an empty folder", hint="choose another DIR")
    run = load_run(run_uri, step=step, device="cpu")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        written = _write(run, partial)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise StorageError(error.strerror or str(error), where=folder) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(folder=folder, **written)


def _write(run: SampleableRun, folder: Path) -> dict[str, Any]:
    denoiser: Any = run.denoiser
    if run.stage.pos_embed_interpolation is not None:
        # The table that was trained last follows from these two in diffusers, which computes it anew.
        denoiser.register_to_config(
            sample_size=run.stage.resolution // run.recipe.encoders.autoencoder.factor,
            interpolation_scale=run.stage.pos_embed_interpolation,
            **(
                {"use_additional_conditions": denoiser.use_additional_conditions}
                if run.recipe.model.family == "dit"
                else {}
            ),
        )
    scheduler = _scheduler(run)
    if run.recipe.model.family not in CLASSES:
        what = "is a team's own family, which diffusers has no class for; code.zip has it"
        return _write_own(run, folder, scheduler, f"{run.recipe.model.family} {what}")
    if run.recipe.model.patch_mixer is not None:
        # Their class would leave the mixer's weights out with a warning, and draw noise.
        what = "has a patch mixer, which diffusers' classes do not know; `model.init_from` takes the folder denoiser/"
        return _write_own(run, folder, scheduler, f"the model {what}")
    subfolder = "unet" if run.recipe.model.family == "unet" else "transformer"
    plan = plan_pipeline(run)
    pipeline, note = None, plan if isinstance(plan, str) else plan.note
    if isinstance(plan, Plan):
        pipeline = plan.build(_pipeline_scheduler(run, scheduler))
        pipeline.set_progress_bar_config(disable=True)
        difference = _difference(plan.embed(pipeline), run.condition([PROBE], _pixels(run)))
        if difference:
            note = f"{plan.name} embeds captions otherwise than the training data: {difference}"
            pipeline = None
    if pipeline is not None:
        pipeline.save_pretrained(folder, safe_serialization=True)
        scheduler = pipeline.scheduler
    else:
        denoiser.save_pretrained(folder / subfolder, safe_serialization=True)
        scheduler.save_pretrained(folder / "scheduler")
    return {
        "step": run.step,
        "pipeline": type(pipeline).__name__ if pipeline is not None else None,
        "denoiser": subfolder,
        "denoiser_class": type(denoiser).__name__,
        "scheduler_class": type(scheduler).__name__,
        "note": note,
    }


def _write_own(run: SampleableRun, folder: Path, scheduler: Any, note: str) -> dict[str, Any]:
    """A denoiser that diffusers has no class for: weights, configuration, and a team's own code that loads them."""
    from safetensors.torch import save_file

    place = folder / "denoiser"
    place.mkdir(parents=True)
    weights = {name: tensor.contiguous() for name, tensor in run.denoiser.state_dict().items()}
    save_file(weights, place / "diffusion_pytorch_model.safetensors")
    config = {"family": run.recipe.model.family, "config": resolved_config(run.denoiser)}
    (place / "config.json").write_text(json.dumps(config, indent=1, default=str))
    own_code = run.run.read_run_json().get("code")
    if own_code:
        (place / "code.zip").write_bytes(run.run.read_file(file_name(own_code["sha256"])) or b"")
    scheduler.save_pretrained(folder / "scheduler")
    return {
        "step": run.step,
        "pipeline": None,
        "denoiser": "denoiser",
        "denoiser_class": type(run.denoiser).__name__,
        "scheduler_class": type(scheduler).__name__,
        "note": note,
    }


def _scheduler(run: SampleableRun) -> Any:
    objective = run.objective
    return make_scheduler(
        objective.prediction_type,
        scheduler=run.recipe.validation.scheduler,
        noise_schedule=objective.noise_schedule,
        shift=objective.flow_shift,
    )


def _pipeline_scheduler(run: SampleableRun, scheduler: Any) -> Any:
    """The scheduler as the pipeline can hold it.

    Pipelines older than flow matching rescale their input (``scale_model_input``), which the flow scheduler lacks.
    The first-order DPM solver takes the same Euler steps along the same flow, on a grid that differs a little.
    """
    if run.recipe.model.family in ("mmdit", "sana", "flux") or hasattr(scheduler, "scale_model_input"):
        return scheduler
    from diffusers import DPMSolverMultistepScheduler

    return DPMSolverMultistepScheduler(
        num_train_timesteps=TRAIN_TIMESTEPS,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=run.objective.flow_shift,
        solver_order=1,
    )


def _pixels(run: SampleableRun) -> tuple[int, int]:
    return run.stage.resolution, run.stage.resolution


def _difference(theirs: Condition, ours: Condition) -> str | None:
    """How the pipeline's conditioning differs from the trained one, beyond fp16's rounding; None: it does not."""
    for name in ("tokens", "pooled", "mask"):
        one: Tensor | None = getattr(theirs, name)
        other: Tensor | None = getattr(ours, name)
        if one is None or other is None:
            continue
        if one.shape != other.shape:
            return f"{name} {tuple(one.shape[1:])} instead of {tuple(other.shape[1:])}"
        apart = (one.float() - other.float()).abs().max().item()
        if apart > 0.01 * max(1.0, other.float().abs().max().item()):
            return f"{name} are up to {apart:.2g} apart"
    return None
