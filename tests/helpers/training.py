"""Tiny datasets, recipes and real training processes for tests."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from isthmus.core.encode.patch_pca import PatchPCA
from isthmus.core.train.checkpoint import read_weights
from isthmus.core.train.weights import checksum
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.shards import (
    AutoencoderSpec,
    DatasetSpec,
    DatasetWriter,
    EncoderSpec,
    Sample,
    TextColumn,
)

ENCODERS = {
    "dit": [("minilm", "minilm", 5, 24, None)],
    "unet": [("clip_l", "clip", 5, 12, None), ("clip_g", "clip", 5, 20, 20)],
    "mmdit": [("clip_l", "clip", 5, 12, 12), ("clip_g", "clip", 5, 20, 20), ("t5", "t5", 4, 48, None)],
    "sana": [("gemma", "gemma", 5, 24, None)],
    "flux": [("clip_l", "clip", 5, 12, 12), ("t5", "t5", 4, 48, None)],
}
"""Family -> (name, kind, max_tokens, width, pooled_width)."""

MODELS: dict[str, dict[str, Any]] = {
    "dit": {
        "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 24,
        "use_additional_conditions": False,
    },
    "unet": {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": [16, 32],
        "layers_per_block": 1, "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "attention_head_dim": 8,
        "cross_attention_dim": 32, "use_linear_projection": True, "norm_num_groups": 8,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 48 + 20,
    },
    "mmdit": {
        "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 48,
        "caption_projection_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 16,
    },
    "sana": {
        "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "num_attention_heads": 2, "attention_head_dim": 16, "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 24,
    },
    "flux": {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2,
        "attention_head_dim": 16, "joint_attention_dim": 48, "pooled_projection_dim": 12,
        "axes_dims_rope": [4, 6, 6],
    },
}  # fmt: skip

PROMPTS = ["a red heart", "a blue square"]


def make_latents(root: Path, family: str = "dit", *, samples: int = 48, seed: int = 0) -> str:
    """A dataset of two buckets at 16 and 32 px (factor 4, four channels) with random latents and text."""
    random = np.random.default_rng(seed)
    encoders = ENCODERS[family]
    spec = DatasetSpec(
        autoencoder=AutoencoderSpec("patch_pca", "test", 4, 4, 0.5, 0.1),
        text=tuple(
            EncoderSpec(name, tokens, width, pooled, "test") for name, _, tokens, width, pooled in encoders
        ),
        resolutions=(16, 32),
        buckets=("1:1", "1:2"),
    )

    def half(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape).astype(np.float16)

    def text() -> dict[str, Any]:
        return {
            name: (half(tokens - 1, width), tokens - 1, None if pooled is None else half(pooled))
            for name, _, tokens, width, pooled in encoders
        }

    def column(rows: int) -> dict[str, TextColumn]:
        return {
            name: TextColumn(
                half(rows, tokens, width),
                np.full(rows, tokens, np.int32),
                None if pooled is None else half(rows, pooled),
            )
            for name, _, tokens, width, pooled in encoders
        }

    with DatasetWriter(str(root), spec, rows_per_shard=16, rows_per_group=8) as writer:
        for index in range(samples):
            wide = index % 4 == 3
            latents = {}
            for size in (4, 8):
                shape = (4, size, 2 * size) if wide else (4, size, size)
                latents[size * 4] = (half(*shape), (half(*shape) - 3).astype(np.float16))
            writer.add(
                Sample(
                    key=f"sample-{index:04d}",
                    captions=[f"caption {index}"],
                    text=[text()],
                    latents=latents,
                    bucket="1:2" if wide else "1:1",
                    size_class=32,
                    original_size=(40, 80 if wide else 40),
                    crop=(4, 4, 32, 64 if wide else 32),
                )
            )
        writer.finish(null_text=column(1), prompts=PROMPTS, prompt_text=column(len(PROMPTS)))
    pictures = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    PatchPCA.fit([pictures], factor=4, latent_channels=4).save(str(root / "autoencoder"))
    return str(root)


def recipe_data(data: str, family: str = "dit", **changes: Any) -> dict[str, Any]:
    """A recipe as data; `changes` are dotted paths with double underscores, such as stages__0__steps=3."""
    recipe: dict[str, Any] = {
        "version": 1,
        "name": "tiny",
        "seed": 3,
        "model": {"family": family, "config": copy.deepcopy(MODELS[family])},
        "encoders": {
            "autoencoder": {"kind": "patch_pca", "source": "autoencoder", "latent_channels": 4, "factor": 4},
            "text": [
                {"name": name, "kind": kind, "source": "test", "max_tokens": tokens, "width": width}
                | ({} if pooled is None else {"pooled_width": pooled})
                for name, kind, tokens, width, pooled in ENCODERS[family]
            ],
        },
        "data": {"sources": [{"uri": data}], "lanes": 4, "shuffle_window": 16},
        "objective": {"timestep_sampling": "logit_normal"},
        "stages": [
            {
                "name": "16px", "resolution": 16, "steps": 6, "global_batch_size": 8, "micro_batch_size": 4,
                "learning_rate": 1e-2, "lr_warmup_steps": 2,
            }
        ],
        "parallel": {"strategy": "fsdp", "precision": "fp32"},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": 2, "keep": 10},
        "compute": {"gpu": "none", "gpus_per_node": 2},
        "run_directory": "runs",
    }  # fmt: skip
    for path, value in copy.deepcopy(changes).items():
        *parents, last = path.split("__")
        at: Any = recipe
        for part in parents:
            at = at[int(part)] if part.isdigit() else at.setdefault(part, {})
        at[int(last) if last.isdigit() else last] = value
    return recipe


def write_recipe(folder: Path, recipe: Mapping[str, Any], name: str = "recipe.yaml") -> Path:
    """JSON is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(recipe))
    return path


def environment(**extra: str) -> dict[str, str]:
    """For a training process: one thread, no colours, nothing of this test's own launcher."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("ISTHMUS_", "TORCHELASTIC", "ACCELERATE"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"} | extra


def command(recipe: Path, run: Path | str, world_size: int, module: str = "isthmus.core.train") -> list[str]:
    """The command line of a training run on `world_size` processes; 1 runs without torchrun."""
    if world_size == 1:
        return [sys.executable, "-m", module, "--recipe", str(recipe), "--run", str(run)]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}",
        "--module", "--", module, "--recipe", str(recipe), "--run", str(run),
    ]  # fmt: skip


def train(
    recipe: Path, run: Path | str, world_size: int = 2, *, timeout: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Train in real processes to the end."""
    return subprocess.run(
        command(recipe, run, world_size),
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def trained(recipe: Path, run: Path | str, world_size: int = 2, **env: str) -> list[dict[str, Any]]:
    """Train, expect success, and return the rows of the train metrics."""
    done = train(recipe, run, world_size, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(run)


def rows(run: Path | str, kind: str = "train", *, all_attempts: bool = False) -> list[dict[str, Any]]:
    """Rows of a metric."""
    return RunDirectory(run).read_metrics(kind, all_attempts=all_attempts)


def figures(found: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each row, to compare bit for bit."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in found]


def weights(run: Path | str, which: str = "ema") -> str:
    """Checksum of the newest checkpoint's weights."""
    found = RunDirectory(run)
    return checksum(read_weights(found, found.checkpoints()[-1], which))


@contextmanager
def training(
    recipe: Path, run: Path | str, world_size: int = 2, *, module: str = "isthmus.core.train", **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Training processes to interrupt; whatever is left of them is killed at the end."""
    line = command(recipe, run, world_size, module)
    if module == "isthmus.core.worker":
        line = [sys.executable, "-m", module, "--recipe", str(recipe), "--run", str(run)]
    process = subprocess.Popen(
        line, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        for child in [*descendants(process), psutil.Process(process.pid)] if process.poll() is None else []:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes below one."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def rank_process(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of a rank."""
    for child in descendants(process):
        with suppress(psutil.Error):
            if child.environ().get("RANK") == str(rank):
                return child
    raise AssertionError(f"no process of rank {rank}")


def wait_for_step(
    process: subprocess.Popen[str], run: Path, step: int, attempt: int, timeout: float = 90
) -> None:
    """Until a row of `step` or later of `attempt` is in the metrics."""
    deadline = time.monotonic() + timeout
    folder = run / "metrics" / "train"
    while time.monotonic() < deadline:
        for part in sorted(folder.glob(f"*attempt{attempt}-*.jsonl")):
            lines = part.read_text().splitlines()
            if lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] >= step:
                return
        assert process.poll() is None, (
            f"ended with {process.returncode} before step {step}: {output(process)}"
        )
        time.sleep(0.003)
    raise AssertionError(f"step {step} was not reached in {timeout} s")


def output(process: subprocess.Popen[str]) -> str:
    """What an ended process printed."""
    assert process.stdout is not None
    return process.stdout.read()
