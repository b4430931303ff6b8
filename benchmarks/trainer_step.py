"""Isthmus's training step against a bare PyTorch loop: same model, objective, optimizer, EMA and samples.

    python benchmarks/trainer_step.py [--json] [--rounds N]

One process, one thread, the quickstart's PixArt at 8 layers and width 256. Both sides start from the same weights
and see the same latents and text; steps are paired and interleaved in one run, so that what else the machine does
falls on both. The bare loop is what a careful person writes by hand: it draws noise with one generator, noises, runs
the model, clips, steps AdamW and averages with one foreach call, and reads the loss once a step as any loop that
logs does. Ours is the trainer's own loop: batches from shards on disk through
its loader, counter-seeded draws for each sample, the stage's schedule, agreement, non-finite guard, metrics row;
the bare loop's batches are in memory already. The claim: the median ratio is at most 1.05.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

LIMIT = 1.05
WIDTH, LAYERS, BATCH, TOKENS, TEXT, CHANNELS, SIDE = 256, 8, 16, 10, 384, 32, 8
CONFIG = {
    "sample_size": SIDE, "patch_size": 1, "in_channels": CHANNELS, "out_channels": CHANNELS,
    "num_layers": LAYERS, "num_attention_heads": WIDTH // 32, "attention_head_dim": 32,
    "cross_attention_dim": WIDTH, "caption_channels": TEXT, "use_additional_conditions": False,
    "interpolation_scale": 1,
}  # fmt: skip


def make_dataset(folder: str, samples: int = 1024) -> None:
    """Random latents and text in the shards' format, of the quickstart's shapes."""
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
        return random.standard_normal(shape).astype(np.float16)

    spec = DatasetSpec(
        autoencoder=AutoencoderSpec("patch_pca", "benchmark", CHANNELS, 4, 1.0),
        text=(EncoderSpec("minilm", TOKENS, TEXT),),
        resolutions=(4 * SIDE,),
    )
    with DatasetWriter(folder, spec) as writer:
        for index in range(samples):
            latents = {4 * SIDE: (half(CHANNELS, SIDE, SIDE), half(CHANNELS, SIDE, SIDE) - np.float16(4))}
            text = {"minilm": (half(TOKENS, TEXT), 6, None)}
            writer.add(Sample(key=str(index), captions=["x"], text=[text], latents=latents))
        writer.finish({"minilm": TextColumn(half(1, TOKENS, TEXT), np.full(1, 2, np.int32))})


def make_loop(folder: str) -> tuple[Any, Any]:
    """The trainer's own loop on that dataset, and its loader."""
    from isthmus.core.recipe import parse_recipe, resolve
    from isthmus.core.train.control import Signals
    from isthmus.core.train.loop import Loop
    from isthmus.core.train.setup import set_up
    from isthmus.storage.rundir import RunDirectory

    data = f"{folder}/data"
    make_dataset(data)
    recipe = {
        "version": 1,
        "name": "benchmark",
        "model": {"family": "dit", "config": CONFIG},
        "encoders": {
            "autoencoder": {
                "kind": "patch_pca", "source": "autoencoder", "latent_channels": CHANNELS, "factor": 4,
            },
            "text": [
                {"name": "minilm", "kind": "minilm", "source": "x", "max_tokens": TOKENS, "width": TEXT}
            ],
        },
        "data": {"sources": [{"uri": data}], "lanes": BATCH, "shuffle_window": 512},
        "objective": {"timestep_sampling": "logit_normal"},
        "stages": [
            {
                "name": "32px", "resolution": 4 * SIDE, "steps": 100_000, "global_batch_size": BATCH,
                "micro_batch_size": BATCH, "learning_rate": 1e-3,
            }
        ],
        "parallel": {"strategy": "ddp", "precision": "fp32"},
        "ema": {"decay": 0.999},
        "compute": {"gpu": "none", "gpus_per_node": 1},
        "run_directory": f"{folder}/runs",
    }  # fmt: skip
    parsed = resolve(parse_recipe(json.dumps(recipe), filename="benchmark").recipe, "local")
    loop = Loop(set_up(parsed, RunDirectory(f"{folder}/run"), cpu=True), Signals())
    loop.progress.quiet = True
    return loop, loop.begin()


def bare_loop(batches: list[Any]) -> Callable[[int], float]:
    """A step of a loop written by hand."""
    from isthmus.core.models.families import build_from_config

    model = build_from_config("PixArtTransformer2DModel", CONFIG, 0).train()
    weights = list(model.parameters())
    average = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, foreach=True)
    generator = torch.Generator().manual_seed(0)
    null_tokens, null_mask = torch.zeros(1, TOKENS, TEXT), torch.ones(1, TOKENS, dtype=torch.bool)
    updates = 0

    def step(index: int) -> float:
        nonlocal updates
        batch = batches[index % len(batches)]
        mean = torch.from_numpy(batch.latent_mean).float()
        deviation = (torch.from_numpy(batch.latent_logvar).float() * 0.5).exp()
        latents = mean + deviation * torch.randn(mean.shape, generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        moment = torch.sigmoid(torch.randn(BATCH, generator=generator))
        at = moment.view(-1, 1, 1, 1)
        tokens = torch.from_numpy(batch.text["minilm"].tokens).float()
        mask = torch.arange(TOKENS)[None] < torch.from_numpy(batch.text["minilm"].length)[:, None]
        drop = torch.rand(BATCH, generator=generator) < 0.1
        tokens = torch.where(drop[:, None, None], null_tokens, tokens)
        mask = torch.where(drop[:, None], null_mask, mask)
        prediction = model(
            (1 - at) * latents + at * noise,
            encoder_hidden_states=tokens,
            timestep=moment * 1000,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]
        loss = (prediction - (noise - latents)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        updates += 1
        with torch.no_grad():
            torch._foreach_lerp_(average, weights, 1 - min(0.999, (1 + updates) / (10 + updates)))
        return loss.item()

    return step


def measure(rounds: int, warm_up: int = 5) -> dict[str, Any]:
    """Median step times, their ratio, and a bootstrap interval of the ratio of medians over paired rounds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        loop, loader = make_loop(folder)
        bare = bare_loop([copy.deepcopy(next(loader)) for _ in range(8)])
        sides: dict[str, Callable[[int], Any]] = {"bare": bare, "isthmus": lambda _: loop.advance(loader)}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(warm_up + rounds):
            # The order alternates, so that neither side always runs on the other's caches.
            for name in sorted(sides, reverse=index % 2 == 1):
                started = time.perf_counter()
                sides[name](index)
                if index >= warm_up:
                    times[name].append(time.perf_counter() - started)
        loader.close()
        loop.close()
    ratios = np.array(times["isthmus"]) / np.array(times["bare"])
    random = np.random.default_rng(0)
    resampled = np.median(random.choice(ratios, (4000, len(ratios))), axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {
        "bare_ms": round(statistics.median(times["bare"]) * 1e3, 2),
        "isthmus_ms": round(statistics.median(times["isthmus"]) * 1e3, 2),
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "rounds": rounds,
        "limit": LIMIT,
        "holds": bool(np.median(ratios) <= LIMIT),
        "model": {"layers": LAYERS, "width": WIDTH, "batch": BATCH},
        "torch": torch.__version__,
    }


def main() -> int:
    """Print the result; 1 when the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    found = measure(options.rounds)
    if options.json:
        print(json.dumps(found))
    else:
        low, high = found["interval"]
        print(
            f"trainer step: {found['isthmus_ms']} ms, bare loop {found['bare_ms']} ms, "
            f"ratio {found['ratio']} (95 % {low} to {high}) over {found['rounds']} pairs; "
            f"claimed: at most {LIMIT}: {'holds' if found['holds'] else 'DOES NOT HOLD'}"
        )
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
