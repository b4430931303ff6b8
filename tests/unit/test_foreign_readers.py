"""Our shards are ordinary parquet: pyarrow, DuckDB and polars find the values that the loader gives; and their layout."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow.parquet as pq
import pytest

from isthmus.storage.shards import DatasetSpec, DatasetWriter, EncoderSpec, open_dataset, rows_by_bytes
from isthmus.storage.shards.spec import AutoencoderSpec
from isthmus.storage.shards.synthetic import TINY, random_text, sample, write_synthetic
from isthmus.storage.stream import Loader, Plan, Segment

SPEC = DatasetSpec(TINY.autoencoder, TINY.text, TINY.resolutions, 2, TINY.buckets)
SDXL = DatasetSpec(
    AutoencoderSpec("diffusers", "synthetic", 4, 8, 0.13025),
    (EncoderSpec("clip_l", 77, 768), EncoderSpec("clip_g", 77, 1280, 1280)),
    (256, 512, 1024),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    write_synthetic(str(folder), 40, SPEC, bucket_of=lambda number: "2:1" if number % 4 == 0 else "1:1")
    return folder


@pytest.fixture(scope="module")
def delivered(place: Path) -> dict[str, dict[str, Any]]:
    """What the loader gives for each key in one epoch."""
    found: dict[str, dict[str, Any]] = {}
    plan = Plan((Segment(0, 0, 0, 10),))
    dataset = open_dataset(str(place))
    with Loader([dataset], [1], seed=0, lanes=2, shuffle_window=32, stages=[64], plan=plan) as loader:
        for batch in islice(loader, 4):
            for row, key in enumerate(batch.keys):
                found[key] = {
                    "caption": batch.captions[row],
                    "latent_mean": batch.latent_mean[row].tobytes(),
                    "latent_logvar": batch.latent_logvar[row].tobytes(),
                    "original_height": int(batch.original_size[row, 0]),
                    "original_width": int(batch.original_size[row, 1]),
                    "flipped": bool(batch.flipped[row]),
                }
                for at, name in enumerate(("crop_top", "crop_left", "crop_height", "crop_width")):
                    found[key][name] = int(batch.crop[row, at])
                for name, text in batch.text.items():
                    found[key][f"{name}_tokens"] = text.tokens[row].tobytes()
                    found[key][f"{name}_length"] = int(text.length[row])
                    if text.pooled is not None:
                        found[key][f"{name}_pooled"] = text.pooled[row].tobytes()
    assert len(found) == 40
    return found


def by_pyarrow(pattern: str) -> list[dict[str, Any]]:
    folder, _, names = pattern.rpartition("/")
    return [row for path in sorted(Path(folder).glob(names)) for row in pq.read_table(path).to_pylist()]


def by_duckdb(pattern: str) -> list[dict[str, Any]]:
    with duckdb.connect() as connection:
        found = connection.execute(f"select * from read_parquet('{pattern}')")
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def by_polars(pattern: str) -> list[dict[str, Any]]:
    return polars.read_parquet(pattern).to_dicts()


@pytest.mark.parametrize("read", [by_pyarrow, by_duckdb, by_polars])
def test_other_readers_find_what_the_loader_gives(place, delivered, read):
    latents = {row["key"]: row for row in read(f"{place}/part-*.64px.parquet")}
    captions = [
        {row["key"]: row for row in read(f"{place}/part-*.{name}.parquet")} for name in ("text", "text1")
    ]
    for key, told in delivered.items():
        words = next(rows[key] for rows in captions if rows[key]["caption"] == told["caption"])
        assert {**captions[0][key], **words, **latents[key], "source": ""} == {
            **told,
            "key": key,
            "source": "",
        }


def test_blocks_are_sized_for_range_reads_and_shards_for_stores(tmp_path):
    """SDXL's rows with all three resolutions: what is read of a block at 1024 px, and the bytes of a whole shard."""
    block, shard = rows_by_bytes(SDXL)
    with DatasetWriter(str(tmp_path), SDXL) as writer:
        for number in range(block + 1):
            writer.add(sample(SDXL, number))
        manifest = writer.finish(random_text(SDXL, 1))
    index = open_dataset(str(tmp_path)).index
    assert index.rows.tolist() == [block, 1]
    read = [index.sibling(name).size(0) for name in ("text", "1024px")]
    assert 4e6 < min(read) < sum(read) < 16e6
    assert 1.3e9 < manifest.size / (block + 1) * shard < 1.6e9
    for path in tmp_path.glob("part-*"):
        metadata = pq.read_metadata(path)
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(0).column(number)
            assert chunk.compression == "UNCOMPRESSED"
            assert not chunk.has_dictionary_page
            assert set(chunk.encodings) <= {"PLAIN", "RLE"}


@pytest.mark.parametrize(
    ("encoders", "channels", "resolutions"),
    [
        ((EncoderSpec("clip_l", 77, 768),), 4, (512,)),
        ((EncoderSpec("t5", 120, 4096),), 4, (256,)),
        ((EncoderSpec("clip_l", 77, 768, 768), EncoderSpec("t5", 256, 4096)), 16, (256, 512, 1024)),
    ],
)
def test_the_defaults_follow_the_bytes_of_a_row(encoders, channels, resolutions):
    block, shard = rows_by_bytes(
        DatasetSpec(AutoencoderSpec("diffusers", "", channels, 8, 1.0), encoders, resolutions)
    )
    text = sum(2 * (e.max_tokens * e.width + (e.pooled_width or 0)) for e in encoders)
    latents = [4 * channels * (r // 8) ** 2 for r in resolutions]
    assert 4e6 <= block * (text + latents[-1]) <= 16e6
    assert 1.4e9 <= shard * (text + sum(latents)) <= 1.5e9
