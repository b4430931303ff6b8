"""Encoding: what decoding, resizing and writing a picture cost beside its encoders, and whether the encoders ever wait for it.

    .venv/bin/python benchmarks/encode.py [--pictures 96] [--json]

Measured here, in one run, per picture of 1024 x 768 (JPEG, quality 90) for 256 and 512 px:

- read, decode, resize, crop: in one thread, and in more (Pillow leaves the interpreter while it decodes and resizes);
- write: a row with SDXL's two text encoders' embeddings into shards on the disk;
- the autoencoder's encoder in SDXL's form (34 M parameters, random weights) on this CPU;
- the share of time that the encoders wait, with a stand-in that takes as long for a batch as a GPU would: at the pace of an A100
  and of an H100 (cost/encoding.py), and at the fastest pace that the threads here keep up with.

The stand-in sleeps while a GPU would work, and once more keeps a core busy, as a thread does that waits for a CUDA stream.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from isthmus.core.encode.ahead import default_threads, prepared
from isthmus.core.encode.batches import batches
from isthmus.core.encode.buckets import bucket_table
from isthmus.core.encode.hashes import picture_fields
from isthmus.core.encode.pieces import items_of, units_of
from isthmus.core.encode.prepare import Prepared, prepare
from isthmus.core.encode.sources import open_source
from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.core.recipe.schema import Buckets
from isthmus.cost.encoding import ENCODER_FLOPS_PER_PIXEL, UTILIZATION

SIZES, BATCH = (256, 512), 16
_NOTHING = bytes(4 * 2**20)
WIDTH, HEIGHT = 1024, 768
TABLE = bucket_table(Buckets(step=64, min_ratio=0.5, max_ratio=2.0), list(SIZES), 8)


def photograph(seed: int) -> bytes:
    """A JPEG with the detail of a photograph, about: noise of several scales."""
    chance = np.random.default_rng(seed)
    total = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for cells, strength in ((6, 70.0), (24, 35.0), (96, 15.0), (384, 6.0)):
        noise = chance.normal(0, strength, (cells * HEIGHT // WIDTH + 1, cells, 3)).clip(-127, 127) + 128
        layer = Image.fromarray(noise.astype(np.uint8)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        total += np.asarray(layer, np.float32) - 128
    buffer = io.BytesIO()
    Image.fromarray((total + 128).clip(0, 255).astype(np.uint8)).save(buffer, "jpeg", quality=90)
    return buffer.getvalue()


def make_tar(path: Path, pictures: int) -> float:
    """The pictures as a WebDataset tar; returns bytes of one, on average."""
    kinds = [photograph(seed) for seed in range(12)]
    with tarfile.open(path, "w") as tar:
        for at in range(pictures):
            for name, data in ((f"{at:05}.jpg", kinds[at % len(kinds)]), (f"{at:05}.txt", b"a caption")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return sum(map(len, kinds)) / len(kinds)


def stream(source: Any, threads: int) -> Iterator[list[Prepared]]:
    """Batches as `data encode` gets them."""
    (unit,) = units_of(source, max_bytes=10**12, max_pieces=10**9)
    ready = prepared(items_of(source, unit), TABLE, threads=threads, ahead=2 * BATCH + threads, phash=True)
    return batches(ready, BATCH, lambda item: print(item, file=sys.stderr))


def decoding(source: Any, threads: int) -> float:
    """Seconds a picture, with nothing else to do."""
    begun, count = time.perf_counter(), 0
    for batch in stream(source, threads):
        count += len(batch)
    return (time.perf_counter() - begun) / count


def one_by_one(source: Any, count: int) -> dict[str, float]:
    """Seconds a picture in this thread: load (read and decode), resize with crop, and its perceptual hash."""
    (unit,) = units_of(source, max_bytes=10**12, max_pieces=10**9)
    load = resize = hashed = 0.0
    for _, item in zip(range(count), items_of(source, unit), strict=False):
        begun = time.perf_counter()
        record = item.load()
        middle = time.perf_counter()
        ready = prepare(record, TABLE)
        load, resize = load + middle - begun, resize + time.perf_counter() - middle
        smallest = Image.fromarray(ready.pixels[SIZES[0]])
        begun = time.perf_counter()
        picture_fields(smallest)
        hashed += time.perf_counter() - begun
    return {"decode_s": load / count, "resize_s": resize / count, "hash_s": hashed / count}


def writing(folder: Path, rows: int) -> dict[str, float]:
    """Seconds and bytes a row: both resolutions' latents, and the embeddings of SDXL's encoders."""
    from isthmus.storage.shards import AutoencoderSpec, DatasetSpec, EncoderSpec, Sample
    from isthmus.storage.shards.parts import PartWriter

    spec = DatasetSpec(
        autoencoder=AutoencoderSpec("diffusers", "x", 4, 8, 0.13, 0.0),
        text=(EncoderSpec("clip_l", 77, 768, None, "x"), EncoderSpec("clip_g", 77, 1280, 1280, "x")),
        resolutions=SIZES,
        captions=1,
        buckets=("1:1",),
    )
    chance = np.random.default_rng(0)

    def half(*shape: int) -> np.ndarray[Any, Any]:
        return chance.standard_normal(shape).astype(np.float16)

    text = {"clip_l": (half(77, 768), 77, None), "clip_g": (half(77, 1280), 77, half(1280))}
    latents = {size: (half(4, size // 8, size // 8), half(4, size // 8, size // 8)) for size in SIZES}
    begun = time.perf_counter()
    with PartWriter(str(folder), spec, 0, 1, rows_per_group=32, rows_per_shard=4096) as writer:
        for at in range(rows):
            sample = Sample(
                key=f"{at:08}", captions=["a caption"], text=[text], latents=latents, bucket="1:1", size_class=512,
                source="x", original_size=(HEIGHT, WIDTH), crop=(0, 0, 512, 512), flipped=False,
            )  # fmt: skip
            writer.add(sample)
        writer.seal()
    seconds = time.perf_counter() - begun
    size = sum(file.stat().st_size for file in folder.glob("*.parquet"))
    return {"write_s": seconds / rows, "row_bytes": size / rows}


def encoding() -> float:
    """Seconds a picture of SDXL's form of autoencoder on this CPU, 256 and 512 px together."""
    import torch
    from diffusers import AutoencoderKL

    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
    }
    model = AutoencoderKL(**blocks, layers_per_block=2, latent_channels=4).eval()
    total = 0.0
    with torch.no_grad():
        model.encode(torch.zeros(1, 3, 64, 64))
        for size in SIZES:
            begun = time.perf_counter()
            model.encode(torch.zeros(1, 3, size, size))
            total += time.perf_counter() - begun
    return total


def waiting(source: Any, threads: int, images_per_s: float, *, spins: bool = False) -> dict[str, float]:
    """The share of time that a stand-in of that pace waits, from its first batch on, and the pace that it got.

    Args:
        spins: it keeps a core busy meanwhile, as a thread does that waits for a CUDA stream; otherwise it sleeps.
    """
    busy = waited = 0.0
    count, last, first = 0, time.perf_counter(), True
    for batch in stream(source, threads):
        now = time.perf_counter()
        if not first:  # the first batch waits for the first pictures, once a unit
            waited += now - last
            count += len(batch)
            busy += len(batch) / images_per_s
        first = False
        end = time.perf_counter() + len(batch) / images_per_s
        while spins and time.perf_counter() < end:
            zlib.crc32(_NOTHING)  # without Python's lock, as within CUDA
        time.sleep(max(0.0, end - time.perf_counter()))
        last = time.perf_counter()
    return {
        "threads": threads,
        "asked": images_per_s,
        "wait_share": waited / (waited + busy),
        "got": count / (waited + busy),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=192)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="isthmus-encode-"))
    try:
        (folder / "tars").mkdir()
        size = make_tar(folder / "tars" / "0.tar", options.pictures)
        source = open_source(str(folder / "tars"))
        cores = len(os.sched_getaffinity(0))
        threads = sorted({1, 2, cores, 2 * cores})
        alone = one_by_one(source, min(48, options.pictures))
        by_threads = {count: decoding(source, count) for count in threads}
        written = writing(folder / "written", 256)
        encoder_s = encoding()
        flops = sum(ENCODER_FLOPS_PER_PIXEL * side * side for side in SIZES)
        paces = {gpu: UTILIZATION * PEAK_FLOPS[gpu] / flops for gpu in ("a100-80gb", "h100-80gb")}
        best = min(by_threads, key=lambda count: by_threads[count])
        runs = {}
        for gpu, pace in paces.items():
            for name, count, spins in (
                ("half the cores", default_threads(), False),
                ("the default", default_threads(on_gpu=True), False),
                ("the default, a core busy with waiting for the GPU", default_threads(on_gpu=True), True),
            ):
                runs[f"{gpu}, {name}"] = waiting(source, count, pace, spins=spins)
        runs["0.9 of the threads' own pace"] = waiting(source, best, 0.9 / by_threads[best])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    host = alone["decode_s"] + alone["resize_s"] + written["write_s"]
    found = {
        "picture": {"bytes": round(size), "pixels": [WIDTH, HEIGHT], "resolutions": SIZES},
        "cores": cores,
        **{name: round(value, 6) for name, value in {**alone, **written, "encoder_cpu_s": encoder_s}.items()},
        "host_to_encoder": host / encoder_s,
        "pictures_per_s_by_threads": {count: 1 / seconds for count, seconds in by_threads.items()},
        "gpu_images_per_s": paces,
        "threads_for_a_gpu": {
            gpu: pace * (alone["decode_s"] + alone["resize_s"]) for gpu, pace in paces.items()
        },
        "waiting": runs,
    }
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(
        f"a picture of {WIDTH} x {HEIGHT}, {size / 1e3:.0f} kB, for {SIZES[0]} and {SIZES[1]} px; {cores} cores"
    )
    print(f"  read and decode {alone['decode_s'] * 1e3:7.1f} ms")
    print(f"  resize, crop    {alone['resize_s'] * 1e3:7.1f} ms")
    share = alone["hash_s"] / (alone["decode_s"] + alone["resize_s"])
    print(f"  perceptual hash {alone['hash_s'] * 1e3:7.2f} ms, {share:.1%} of these")
    print(f"  write           {written['write_s'] * 1e3:7.1f} ms for {written['row_bytes'] / 1e3:.0f} kB")
    print(f"  autoencoder     {encoder_s * 1e3:7.0f} ms on this CPU: {encoder_s / host:.0f} times the rest")
    for count, seconds in by_threads.items():
        print(f"  {count} thread{'s' if count > 1 else ' '}  {1 / seconds:6.1f} pictures/s")
    for gpu, pace in paces.items():
        needed = pace * (alone["decode_s"] + alone["resize_s"])
        print(f"  {gpu}: {pace:.0f} images/s need {needed:.1f} threads of this CPU")
    for name, run in runs.items():
        print(
            f"  at {run['asked']:.0f} images/s ({name}), {run['threads']} threads: the encoders wait "
            f"{run['wait_share']:.1%} of the time"
        )


if __name__ == "__main__":
    main()
