"""`--compression`: smaller files that are read through a column map, and the same rows again when they are written back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import rewriting
from rewriting import SPEC, files_of, rows_of

from isthmus.errors import CorruptShard, UsageError
from isthmus.storage.shards import DatasetWriter, open_dataset, stats, verify
from isthmus.storage.shards.blocks import block_reader
from isthmus.storage.shards.rewrite import Options, filtered, merge, repack, split
from isthmus.storage.shards.rewrite_plan import Sizes
from isthmus.storage.shards.synthetic import random_text, sample


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 samples of one size class, two buckets, two captions."""
    folder = tmp_path_factory.mktemp("compressed") / "data"
    return rewriting.write(folder, 40, size_class_of=lambda number: 64)


def packed(codec: str, threads: int = 2, rows: int = 6) -> Options:
    return Options(Sizes(group_rows=rows, shard_rows=2 * rows), compression=codec, threads=threads)


@pytest.mark.parametrize("codec", ["zstd", "lz4", "snappy"])
def test_there_and_back_is_the_same_to_the_bit(data, tmp_path, codec):
    (written,) = repack([str(data)], str(tmp_path / "small"), packed(codec)).datasets
    assert verify(str(tmp_path / "small")).ok
    told = stats(str(tmp_path / "small"))
    assert (told["layout"], told["samples"], told["prompts"]) == ("foreign", 40, 2)
    assert written.manifest.spec == SPEC
    metadata = pq.read_metadata(next((tmp_path / "small").glob("part-*.all.parquet")))
    assert metadata.row_group(0).column(0).compression == codec.upper()
    repack([str(tmp_path / "small")], str(tmp_path / "back"), Options(Sizes(group_rows=4)))
    assert rows_of(tmp_path / "back") == rows_of(data)
    for name in ("_null.parquet", "_prompts.parquet", "_rejected.jsonl"):
        assert (tmp_path / "back" / name).read_bytes() == (data / name).read_bytes()
    repack([str(data)], str(tmp_path / "again"), packed(codec, threads=1))
    assert files_of(tmp_path / "small") == files_of(tmp_path / "again")


def test_the_loaders_reader_gives_the_same_blocks(data, tmp_path):
    repack([str(data)], str(tmp_path / "small"), packed("zstd"))
    repack([str(data)], str(tmp_path / "plain"), packed("none"))
    one, two = open_dataset(str(tmp_path / "small")), open_dataset(str(tmp_path / "plain"))
    assert len(one.index) == len(two.index)
    for resolution in (32, 64):
        mine, theirs = block_reader(one, resolution), block_reader(two, resolution)
        for block in range(len(one.index)):
            for caption in (0, 1):
                a, b = mine.read(block, caption), theirs.read(block, caption)
                assert a.strings["key"] == b.strings["key"]
                assert a.strings["caption"] == b.strings["caption"]
                assert all((a.fixed[name] == b.fixed[name]).all() for name in b.fixed)
                assert all((a.numbers[name] == b.numbers[name]).all() for name in b.numbers)


def test_short_captions_take_little_room(tmp_path):
    with DatasetWriter(str(tmp_path / "data"), SPEC) as writer:
        for number in range(200):
            one = sample(SPEC, number)
            for text in one.text:
                tokens, _, _ = text["t5"]
                text["t5"] = np.zeros_like(tokens), 0, None
            writer.add(one)
        writer.finish(random_text(SPEC, 1))
    repack([str(tmp_path / "data")], str(tmp_path / "small"), Options(compression="zstd"))
    metadata = pq.read_metadata(tmp_path / "small" / "part-00000.all.parquet").row_group(0)
    sizes = {metadata.column(at).path_in_schema: metadata.column(at) for at in range(metadata.num_columns)}
    assert sizes["t5_tokens"].total_compressed_size < sizes["t5_tokens"].total_uncompressed_size / 20


def test_compressed_parts_can_be_filtered_split_and_merged(data, tmp_path):
    where = "width > 9 and (key like 's1%' or flipped) and clip_l_length >= 1 and source like 'synthetic:%'"
    filtered([str(data)], str(tmp_path / "a"), where)
    repack([str(data)], str(tmp_path / "small"), packed("zstd"))
    filtered([str(tmp_path / "small")], str(tmp_path / "b"), where)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    split([str(data)], str(tmp_path / "parts"), "where", packed("lz4"), where="height > 20")
    parts = [str(tmp_path / "parts" / name) for name in ("true", "false")]
    merge(parts, str(tmp_path / "all"))
    assert rows_of(tmp_path / "all") == rows_of(data)


def test_a_damaged_page_is_named(data, tmp_path):
    repack([str(data)], str(tmp_path / "small"), packed("zstd"))
    path = tmp_path / "small" / "part-00001.all.parquet"
    metadata = pq.read_metadata(path).row_group(1)
    column = next(
        metadata.column(at)
        for at in range(metadata.num_columns)
        if metadata.column(at).path_in_schema == "latent_mean_64px"
    )
    damaged = bytearray(path.read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size - 9] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptShard, match=r"part-00001\.all\.parquet, row group 1, column latent_mean_64px"):
        repack([str(tmp_path / "small")], str(tmp_path / "out"))


def test_rows_of_several_size_classes_are_refused(tmp_path):
    mixed = rewriting.write(tmp_path / "mixed", 20)
    out, said = str(tmp_path / "out"), "one size class, there are 32, 64"
    with pytest.raises(UsageError, match=said) as refused:
        repack([str(mixed)], out, packed("zstd"))
    assert "--by size-class" in (refused.value.hint or "")
    with pytest.raises(UsageError, match=said):
        split([str(mixed)], out, "size-class", packed("zstd"))
    assert not (tmp_path / "out").exists()
    split([str(mixed)], str(tmp_path / "parts"), "size-class")
    repack([str(tmp_path / "parts" / "32")], str(tmp_path / "small"), packed("zstd"))
    assert open_dataset(str(tmp_path / "small")).spec.resolutions == (32,)
    assert verify(str(tmp_path / "small")).ok


def test_an_unknown_codec_is_refused(data, tmp_path):
    with pytest.raises(UsageError, match="compression is none, zstd, lz4, snappy, not gzip"):
        repack([str(data)], str(tmp_path / "out"), packed("gzip"))
