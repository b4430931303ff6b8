"""Makes the index and manifest of a large dataset, as the writer would, without its shards."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.storage.shards.layout import columns_of, siblings
from isthmus.storage.shards.manifest import INDEX, MANIFEST, Manifest, SideFile, parse_manifest
from isthmus.storage.shards.spec import AutoencoderSpec, DatasetSpec, EncoderSpec
from isthmus.storage.shards.synthetic import latent_shape

SDXL = DatasetSpec(
    autoencoder=AutoencoderSpec("diffusers", "synthetic", 4, 8, 0.13025, 0.0),
    text=(EncoderSpec("clip_l", 77, 768), EncoderSpec("clip_g", 77, 1280, 1280)),
    resolutions=(256,),
)
SD3 = DatasetSpec(
    autoencoder=AutoencoderSpec("diffusers", "synthetic", 16, 8, 1.5305, 0.0609),
    text=(
        EncoderSpec("clip_l", 77, 768, 768),
        EncoderSpec("clip_g", 77, 1280, 1280),
        EncoderSpec("t5", 256, 4096),
    ),
    resolutions=(256, 512, 1024),
    captions=5,
    buckets=("1:1", "5:4", "4:5", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16"),
)
"""Three encoders, three resolutions, nine buckets, five captions: 134 columns of byte ranges and checksums."""


def write_large_index(
    folder: Path, spec: DatasetSpec, *, shards: int, groups: int, rows: Sequence[int], seed: int = 0
) -> Manifest:
    """Writes `_index.parquet` and `manifest.json`.

    Args:
        shards: of one bucket and size class each; these take turns.
        groups: row groups of a shard.
        rows: of the row groups, in turn.
    """
    random = np.random.default_rng(seed)
    count = shards * groups
    shard = np.repeat(np.arange(shards), groups)
    bucket, size_class = shard % len(spec.buckets), shard // len(spec.buckets) % len(spec.resolutions)
    sizes = np.resize(np.array(rows, np.int64), count)
    arrays = {
        "shard": pa.array([f"part-{number:05d}" for number in range(shards)]).take(pa.array(shard)),
        "row_group": pa.array(np.arange(count) % groups, pa.int32()),
        "rows": pa.array(sizes, pa.int32()),
        "bucket": pa.array(spec.buckets).take(pa.array(bucket)),
        "size_class": pa.array(np.array(spec.resolutions)[size_class], pa.int32()),
    }
    total = 0
    # In the order in which the writer meets them: the siblings of the smallest size class first.
    for sibling in dict.fromkeys(name for size in spec.resolutions for name in siblings(spec, size)):
        resolution = int(sibling.removesuffix("px")) if sibling.endswith("px") else 0
        here = np.array(spec.resolutions)[size_class] >= resolution
        shapes = [latent_shape(spec, name, resolution) if resolution else None for name in spec.buckets]
        layouts = [columns_of(spec, sibling, shape) for shape in shapes]
        chunks: dict[str, object] = {}
        group_bytes = np.zeros(count, np.int64)
        for at, column in enumerate(layouts[0]):
            widths = np.array([0 if (width := layout[at].width) is None else width for layout in layouts])
            length = widths[bucket] * sizes + 24 + (0 if widths.any() else 40 * sizes)
            length = np.where(here, length + random.integers(0, 8, count), 0)
            group_bytes += length
            chunks[f"{sibling}/{column.name}/length"] = pa.array(length, pa.int64())
            crc32 = np.where(here, random.integers(0, 1 << 32, count), 0)
            chunks[f"{sibling}/{column.name}/crc32"] = pa.array(crc32, pa.uint32())
        ends = np.cumsum(group_bytes.reshape(shards, groups), axis=1)
        files = ends[:, -1] + 2000
        offset = np.where(here, 4 + ends.ravel() - group_bytes, 0)
        total += int(files[here[::groups]].sum())
        arrays[f"{sibling}/offset"] = pa.array(offset, pa.int64())
        arrays[f"{sibling}/file_bytes"] = pa.array(np.where(here, np.repeat(files, groups), 0), pa.int64())
        footer = np.repeat(random.integers(0, 1 << 32, shards), groups)
        arrays[f"{sibling}/footer_crc32"] = pa.array(np.where(here, footer, 0), pa.uint32())
        arrays |= chunks
    sink = io.BytesIO()
    repeating = [name for name in arrays if not name.endswith("crc32")]
    pq.write_table(pa.table(arrays), sink, compression="zstd", use_dictionary=repeating, store_schema=False)
    data = sink.getvalue()
    by_size: dict[str, dict[int, int]] = {}
    for number, name in enumerate(spec.buckets):
        for at, size in enumerate(spec.resolutions):
            told = int(sizes[(bucket == number) & (size_class == at)].sum())
            if told:
                by_size.setdefault(name, {})[size] = told
    manifest = Manifest(
        spec=spec,
        latent_shapes={
            name: {size: latent_shape(spec, name, size) for size in spec.resolutions_of(max(told))}
            for name, told in by_size.items()
        },
        samples=int(sizes.sum()),
        rows=by_size,
        shards=shards,
        blocks=count,
        size=total,
        rejected=0,
        files={INDEX: SideFile.of(data)},
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_bytes(data)
    (folder / MANIFEST).write_bytes(manifest.dump())
    return manifest


def repeat_shards(folder: Path, target: Path, times: int) -> Manifest:
    """A dataset of `times` as many shards as the one in `folder`: links to its files under further names.

    Its keys repeat, but it costs no disk and no time: for memory and speed, not for the order.
    """
    manifest = parse_manifest((folder / MANIFEST).read_bytes(), str(folder))
    table = pq.read_table(folder / INDEX)
    numbers = [int(name.removeprefix("part-")) for name in table["shard"].to_pylist()]
    shards = max(numbers) + 1
    target.mkdir(parents=True)
    parts = []
    for copy in range(times):
        names = pa.array([f"part-{number + copy * shards:05d}" for number in numbers])
        parts.append(table.set_column(table.column_names.index("shard"), "shard", names))
        for path in folder.glob("part-*.parquet"):
            head, _, rest = path.name.partition(".")
            number = int(head.removeprefix("part-")) + copy * shards
            os.link(path, target / f"part-{number:05d}.{rest}")
    sink = io.BytesIO()
    pq.write_table(pa.concat_tables(parts), sink, compression="zstd", store_schema=False)
    (target / INDEX).write_bytes(sink.getvalue())
    for name in manifest.files:
        if name != INDEX:
            os.link(folder / name, target / name)
    repeated = replace(
        manifest,
        samples=manifest.samples * times,
        rows={
            bucket: {size: n * times for size, n in rows.items()} for bucket, rows in manifest.rows.items()
        },
        shards=manifest.shards * times,
        blocks=manifest.blocks * times,
        size=manifest.size * times,
        files={**manifest.files, INDEX: SideFile.of(sink.getvalue())},
    )
    (target / MANIFEST).write_bytes(repeated.dump())
    return repeated
