"""Exports of tiny, really trained runs: diffusers' own classes open them and draw the same pictures.

One run of each family, encoded by tiny models of the real classes and trained for two steps in this process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from isthmus.cli.app import build
from isthmus.core.encode import tiny
from isthmus.core.encode.emoji import EmojiSource
from isthmus.core.encode.encode import encode
from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.core.sample.export import export
from isthmus.core.sample.load import load_run
from isthmus.core.sample.sampling import initial_noise
from isthmus.core.train.loop import train
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory

PROMPTS = ["a red heart", "the blue square"]
STEPS, SCALE = 6, 3.0
MODELS: dict[str, dict[str, Any]] = {
    "unet": {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": [16, 32],
        "layers_per_block": 1, "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "attention_head_dim": 8,
        "cross_attention_dim": 32, "use_linear_projection": True, "norm_num_groups": 8,
    },
    "mmdit": {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 64,
        "caption_projection_dim": 32, "pooled_projection_dim": 48, "pos_embed_max_size": 16,
    },
    "dit": {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 32,
        "use_additional_conditions": False,
    },
    "sana": {
        "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "num_attention_heads": 2, "attention_head_dim": 16, "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 32,
    },
    "flux": {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2,
        "attention_head_dim": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 6, 6],
    },
}  # fmt: skip
SDXL = {
    "cross_attention_dim": 64, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 48 + 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.save_autoencoder(folder / "vae", shift_factor=None)
    tiny.save_autoencoder(folder / "vae_shifted", shift_factor=0.1)
    tiny.save_clip(folder / "clip", projection=False, seed=1)
    tiny.save_clip(folder / "clip_projected", projection=True, seed=2)
    tiny.save_t5(folder / "t5", seed=4)
    tiny.save_deep_autoencoder(folder / "dc", seed=6)
    tiny.save_gemma(folder / "gemma", seed=7)
    with pytest.MonkeyPatch.context() as patch:
        # SD3's T5 is as wide as both CLIPs together, and more.
        patch.setattr(tiny, "WIDTH", 64)
        tiny.save_t5(folder / "t5_wide", seed=5)
    return folder


def text(name: str, kind: str, source: Path, pooled: int | None = None) -> dict[str, Any]:
    section = {"name": name, "kind": kind, "source": str(source), "max_tokens": 16, "width": 32}
    return section | ({"pooled_width": pooled} if pooled else {})


def trained(
    folder: Path,
    family: str,
    encoders: list[dict[str, Any]],
    *,
    vae: Path | None,
    prediction_type: str = "flow",
    config: dict[str, Any] | None = None,
    shift: float | None = None,
    stage: dict[str, Any] | None = None,
) -> RunDirectory:
    """A run of two steps on 22 pictures, with a committed checkpoint."""
    autoencoder = (
        {"kind": "patch_pca", "source": "autoencoder"}
        if vae is None
        else {"kind": "diffusers", "source": str(vae)}
    )
    recipe = {
        "version": 1,
        "name": "tiny",
        "seed": 3,
        "model": {"family": family, "config": MODELS[family] | (config or {})},
        "encoders": {"autoencoder": autoencoder | {"latent_channels": 4, "factor": 4}, "text": encoders},
        "data": {"sources": [{"uri": str(folder / "data")}], "lanes": 2, "shuffle_window": 16},
        "objective": {"prediction_type": prediction_type} | ({} if shift is None else {"shift": shift}),
        "stages": [
            {
                "name": "32px", "resolution": 32, "steps": 2, "global_batch_size": 4, "micro_batch_size": 4,
                "learning_rate": 1e-2,
            }
            | (stage or {})
        ],
        "parallel": {"strategy": "ddp", "precision": "fp32"},
        "checkpoint": {"every": 1, "keep": 2},
        "compute": {"gpu": "none", "gpus_per_node": 1},
        "run_directory": str(folder / "runs"),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    loaded: Recipe = load_recipe(folder / "recipe.yaml").recipe
    encode(EmojiSource(size=32, variants=1), str(folder / "data"), loaded, device="cpu")
    run = RunDirectory(folder / "runs" / "tiny")
    assert train(loaded, run, cpu=True) == "finished"
    return run


def ours(run: RunDirectory) -> np.ndarray:
    """Pictures of our sampler, [n, H, W, 3] in [0, 1]."""
    pictures = load_run(run.uri).sample(PROMPTS, steps=STEPS, guidance_scale=SCALE, seed=5)
    return ((pictures + 1) / 2).permute(0, 2, 3, 1).numpy()


def theirs(pipeline: Any, **options: Any) -> np.ndarray:
    """Pictures of diffusers' pipeline from the same noise."""
    pipeline.set_progress_bar_config(disable=True)
    settings = {
        "num_inference_steps": STEPS,
        "guidance_scale": SCALE,
        "latents": initial_noise((len(PROMPTS), 4, 8, 8), 5),
        "output_type": "np",
        "height": 32,
        "width": 32,
    }
    found: np.ndarray = pipeline(PROMPTS, **(settings | options)).images
    return found


def assert_same(one: np.ndarray, other: np.ndarray, tolerance: float = 0.01) -> None:
    """Alike to `tolerance` of the range; text is stored in fp16, and the pipeline has it in fp32."""
    assert one.shape == other.shape == (2, 32, 32, 3)
    assert one.std() > 0.01, "a flat picture would prove nothing"
    assert np.abs(one - other).max() < tolerance


def exported(run: RunDirectory, folder: Path, name: str) -> Any:
    written = export(run.uri, str(folder))
    assert written.pipeline == name, written.note
    assert list(folder.rglob("*.safetensors"))
    assert not list(folder.rglob("*.bin"))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline).__name__ == name
    return pipeline


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_a_unet_with_one_clip_becomes_stable_diffusion(
    tiny_models: Path, tmp_path: Path, prediction_type: str
) -> None:
    run = trained(
        tmp_path,
        "unet",
        [text("clip", "clip", tiny_models / "clip")],
        vae=tiny_models / "vae",
        prediction_type=prediction_type,
    )
    pipeline = exported(run, tmp_path / "out", "StableDiffusionPipeline")
    assert_same(theirs(pipeline), ours(run))


def test_a_unet_with_two_clips_and_sizes_becomes_sdxl(tiny_models: Path, tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        "unet",
        [
            text("clip_l", "clip", tiny_models / "clip"),
            text("clip_g", "clip", tiny_models / "clip_projected", pooled=24),
        ],
        vae=tiny_models / "vae",
        prediction_type="epsilon",
        config=SDXL,
    )
    pipeline = exported(run, tmp_path / "out", "StableDiffusionXLPipeline")
    assert_same(theirs(pipeline), ours(run))


def test_an_mmdit_becomes_stable_diffusion_3(tiny_models: Path, tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        "mmdit",
        [
            text("clip_l", "clip", tiny_models / "clip_projected", pooled=24),
            text("clip_g", "clip", tiny_models / "clip_projected", pooled=24),
            text("t5", "t5", tiny_models / "t5_wide") | {"width": 64},
        ],
        vae=tiny_models / "vae_shifted",
        shift=3.0,
    )
    pipeline = exported(run, tmp_path / "out", "StableDiffusion3Pipeline")
    assert_same(theirs(pipeline, max_sequence_length=16), ours(run))


def test_a_dit_with_t5_becomes_pixart_sigma(tiny_models: Path, tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        "dit",
        [text("t5", "t5", tiny_models / "t5")],
        vae=tiny_models / "vae",
        prediction_type="epsilon",
    )
    pipeline = exported(run, tmp_path / "out", "PixArtSigmaPipeline")
    pictures = theirs(pipeline, max_sequence_length=16, use_resolution_binning=False, clean_caption=False)
    assert_same(pictures, ours(run))


def test_positions_that_a_stage_scaled_are_exported(tiny_models: Path, tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        "dit",
        [text("t5", "t5", tiny_models / "t5")],
        vae=tiny_models / "vae",
        prediction_type="epsilon",
        config={"sample_size": 16},
        stage={"pos_embed_interpolation": 0.5},
    )
    pipeline = exported(run, tmp_path / "out", "PixArtSigmaPipeline")
    pictures = theirs(pipeline, max_sequence_length=16, use_resolution_binning=False, clean_caption=False)
    assert_same(pictures, ours(run))
    assert pipeline.transformer.config.interpolation_scale == 0.5
    pipeline.transformer.pos_embed.interpolation_scale = 1.0
    pipeline.transformer.pos_embed.height = 0
    other = theirs(pipeline, max_sequence_length=16, use_resolution_binning=False, clean_caption=False)
    assert np.abs(other - pictures).max() > 0.01, "the scale matters to the picture"


def test_a_dit_of_flow_draws_nearly_the_same_with_the_pipelines_solver(
    tiny_models: Path, tmp_path: Path
) -> None:
    run = trained(tmp_path, "dit", [text("t5", "t5", tiny_models / "t5")], vae=tiny_models / "vae", shift=2.0)
    pipeline = exported(run, tmp_path / "out", "PixArtSigmaPipeline")
    options = {"max_sequence_length": 16, "use_resolution_binning": False, "clean_caption": False}
    pictures = load_run(run.uri).sample(PROMPTS, steps=100, guidance_scale=SCALE, seed=5)
    reference = ((pictures + 1) / 2).permute(0, 2, 3, 1).numpy()
    assert_same(theirs(pipeline, num_inference_steps=100, **options), reference, tolerance=0.05)


def test_a_sana_becomes_its_pipeline(tiny_models: Path, tmp_path: Path) -> None:
    run = trained(
        tmp_path, "sana", [text("gemma", "gemma", tiny_models / "gemma")], vae=tiny_models / "dc", shift=3.0
    )
    pipeline = exported(run, tmp_path / "out", "SanaPipeline")
    options = {"max_sequence_length": 16, "use_resolution_binning": False, "complex_human_instruction": None}
    assert_same(theirs(pipeline, **options), ours(run))


@pytest.mark.parametrize("embeds", [False, True])
def test_a_flux_becomes_its_pipeline(tiny_models: Path, tmp_path: Path, embeds: bool) -> None:
    run = trained(
        tmp_path,
        "flux",
        [
            text("clip_l", "clip", tiny_models / "clip", pooled=32),
            text("t5", "t5", tiny_models / "t5"),
        ],
        vae=tiny_models / "vae_shifted",
        config={"guidance_embeds": embeds},
        shift=3.0,
    )
    pipeline = exported(run, tmp_path / "out", "FluxPipeline")
    noise = pipeline._pack_latents(initial_noise((len(PROMPTS), 4, 8, 8), 5), 2, 4, 8, 8)
    options = {"latents": noise, "true_cfg_scale": SCALE, "negative_prompt": ["", ""], "guidance_scale": 1.0}
    assert_same(theirs(pipeline, max_sequence_length=16, **options), ours(run))


def test_an_autoencoder_that_diffusers_lacks_leaves_denoiser_and_scheduler(
    tiny_models: Path, tmp_path: Path
) -> None:
    run = trained(tmp_path, "dit", [text("t5", "t5", tiny_models / "t5")], vae=None)
    result = CliRunner().invoke(build(), ["export", run.uri, str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["pipeline"] is None
    assert "patch_pca" in facts["note"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["scheduler", "transformer"]
    denoiser = diffusers.PixArtTransformer2DModel.from_pretrained(tmp_path / "out", subfolder="transformer")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(
        tmp_path / "out", subfolder="scheduler"
    )
    assert scheduler.config.shift == 1.0
    averaged = load_run(run.uri).denoiser.state_dict()
    for name, weight in denoiser.state_dict().items():
        torch.testing.assert_close(weight, averaged[name])

    with pytest.raises(UsageError, match="not an empty folder"):
        export(run.uri, str(tmp_path / "out"))
    with pytest.raises(UsageError, match="no committed checkpoint of step 7"):
        export(run.uri, str(tmp_path / "other"), step=7)
    assert not (tmp_path / "other").exists()


def test_the_command_draws_a_grid_from_the_run(tiny_models: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, "dit", [text("t5", "t5", tiny_models / "t5")], vae=tiny_models / "vae")
    arguments = ["sample", run.uri, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--steps", "2", "--json"]
    grids = []
    for name, seed in (("one.png", "1"), ("again.png", "1"), ("two.png", "2")):
        place = tmp_path / name
        result = CliRunner().invoke(build(), [*arguments, "--seed", seed, "--out", str(place)])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["step"] == 2
        grids.append(place.read_bytes())
    assert grids[0] == grids[1] != grids[2]
