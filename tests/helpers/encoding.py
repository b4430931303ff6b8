"""Pictures in every layout, tiny encoders, and a recipe that encodes them: for encode jobs."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from isthmus.core.encode import tiny
from isthmus.storage.filesystems import filesystem

CAPTIONS = ["a red heart", "a dog on a square", "שלום \u202eabc\u202c 你好 🙂", "the blue circle"]


def png(seed: int, width: int = 48, height: int = 40) -> bytes:
    """Noise, so that every picture is another one."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "png")
    return buffer.getvalue()


def picture(at: int) -> tuple[bytes, str]:
    """The picture of that number, wide or square, and its caption; every 13th is damaged."""
    return (b"no picture" if at % 13 == 12 else png(at, 48 + 24 * (at % 2))), CAPTIONS[at % len(CAPTIONS)]


def make_tars(folder: Path, tars: int, each: int) -> Path:
    """WebDataset tars."""
    folder.mkdir(parents=True)
    for number in range(tars):
        with tarfile.open(folder / f"{number:03}.tar", "w") as tar:
            for at in range(each):
                data, text = picture(number * each + at)
                for name, content in ((f"{at:03}.png", data), (f"{at:03}.txt", text.encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


def make_parquet(folder: Path, files: int, each: int) -> Path:
    """Tables with the pictures' bytes, in row groups of four."""
    folder.mkdir(parents=True)
    for number in range(files):
        rows = [picture(number * each + at) for at in range(each)]
        table = pa.table({"image": [data for data, _ in rows], "caption": [text for _, text in rows]})
        pq.write_table(table, folder / f"{number:03}.parquet", row_group_size=4)
    return folder


def make_folder(folder: Path, count: int) -> Path:
    """Files with a `.txt` beside each."""
    folder.mkdir(parents=True)
    for at in range(count):
        data, text = picture(at)
        (folder / f"{at:03}.png").write_bytes(data)
        (folder / f"{at:03}.txt").write_text(text)
    return folder


def make_models(folder: Path) -> Path:
    """An AutoencoderKL of factor 4 and a CLIP, in `vae` and `clip`."""
    tiny.save_autoencoder(folder / "vae", seed=1)
    tiny.save_clip(folder / "clip", projection=True, seed=2)
    return folder


def encoders(models: str) -> dict[str, Any]:
    """The recipe's section for the models at a place."""
    text = {"name": "clip_g", "kind": "clip", "source": f"{models}/clip", "max_tokens": 16, "width": 32}
    return {
        "autoencoder": {"kind": "diffusers", "source": f"{models}/vae", "latent_channels": 4, "factor": 4},
        "text": [{**text, "pooled_width": 24}],
    }


def for_encoders(models: str) -> list[str]:
    """Overrides that name them."""
    return ["--set", f"encoders={json.dumps(encoders(models))}"]


def put(folder: Path, uri: str) -> str:
    """Copies a folder into a store."""
    store, path = filesystem(uri)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            store.pipe_file(f"{path}/{file.relative_to(folder)}", file.read_bytes())
    return uri


def tree(uri: str) -> dict[str, bytes]:
    """Every file of a dataset."""
    store, path = filesystem(uri)
    store.invalidate_cache()
    return {str(name)[len(path) :].lstrip("/"): store.cat_file(name) for name in store.find(path)}
