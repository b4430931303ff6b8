"""The loader over files that others made: the same order and promises as over our own, alone and mixed."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import foreign
import numpy as np
import pytest

from isthmus.errors import CorruptShard, DatasetMismatch
from isthmus.storage.shards import Dataset, open_dataset
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_settings import parse_settings
from isthmus.storage.shards.synthetic import TINY, sample, write_synthetic
from isthmus.storage.stream import Batch, Loader, Plan, Segment

ROWS = 88
RULE = {"files": {"wide*": "2:1", "*": "1:1"}}


def bucket_of(number: int) -> str:
    return "1:1" if number < 64 else "2:1"


def write_files(folder: Path) -> Path:
    """64 square and 24 wide rows in three files of different layouts."""
    square, wide = foreign.samples(64), foreign.samples(24, first=64, bucket="2:1")
    foreign.write(folder / "a.parquet", foreign.table(square[:40], foreign.as_binary), compression="zstd")
    foreign.write(folder / "b.parquet", foreign.table(square[40:], foreign.as_list32), row_group_size=5)
    foreign.write(folder / "wide.parquet", foreign.table(wide, foreign.as_fixed_list), compression="gzip")
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = write_files(tmp_path_factory.mktemp("foreign"))
    index_files([str(folder)], None, parse_settings(foreign.mapped(bucket=RULE)))
    return open_dataset(str(folder))


def loader(*datasets: Dataset, batch: int = 8, **options: object) -> Loader:
    told = {"seed": 3, "lanes": 4, "shuffle_window": 32, "stages": [64]} | options
    return Loader(list(datasets), [1] * len(datasets), plan=Plan((Segment(0, 0, 0, batch),)), **told)  # type: ignore[arg-type]


def check(batch: Batch) -> None:
    """Every array against the samples as they were written."""
    for row, key in enumerate(batch.keys):
        number = int(key[1:])
        told = sample(TINY, number, bucket=bucket_of(number), prefix=key[0])
        assert batch.bucket == told.bucket
        assert batch.captions[row] == told.captions[0]
        assert np.array_equal(batch.latent_mean[row], told.latents[64][0])
        assert np.array_equal(batch.latent_logvar[row], told.latents[64][1])
        for encoder, (tokens, length, pooled) in told.text[0].items():
            assert np.array_equal(batch.text[encoder].tokens[row], tokens)
            assert batch.text[encoder].length[row] == length
            if pooled is not None:
                assert np.array_equal(batch.text[encoder].pooled[row], pooled)
        assert tuple(batch.original_size[row]) == told.original_size
        assert tuple(batch.crop[row]) == told.crop
        assert batch.flipped[row] == told.flipped


def test_every_row_once_an_epoch_with_its_values(dataset):
    seen: Counter[str] = Counter()
    with loader(dataset) as batches:
        for batch in islice(batches, ROWS // 8):
            check(batch)
            seen.update(batch.keys)
    assert seen == {f"f{number}": 1 for number in range(ROWS)}


def test_ranks_share_the_same_global_batches_and_a_resume_goes_on(dataset):
    with loader(dataset) as batches:
        alone = [sorted(batch.keys) for batch in islice(batches, 16)]
    for world in (2, 4):
        ranks = [loader(dataset, rank=rank, world_size=world, start_step=5) for rank in range(world)]
        for step in range(5, 16):
            assert sorted(key for rank in ranks for key in next(rank).keys) == alone[step]
        for rank in ranks:
            rank.close()


def test_own_and_foreign_sources_mix(dataset, tmp_path):
    write_synthetic(str(tmp_path / "own"), 40, bucket_of=lambda number: "1:1", prefix="s")
    own = open_dataset(str(tmp_path / "own"))
    seen: Counter[str] = Counter()
    with loader(own, dataset) as batches:
        for batch in islice(batches, (40 + ROWS) // 8):
            check(batch)
            seen.update(batch.keys)
            assert batches.describe(batch.step)
    assert seen == {f"f{n}": 1 for n in range(ROWS)} | {f"s{n}": 1 for n in range(40)}


def test_other_encoders_do_not_mix(dataset, tmp_path):
    write_files(tmp_path)
    other = foreign.mapped(bucket=RULE, **{"text.t5.fingerprint": "another"})
    index_files([str(tmp_path)], None, parse_settings(other))
    with pytest.raises(DatasetMismatch, match="other encoders"):
        loader(dataset, open_dataset(str(tmp_path)))


def test_a_damaged_row_ends_the_loader_with_its_place(tmp_path):
    folder = write_files(tmp_path)
    index_files([str(folder)], None, parse_settings(foreign.mapped(bucket=RULE)))
    table = foreign.table(foreign.samples(40))
    short = table["latent"].to_pylist()
    short[-1] = short[-1][:-2]
    foreign.write(
        folder / "a.parquet",
        table.set_column(table.column_names.index("latent"), "latent", [short]),
        compression="zstd",
    )
    index_files([str(folder)], None, parse_settings(foreign.mapped(bucket=RULE)), replace=True)
    with (
        loader(open_dataset(str(folder)), wait_limit=30.0) as batches,
        pytest.raises(
            CorruptShard, match=r"shard a.parquet, row group 4, row 7, column latent: it has 255 values"
        ),
    ):
        for _ in islice(batches, ROWS // 8):
            pass


@pytest.mark.parametrize("kind", ["s3", "blob"])
def test_files_in_object_stores_are_indexed_and_read_where_they_are(kind, request, dataset, tmp_path):
    store = request.getfixturevalue(kind)
    for path in write_files(tmp_path).iterdir():
        store.put(path.name, path.read_bytes())
    manifest = index_files([store.root], None, parse_settings(foreign.mapped(bucket=RULE)))
    assert manifest.fingerprint == dataset.fingerprint
    remote = open_dataset(store.root)
    with loader(remote) as far, loader(dataset) as near:
        for batch, told in islice(zip(far, near, strict=True), ROWS // 8):
            assert batch.keys == told.keys
            check(batch)
