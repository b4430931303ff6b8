"""Models, datasets and recipes that the trainer's benchmarks share, and the bare PyTorch loop they compare with."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Case:
    """One model and what it is fed."""

    name: str
    family: str
    class_name: str
    config: dict[str, Any]
    text: tuple[tuple[str, str, int, int, int | None], ...]
    """(name, kind, tokens, width, pooled width) of each encoder."""
    channels: int
    side: int
    """Latent cells a side."""
    batch: int
    """Samples of a rank in a step."""


FACTOR = 8
CASES = {
    case.name: case
    for case in (
        Case(
            name="pixart",
            family="dit",
            class_name="PixArtTransformer2DModel",
            config={
                "sample_size": 8, "patch_size": 1, "in_channels": 32, "out_channels": 32, "num_layers": 8,
                "num_attention_heads": 8, "attention_head_dim": 32, "cross_attention_dim": 256,
                "caption_channels": 384, "use_additional_conditions": False, "interpolation_scale": 1,
            },
            text=(("minilm", "minilm", 10, 384, None),),
            channels=32,
            side=8,
            batch=16,
        ),
        Case(
            name="unet",
            family="unet",
            class_name="UNet2DConditionModel",
            config={
                "sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": [64, 128, 256],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "transformer_layers_per_block": [1, 1, 2], "layers_per_block": 2,
                "attention_head_dim": [2, 4, 8], "cross_attention_dim": 160, "use_linear_projection": True,
                "addition_embed_type": "text_time", "addition_time_embed_dim": 32,
                "projection_class_embeddings_input_dim": 6 * 32 + 96,
            },
            text=(("clip_l", "clip", 16, 64, None), ("clip_g", "clip", 16, 96, 96)),
            channels=4,
            side=16,
            batch=4,
        ),
    )
}  # fmt: skip
"""PixArt with 8 blocks, and a small UNet built as SDXL's: two text encoders, pooled text, sizes."""


def make_dataset(case: Case, folder: str, samples: int = 512) -> None:
    """Random latents and text in the shards' format."""
    from isthmus.storage.shards import (
        AutoencoderSpec,
        DatasetSpec,
        DatasetWriter,
        EncoderSpec,
        Sample,
        TextColumn,
    )

    random = np.random.default_rng(0)

    def half(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32).astype(np.float16)

    def pooled(rows: int | None, width: int | None) -> Any:
        return None if width is None else half(*(() if rows is None else (rows,)), width)

    resolution, latent = FACTOR * case.side, (case.channels, case.side, case.side)
    spec = DatasetSpec(
        autoencoder=AutoencoderSpec("patch_pca", "benchmark", case.channels, FACTOR, 1.0),
        text=tuple(EncoderSpec(name, tokens, width, pool) for name, _, tokens, width, pool in case.text),
        resolutions=(resolution,),
    )
    with DatasetWriter(folder, spec) as writer:
        for index in range(samples):
            text = {
                name: (half(tokens, width), max(1, tokens - 4), pooled(None, pool))
                for name, _, tokens, width, pool in case.text
            }
            writer.add(
                Sample(
                    key=str(index),
                    captions=["x"],
                    text=[text],
                    latents={resolution: (half(*latent), half(*latent) - np.float16(4))},
                    original_size=(resolution, resolution),
                    crop=(0, 0, resolution, resolution),
                )
            )
        null = {
            name: TextColumn(half(1, tokens, width), np.full(1, 2, np.int32), pooled(1, pool))
            for name, _, tokens, width, pool in case.text
        }
        writer.finish(null)


def recipe_of(case: Case, folder: str, ranks: int, **changes: Any) -> dict[str, Any]:
    """A recipe on the dataset of `make_dataset`, as data; `changes` replace whole sections."""
    return {
        "version": 1,
        "name": "benchmark",
        "model": {"family": case.family, "config": case.config},
        "encoders": {
            "autoencoder": {
                "kind": "patch_pca", "source": "autoencoder", "latent_channels": case.channels,
                "factor": FACTOR,
            },
            "text": [
                {"name": name, "kind": kind, "source": "x", "max_tokens": tokens, "width": width}
                | ({} if pool is None else {"pooled_width": pool})
                for name, kind, tokens, width, pool in case.text
            ],
        },
        "data": {"sources": [{"uri": f"{folder}/data"}], "lanes": case.batch, "shuffle_window": 256},
        "objective": {"timestep_sampling": "logit_normal"},
        "stages": [
            {
                "name": "only", "resolution": FACTOR * case.side, "steps": 100_000,
                "global_batch_size": case.batch * ranks, "micro_batch_size": case.batch,
                "learning_rate": 1e-3,
            }
        ],
        "parallel": {"strategy": "ddp", "precision": "fp32"},
        "ema": {"decay": 0.999},
        "checkpoint": {"every": 100_000},
        "compute": {"gpu": "none", "gpus_per_node": ranks},
        "run_directory": f"{folder}/runs",
    } | changes  # fmt: skip


def make_loop(recipe: dict[str, Any], folder: str, *, cpu: bool = True) -> tuple[Any, Any]:
    """The trainer's own loop on a recipe, and its loader. What it would print goes nowhere, but is made."""
    from isthmus.core.recipe import parse_recipe, resolve
    from isthmus.core.train.control import Signals
    from isthmus.core.train.loop import Loop
    from isthmus.core.train.setup import set_up
    from isthmus.storage.rundir import RunDirectory

    parsed = resolve(parse_recipe(json.dumps(recipe), filename="benchmark").recipe, "local")
    loop = Loop(set_up(parsed, RunDirectory(f"{folder}/run"), cpu=cpu), Signals())
    loop.progress.stream = io.StringIO()
    return loop, loop.begin()


def bare_loop(case: Case, batches: list[Any]) -> Callable[[int], float]:
    """A step of a loop that a careful person writes by hand, replicated over the ranks by DDP."""
    from isthmus.core.models.families import build_from_config

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = build_from_config(case.class_name, case.config, 0).train()
    weights = list(model.parameters())
    called = (
        model
        if ranks == 1
        else torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    )
    average = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, foreach=True)
    generator = torch.Generator().manual_seed(dist.get_rank() if ranks > 1 else 0)
    updates = 0

    def condition(batch: Any) -> dict[str, Any]:
        drop = torch.rand(case.batch, generator=generator) < 0.1
        columns = [batch.text[name] for name, *_ in case.text]
        tokens = torch.cat([torch.from_numpy(column.tokens) for column in columns], dim=2).float()
        tokens = torch.where(drop[:, None, None], torch.zeros(1, *tokens.shape[1:]), tokens)
        if case.family == "unet":
            pooled = torch.from_numpy(columns[-1].pooled).float()
            pooled = torch.where(drop[:, None], torch.zeros(1, pooled.shape[1]), pooled)
            sizes = [torch.from_numpy(batch.original_size), torch.from_numpy(batch.crop)[:, :2]]
            target = torch.full((case.batch, 2), FACTOR * case.side)
            ids = torch.cat([*sizes, target], dim=1).float()
            return {
                "encoder_hidden_states": tokens,
                "added_cond_kwargs": {"text_embeds": pooled, "time_ids": ids},
            }
        mask = torch.arange(tokens.shape[1])[None] < torch.from_numpy(columns[0].length)[:, None]
        mask = torch.where(drop[:, None], torch.ones(1, tokens.shape[1], dtype=torch.bool), mask)
        return {
            "encoder_hidden_states": tokens,
            "encoder_attention_mask": mask,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }

    def step(index: int) -> float:
        nonlocal updates
        batch = batches[index % len(batches)]
        mean = torch.from_numpy(batch.latent_mean).float()
        deviation = (torch.from_numpy(batch.latent_logvar).float() * 0.5).exp()
        latents = mean + deviation * torch.randn(mean.shape, generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        moment = torch.sigmoid(torch.randn(case.batch, generator=generator))
        at = moment.view(-1, 1, 1, 1)
        noisy = (1 - at) * latents + at * noise
        output = called(noisy, timestep=moment * 1000, return_dict=False, **condition(batch))[0]
        loss = (output - (noise - latents)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        updates += 1
        with torch.no_grad():
            torch._foreach_lerp_(average, weights, 1 - min(0.999, (1 + updates) / (10 + updates)))
        return loss.item()

    return step


def interval(ratios: Any) -> tuple[float, float, float]:
    """Median of paired ratios, and the 95 % bootstrap interval of it."""
    found = np.asarray(ratios)
    random = np.random.default_rng(0)
    resampled = np.median(random.choice(found, (4000, len(found))), axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(np.median(found)), float(low), float(high)
