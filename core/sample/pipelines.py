"""Which of diffusers' pipelines holds what a run trained, and how it is made.

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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from isthmus.core.models.conditioning import Condition
from isthmus.core.models.families import resolved_config
from isthmus.core.sample.load import SampleableRun

PROBE = "a red heart"
"""Embedded by the pipeline and by our encoders; any words would do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline that could hold the run, before it is known whether its text embedding is the trained one."""

    name: str
    build: Callable[[Any], Any]
    """Scheduler -> pipeline."""
    embed: Callable[[Any], Condition]
    """The pipeline's own conditioning of `PROBE`."""
    note: str | None = None


def plan_pipeline(run: SampleableRun) -> Plan | str:
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
        return Plan(
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
                    PROBE, None, None, max_sequence_length=length, do_classifier_free_guidance=False
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
        return Plan(
            "PixArtSigmaPipeline",
            lambda scheduler: diffusers.PixArtSigmaPipeline(
                tokenizer=text[0].tokenizer,
                text_encoder=text[0].model,
                vae=vae,
                transformer=run.denoiser,
                scheduler=scheduler,
            ),
            lambda pipe: _masked(
                pipe.encode_prompt(PROBE, do_classifier_free_guidance=False, max_sequence_length=length)
            ),
            f"call it with {', '.join(calls)}, as trained" if calls else None,
        )
    if family == "sana":
        return _sana(run, text, vae)
    if config.get("addition_embed_type") == "text_time":
        if kinds != ["clip", "clip"]:
            return f"StableDiffusionXLPipeline takes two clip, the recipe has {', '.join(kinds)}"
        return Plan(
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
            lambda pipe: _joint(pipe.encode_prompt(PROBE, do_classifier_free_guidance=False)),
        )
    if kinds != ["clip"]:
        return f"StableDiffusionPipeline takes one clip, the recipe has {', '.join(kinds)}"
    return Plan(
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
                PROBE, torch.device("cpu"), num_images_per_prompt=1, do_classifier_free_guidance=False
            )[0]
        ),
    )


def _sana(run: SampleableRun, text: list[Any], vae: Any) -> Plan | str:
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
    return Plan(
        "SanaPipeline",
        lambda scheduler: diffusers.SanaPipeline(
            tokenizer=text[0].tokenizer,
            text_encoder=text[0].model,
            vae=vae,
            transformer=run.denoiser,
            scheduler=scheduler,
        ),
        lambda pipe: _masked(
            pipe.encode_prompt(PROBE, do_classifier_free_guidance=False, max_sequence_length=length)
        ),
        f"call it with {', '.join(calls)}, as trained",
    )


def _flux(run: SampleableRun, text: list[Any], vae: Any) -> Plan | str:
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
    return Plan(
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
        lambda pipe: _tokens_and_pooled(pipe.encode_prompt(PROBE, max_sequence_length=length)),
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
