"""Datasets of pictures that can be recognised when they are decoded, near-duplicates among them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from isthmus.core.encode.patch_pca import PatchPCA
from isthmus.core.sample.grids import to_pixels
from isthmus.storage.shards import (
    AutoencoderSpec,
    DatasetSpec,
    DatasetWriter,
    EncoderSpec,
    Sample,
    TextColumn,
)

Picture = NDArray[np.uint8]

CAPTIONS = (
    "a hill under an orange sky",
    "כלב קטן רץ על הדשא בגן",
    "قط أسود ينام على السرير",
    "собака бежит по снегу",
    "μια κόκκινη καρδιά",
    "一只红色的猫在桌子上",
    "a sign that says שלום in blue",
    "evil \u202etxet dekcirt\u202c caption",
    "çok uzun bir başlık, " * 12,
    "",
)
"""Scripts, directions, an override of direction, one that is too long, none."""


def photograph(seed: int, height: int = 64, width: int = 64) -> Picture:
    """Clouds of colour and a few shapes: [H, W, 3], another one for each seed."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (random.integers(3, 7), random.integers(3, 7), 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image).copy()
    for _ in range(3):
        top, left = random.integers(0, height // 2), random.integers(0, width // 2)
        tall, wide = random.integers(height // 8, height // 2), random.integers(width // 8, width // 2)
        pixels[top : top + tall, left : left + wide] = random.integers(0, 256, 3)
    return pixels


def recompressed(picture: Picture, quality: int = 60) -> Picture:
    """After JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer).convert("RGB"))


def resized(picture: Picture, share: float = 0.6) -> Picture:
    """Made smaller and enlarged again."""
    image = Image.fromarray(picture)
    small = image.resize((round(image.width * share), round(image.height * share)), Image.Resampling.LANCZOS)
    return np.asarray(small.resize(image.size, Image.Resampling.BICUBIC))


def brighter(picture: Picture, factor: float = 1.06) -> Picture:
    """A little."""
    return np.asarray(ImageEnhance.Brightness(Image.fromarray(picture)).enhance(factor))


def make_pictured(
    root: Path,
    pictures: Sequence[Picture],
    captions: Sequence[str] = ("",),
    *,
    keys: Sequence[str] | None = None,
    factor: int = 4,
    channels: int = 16,
    rows_per_group: int = 8,
) -> PatchPCA:
    """A dataset of these pictures at 64 px, square or 2:1 ones, with the autoencoder beside the shards."""
    tensors = [torch.from_numpy(one.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1 for one in pictures]
    autoencoder = PatchPCA.fit(tensors[:200], factor=factor, latent_channels=channels)
    autoencoder.save(str(root / "autoencoder"))
    spec = DatasetSpec(
        autoencoder=AutoencoderSpec(
            "patch_pca", autoencoder.fingerprint, channels, factor, autoencoder.scaling_factor
        ),
        text=(EncoderSpec("clip", 2, 4),),
        resolutions=(64,),
        buckets=("1:1", "2:1"),
    )
    empty = np.zeros((2, 4), np.float16)
    with DatasetWriter(str(root), spec, rows_per_shard=64, rows_per_group=rows_per_group) as writer:
        for number, tensor in enumerate(tensors):
            mean, logvar = autoencoder.encode(tensor)
            height, width = tensor.shape[2:]
            writer.add(
                Sample(
                    key=keys[number] if keys else f"picture-{number:05d}",
                    captions=[captions[number % len(captions)]],
                    text=[{"clip": (empty, 1, None)}],
                    latents={64: (mean[0].numpy().astype(np.float16), logvar[0].numpy().astype(np.float16))},
                    bucket="1:1" if height == width else "2:1",
                    original_size=(height * 10, width * 10),
                    source="drawn",
                )
            )
        writer.finish({"clip": TextColumn(empty[None], np.full(1, 1, np.int32))}, source="drawn, CC0")
    return autoencoder


def decoded(autoencoder: PatchPCA, picture: Picture) -> Picture:
    """What the sheet should show of a picture."""
    tensor = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    mean, _ = autoencoder.encode(tensor)
    shown: Picture = to_pixels(autoencoder.decode(mean.half().float()))[0]
    return shown
