"""Parquet files as others write them, of known values, in every layout that the general path reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.storage.shards.spec import Sample
from isthmus.storage.shards.synthetic import TINY, sample

MAP = {
    "about": "synthetic",
    "autoencoder": {
        "kind": "patch_pca",
        "fingerprint": "synthetic",
        "latent_channels": 4,
        "factor": 8,
        "scaling_factor": 0.5,
    },
    "text": {
        "clip_l": {"max_tokens": 4, "width": 6, "pooled_width": 5, "fingerprint": "synthetic"},
        "t5": {"max_tokens": 3, "width": 8, "fingerprint": "synthetic"},
    },
    "bucket": "1:1",
    "null_text": "zeros",
    "columns": {
        "key": "id",
        "captions": [
            {
                "caption": "text",
                "clip_l": {"tokens": "clip", "length": "clip_n", "pooled": "clip_pooled"},
                "t5": {"tokens": "t5", "length": "t5_n"},
            }
        ],
        "latents": {64: {"mean": "latent", "logvar": "spread"}},
        "original_size": ["h", "w"],
        "crop": ["top", "left", "crop_h", "crop_w"],
        "flipped": "mirrored",
    },
}
"""The map of :func:`table`: the same encoders as `synthetic.TINY`."""

Layout = Callable[[Sequence[Any]], Any]


def as_fixed(rows: Sequence[Any]) -> Any:
    """fixed_size_binary"""
    return pa.array([row.tobytes() for row in rows], pa.binary(rows[0].nbytes))


def as_binary(rows: Sequence[Any]) -> Any:
    """binary"""
    return pa.array([row.tobytes() for row in rows], pa.binary())


def as_large_binary(rows: Sequence[Any]) -> Any:
    """large_binary"""
    return pa.array([row.tobytes() for row in rows], pa.large_binary())


def as_list16(rows: Sequence[Any]) -> Any:
    """list<float16>"""
    return pa.array([row.ravel() for row in rows], pa.list_(pa.float16()))


def as_list32(rows: Sequence[Any]) -> Any:
    """list<float32>"""
    return pa.array([row.ravel().astype(np.float32) for row in rows], pa.list_(pa.float32()))


def as_list64(rows: Sequence[Any]) -> Any:
    """large_list<float64>"""
    return pa.array([row.ravel().astype(np.float64) for row in rows], pa.large_list(pa.float64()))


def as_fixed_list(rows: Sequence[Any]) -> Any:
    """fixed_size_list<float16>"""
    return pa.array([row.ravel() for row in rows], pa.list_(pa.float16(), rows[0].size))


def as_nested(rows: Sequence[Any]) -> Any:
    """list<list<... float32>>, as HF datasets' Array2D and Array3D are stored"""
    kind = pa.float32()
    for _ in range(rows[0].ndim):
        kind = pa.list_(kind)
    return pa.array([row.astype(np.float32).tolist() for row in rows], kind)


LAYOUTS = [as_fixed, as_binary, as_large_binary, as_list16, as_list32, as_list64, as_fixed_list, as_nested]


def samples(count: int, *, first: int = 0, bucket: str = "1:1", seed: int = 0) -> list[Sample]:
    """Samples of `synthetic.TINY` at 64 px."""
    return [
        sample(TINY, number, bucket=bucket, seed=seed, prefix="f") for number in range(first, first + count)
    ]


def table(rows: Sequence[Sample], layout: Layout = as_binary, **replaced: Any) -> Any:
    """A pyarrow table of samples under the names of `MAP`; tokens are cut to their length in ragged layouts.

    Args:
        replaced: column -> an array in its place, or None to leave it out.
    """
    columns: dict[str, Any] = {
        "id": pa.array([row.key for row in rows]),
        "text": pa.array([row.captions[0] for row in rows]),
        "clip": layout([row.text[0]["clip_l"][0] for row in rows]),
        "clip_n": pa.array([row.text[0]["clip_l"][1] for row in rows], pa.int64()),
        "clip_pooled": layout([row.text[0]["clip_l"][2] for row in rows]),
        "t5": layout([row.text[0]["t5"][0] for row in rows]),
        "t5_n": pa.array([row.text[0]["t5"][1] for row in rows], pa.int32()),
        "latent": layout([row.latents[64][0] for row in rows]),
        "spread": layout([row.latents[64][1] for row in rows]),
        "mirrored": pa.array([row.flipped for row in rows]),
        "ignored": pa.array(["x" * 100] * len(rows)),
    }
    for name, values in zip(
        ("h", "w", "top", "left", "crop_h", "crop_w"),
        zip(*((*row.original_size, *row.crop) for row in rows), strict=True),
        strict=True,
    ):
        columns[name] = pa.array(values, pa.int64())
    columns |= replaced
    return pa.table({name: values for name, values in columns.items() if values is not None})


def write(path: Path, content: Any, **options: Any) -> Path:
    """One parquet file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(content, path, **{"row_group_size": 8, **options})
    return path


def mapped(**changes: Any) -> dict[str, Any]:
    """`MAP` with other values: ``mapped(bucket="2:1", **{"columns.key": None})``."""
    import copy

    found: dict[str, Any] = copy.deepcopy(MAP)
    for place, value in changes.items():
        section: Any = found
        *path, last = place.split(".")
        for name in path:
            section = (
                section[int(name)]
                if isinstance(section, list)
                else section[int(name) if name.isdigit() else name]
            )
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return found
