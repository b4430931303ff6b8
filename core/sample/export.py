"""A run's averaged weights as a folder that diffusers' own classes load.

Always written: the denoiser (``unet/`` or ``transformer/``, safetensors) and ``scheduler/``. Where diffusers has a
pipeline that does what the run trained, the whole pipeline, for ``DiffusionPipeline.from_pretrained``:

====== ================================ ==========================
family text encoders                    pipeline
====== ================================ ==========================
unet   one clip                         StableDiffusionPipeline
unet   two clip, sizes embedded         StableDiffusionXLPipeline
mmdit  clip, clip, t5, and flow         StableDiffusion3Pipeline
dit    t5                               PixArtSigmaPipeline
sana   gemma, and AutoencoderDC, flow   SanaPipeline
flux   clip (pooled), t5, and flow      FluxPipeline
====== ================================ ==========================

Whether it does is not assumed: the pipeline's own text embedding is compared with the one that was trained on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.core.models.conditioning import Condition
from isthmus.core.models.families import resolved_config
from isthmus.core.sample.load import SampleableRun, load_run
from isthmus.core.sample.sampling import TRAIN_TIMESTEPS, make_scheduler
from isthmus.errors import StorageError, UsageError

_PROBE = "a red heart"
"""Embedded by the pipeline and by our encoders; any words would do."""


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
            else f'{self.denoiser_class}.from_pretrained("{self.folder}", subfolder="{self.denoiser}")'
        )
        what = self.pipeline or f"{self.denoiser_class} and {self.scheduler_class}, no pipeline"
        lines = [f"wrote step {self.step}, EMA weights: {what}, to {self.folder}", f"open with: {opener}"]
        return "\n".join([*lines, *([f"note: {self.note}"] if self.note else [])])


@dataclass(frozen=True, slots=True)
class _Plan:
    """A pipeline that could hold the run, before it is known whether its text embedding is the trained one."""

    name: str
    build: Callable[[Any], Any]
    """Scheduler -> pipeline."""
    embed: Callable[[Any], Condition]
    """The pipeline's own conditioning of `_PROBE`."""
    note: str | None = None


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
    subfolder = "unet" if run.recipe.model.family == "unet" else "transformer"
    plan = _plan(run)
    pipeline, note = None, plan if isinstance(plan, str) else plan.note
    if isinstance(plan, _Plan):
        pipeline = plan.build(_pipeline_scheduler(run, scheduler))
        pipeline.set_progress_bar_config(disable=True)
        difference = _difference(plan.embed(pipeline), run.condition([_PROBE], _pixels(run)))
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


def _plan(run: SampleableRun) -> _Plan | str:
    """The pipeline to try, or why there is none."""
    import diffusers

    recipe, config = run.recipe, resolved_config(run.denoiser)
    if recipe.encoders.autoencoder.kind != "diffusers":
        return f"diffusers has no autoencoder of kind {recipe.encoders.autoencoder.kind}, so no pipeline"
    kinds = [encoder.kind for encoder in recipe.encoders.text]
    family, vae = recipe.model.family, getattr(run.autoencoder, "model", None)
    shifted = run.autoencoder.shift_factor != 0
    text: list[Any] = list(run.text_encoders.values())
    if family == "mmdit":
        if kinds != ["clip", "clip", "t5"]:
            return f"StableDiffusion3Pipeline takes clip, clip and t5, the recipe has {', '.join(kinds)}"
        if run.objective.prediction_type != "flow":
            return f"StableDiffusion3Pipeline samples flow, not {run.objective.prediction_type}"
        length = text[2].max_tokens
        return _Plan(
            "StableDiffusion3Pipeline",
            lambda scheduler: diffusers.StableDiffusion3Pipeline(
                transformer=run.denoiser,
                scheduler=scheduler,
                vae=vae,
                text_encoder=text[0].model,
                tokenizer=text[0].tokenizer,
                text_encoder_2=text[1].model,
                tokenizer_2=text[1].tokenizer,
                text_encoder_3=text[2].model,
                tokenizer_3=text[2].tokenizer,
            ),
            lambda pipe: _joint(
                pipe.encode_prompt(
                    _PROBE, None, None, max_sequence_length=length, do_classifier_free_guidance=False
                )
            ),
            None if length == 256 else f"call it with max_sequence_length={length}, as trained",
        )
    if family == "flux":
        return _flux(run, text, vae)
    if shifted:
        return f"diffusers' pipelines of this family ignore the autoencoder's shift_factor {run.autoencoder.shift_factor}"
    if family == "dit":
        if kinds != ["t5"]:
            return f"PixArtSigmaPipeline takes t5, the recipe has {', '.join(kinds)}"
        if config.get("use_additional_conditions"):
            return "PixArtSigmaPipeline gives the model no sizes, and this one embeds them"
        length = text[0].max_tokens
        calls = [f"max_sequence_length={length}"] if length != 300 else []
        calls += [] if config["sample_size"] in (32, 64, 128, 256) else ["use_resolution_binning=False"]
        return _Plan(
            "PixArtSigmaPipeline",
            lambda scheduler: diffusers.PixArtSigmaPipeline(
                tokenizer=text[0].tokenizer,
                text_encoder=text[0].model,
                vae=vae,
                transformer=run.denoiser,
                scheduler=scheduler,
            ),
            lambda pipe: _masked(
                pipe.encode_prompt(_PROBE, do_classifier_free_guidance=False, max_sequence_length=length)
            ),
            f"call it with {', '.join(calls)}, as trained" if calls else None,
        )
    if family == "sana":
        return _sana(run, text, vae)
    if config.get("addition_embed_type") == "text_time":
        if kinds != ["clip", "clip"]:
            return f"StableDiffusionXLPipeline takes two clip, the recipe has {', '.join(kinds)}"
        return _Plan(
            "StableDiffusionXLPipeline",
            lambda scheduler: diffusers.StableDiffusionXLPipeline(
                vae=vae,
                text_encoder=text[0].model,
                text_encoder_2=text[1].model,
                tokenizer=text[0].tokenizer,
                tokenizer_2=text[1].tokenizer,
                unet=run.denoiser,
                scheduler=scheduler,
                # Caption dropout trained the embedding of an empty caption, not zeros.
                force_zeros_for_empty_prompt=False,
                add_watermarker=False,
            ),
            lambda pipe: _joint(pipe.encode_prompt(_PROBE, do_classifier_free_guidance=False)),
        )
    if kinds != ["clip"]:
        return f"StableDiffusionPipeline takes one clip, the recipe has {', '.join(kinds)}"
    return _Plan(
        "StableDiffusionPipeline",
        lambda scheduler: diffusers.StableDiffusionPipeline(
            vae=vae,
            text_encoder=text[0].model,
            tokenizer=text[0].tokenizer,
            unet=run.denoiser,
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ),
        lambda pipe: Condition(
            tokens=pipe.encode_prompt(
                _PROBE, torch.device("cpu"), num_images_per_prompt=1, do_classifier_free_guidance=False
            )[0]
        ),
    )


def _sana(run: SampleableRun, text: list[Any], vae: Any) -> _Plan | str:
    import diffusers

    kinds = [encoder.kind for encoder in run.recipe.encoders.text]
    if kinds != ["gemma"]:
        return f"SanaPipeline takes gemma, the recipe has {', '.join(kinds)}"
    if type(vae).__name__ != "AutoencoderDC":
        return f"SanaPipeline takes an AutoencoderDC, the run has a {type(vae).__name__}"
    if run.objective.prediction_type != "flow":
        return f"SanaPipeline is exported for flow, not for {run.objective.prediction_type}"
    length = text[0].max_tokens
    # Its default puts an instruction before every caption, which the training data did not have.
    calls = ["complex_human_instruction=None"] + ([f"max_sequence_length={length}"] if length != 300 else [])
    if resolved_config(run.denoiser)["sample_size"] not in (16, 32, 64, 128):
        calls.append("use_resolution_binning=False")
    return _Plan(
        "SanaPipeline",
        lambda scheduler: diffusers.SanaPipeline(
            tokenizer=text[0].tokenizer,
            text_encoder=text[0].model,
            vae=vae,
            transformer=run.denoiser,
            scheduler=scheduler,
        ),
        lambda pipe: _masked(
            pipe.encode_prompt(_PROBE, do_classifier_free_guidance=False, max_sequence_length=length)
        ),
        f"call it with {', '.join(calls)}, as trained",
    )


def _flux(run: SampleableRun, text: list[Any], vae: Any) -> _Plan | str:
    import diffusers

    kinds = [encoder.kind for encoder in run.recipe.encoders.text]
    if sorted(kinds) != ["clip", "t5"]:
        return f"FluxPipeline takes clip and t5, the recipe has {', '.join(kinds)}"
    if run.objective.prediction_type != "flow":
        return f"FluxPipeline samples flow, not {run.objective.prediction_type}"
    clip, t5 = sorted(text, key=lambda encoder: encoder.name != _named(run, "clip"))
    if type(clip.model).__name__ != "CLIPTextModel":
        return "FluxPipeline takes the pooled vector of a CLIP without projection, this one has one"
    if getattr(vae.config, "shift_factor", None) is None:
        return "FluxPipeline needs an autoencoder with a shift_factor, if only 0, and this one has none"
    if clip.max_tokens != clip.tokenizer.model_max_length:
        longest = clip.tokenizer.model_max_length
        return f"FluxPipeline cuts captions for clip at {longest} tokens, the recipe at {clip.max_tokens}"
    length = t5.max_tokens
    told = run.recipe.model.guidance_embedding
    embeds = bool(resolved_config(run.denoiser)["guidance_embeds"])
    calls = ["true_cfg_scale=..., negative_prompt=''", *([f"guidance_scale={told:g}"] if embeds else [])]
    calls += [f"max_sequence_length={length}"] if length != 512 else []
    return _Plan(
        "FluxPipeline",
        lambda scheduler: diffusers.FluxPipeline(
            scheduler=scheduler,
            vae=vae,
            text_encoder=clip.model,
            tokenizer=clip.tokenizer,
            text_encoder_2=t5.model,
            tokenizer_2=t5.tokenizer,
            transformer=run.denoiser,
        ),
        lambda pipe: _tokens_and_pooled(pipe.encode_prompt(_PROBE, max_sequence_length=length)),
        f"call it with {', '.join(calls)}, as trained",
    )


def _named(run: SampleableRun, kind: str) -> str:
    return next(encoder.name for encoder in run.recipe.encoders.text if encoder.kind == kind)


def _tokens_and_pooled(encoded: tuple[Any, ...]) -> Condition:
    return Condition(tokens=encoded[0], pooled=encoded[1])


def _joint(encoded: tuple[Any, ...]) -> Condition:
    tokens, _, pooled, _ = encoded
    return Condition(tokens=tokens, pooled=pooled)


def _masked(encoded: tuple[Any, ...]) -> Condition:
    tokens, mask = encoded[:2]
    return Condition(tokens=tokens * mask[..., None], mask=mask.bool())


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
