"""The latent shard on disk: what any parquet reader sees, and where the bytes are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from isthmus.errors import (
    DataError,
    DatasetMismatch,
    DatasetNotFound,
    NotInstalled,
    StorageError,
    UsageError,
)
from isthmus.storage.filesystems import filesystem, join
from isthmus.storage.shards import DatasetSpec, DatasetWriter, balanced_row_groups, open_dataset, stats
from isthmus.storage.shards.synthetic import TINY, random_text, sample, write_synthetic
from isthmus.storage.shards.whole_reads import read_blocks

TWO_CAPTIONS = DatasetSpec(TINY.autoencoder, TINY.text, TINY.resolutions, 2, TINY.buckets)


def mixed(uri: Path | str, samples: int = 60, **options: object) -> None:
    """Two buckets, two size classes, two captions."""
    write_synthetic(
        str(uri),
        samples,
        TWO_CAPTIONS,
        bucket_of=lambda number: "2:1" if number % 5 == 0 else "1:1",
        size_class_of=lambda number: 32 if number % 3 == 0 else 64,
        **options,  # type: ignore[arg-type]
    )


def test_siblings_hold_the_same_rows_of_one_bucket_and_size_class(tmp_path):
    mixed(tmp_path / "data")
    dataset = open_dataset(str(tmp_path / "data"))
    files = sorted(path.name for path in (tmp_path / "data").glob("part-*"))
    assert {name.split(".")[1] for name in files} == {"text", "text1", "32px", "64px"}
    for shard in dataset.index.shard_names:
        mine = [name for name in files if name.startswith(shard)]
        keys = [pq.read_table(tmp_path / "data" / name)["key"].to_pylist() for name in mine]
        assert all(other == keys[0] for other in keys)
        about = [json.loads(pq.read_metadata(tmp_path / "data" / name).metadata[b"isthmus"]) for name in mine]
        assert len({(entry["bucket"], entry["size_class"]) for entry in about}) == 1
        assert len(mine) == (4 if about[0]["size_class"] == 64 else 3)
        assert about[0]["autoencoder"]["scaling_factor"] == 0.5
        assert about[0]["text"][0]["fingerprint"] == "synthetic"


def test_another_parquet_reader_finds_the_values(tmp_path):
    mixed(tmp_path / "data")
    table = pq.read_table(tmp_path / "data" / "part-00000.32px.parquet")
    text = pq.read_table(tmp_path / "data" / "part-00000.text.parquet")
    for row, key in enumerate(table["key"].to_pylist()):
        number = int(key[1:])
        told = sample(
            TWO_CAPTIONS,
            number,
            bucket="2:1" if number % 5 == 0 else "1:1",
            size_class=32 if number % 3 == 0 else 64,
        )
        mean = np.frombuffer(table["latent_mean"][row].as_py(), "<f2")
        assert np.array_equal(mean, told.latents[32][0].ravel())
        tokens = np.frombuffer(text["clip_l_tokens"][row].as_py(), "<f2")
        assert np.array_equal(tokens, told.text[0]["clip_l"][0].ravel())
        assert text["clip_l_length"][row].as_py() == told.text[0]["clip_l"][1]
        assert (
            text["original_height"][row].as_py(),
            text["original_width"][row].as_py(),
        ) == told.original_size
        assert text["flipped"][row].as_py() is told.flipped
        assert text["caption"][row].as_py() == told.captions[0]


def test_a_fixed_width_column_is_one_plain_page_at_the_end_of_its_chunk(tmp_path):
    """What lets a reader compute a row's bytes from the index alone."""
    mixed(tmp_path / "data")
    dataset = open_dataset(str(tmp_path / "data"))
    ranges = dataset.index.sibling("32px")
    for block in range(len(dataset.index)):
        path = tmp_path / "data" / dataset.index.file(block, "32px")
        footer = pq.read_metadata(path).row_group(int(dataset.index.row_group[block]))
        values = pq.ParquetFile(path).read_row_group(int(dataset.index.row_group[block]))
        for at, name in enumerate(ranges.columns):
            chunk = footer.column(at)
            assert (chunk.compression, chunk.has_dictionary_page) == ("UNCOMPRESSED", False)
            assert chunk.statistics is None
            assert ranges.start(block, at) == chunk.data_page_offset
            assert ranges.length[block, at] == chunk.total_compressed_size
            if name == "latent_mean":
                end = ranges.start(block, at) + int(ranges.length[block, at])
                column = b"".join(values[name].to_pylist())
                assert path.read_bytes()[end - len(column) : end] == column


def test_same_samples_same_settings_same_bytes(tmp_path):
    for name in ("a", "b"):
        mixed(tmp_path / name)
    mixed(tmp_path / "c", seed=1)
    files = [path.name for path in (tmp_path / "a").iterdir()]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    a, c = open_dataset(str(tmp_path / "a")), open_dataset(str(tmp_path / "c"))
    assert a.fingerprint != c.fingerprint


def test_tokens_are_padded_with_zeros_and_fewer_captions_repeat(tmp_path):
    one = sample(TWO_CAPTIONS, 0)
    short = {name: (tokens[:2], 2, pooled) for name, (tokens, _, pooled) in one.text[0].items()}
    one.captions, one.text = ["only one"], [short]
    write = DatasetWriter(str(tmp_path / "data"), TWO_CAPTIONS)
    write.add(one)
    write.finish(random_text(TINY, 1))
    dataset = open_dataset(str(tmp_path / "data"))
    for caption in (0, 1):
        (block,) = read_blocks(dataset, 64, [0], caption)
        tokens = block.fixed["clip_l_tokens"].view(np.float16).reshape(4, 6)
        assert np.array_equal(tokens[:2], short["clip_l"][0])
        assert not tokens[2:].any()
        assert block.strings["caption"] == ["only one"]


def test_blocks_and_shards_have_the_rows_asked_for_and_rare_buckets_smaller_blocks(tmp_path):
    groups = balanced_row_groups({"1:1": 900, "2:1": 100}, 16, least=2)
    assert groups == {"1:1": 16, "2:1": 2}
    writer = DatasetWriter(str(tmp_path / "data"), TINY, rows_per_shard=32, rows_per_group=groups)
    for number in range(80):
        writer.add(sample(TINY, number, bucket="2:1" if number % 10 == 0 else "1:1"))
    writer.finish(random_text(TINY, 1))
    index = open_dataset(str(tmp_path / "data")).index
    assert sorted(index.rows[index.bucket == 0].tolist()) == [8, 16, 16, 16, 16]
    assert index.rows[index.bucket == 1].tolist() == [2, 2, 2, 2]
    assert np.bincount(index.shard, index.rows).max() == 32


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda s: s.latents[64][0].__setitem__((0, 0, 0), np.nan), "latent_mean at 64 px is not finite"),
        (lambda s: s.latents[32][1].__setitem__((0, 0, 0), np.inf), "latent_logvar at 32 px is not finite"),
        (lambda s: s.text[0]["t5"][0].__setitem__((0, 0), -np.inf), "t5_tokens is not finite"),
        (lambda s: s.text[0]["clip_l"][2].__setitem__(0, np.nan), "clip_l_pooled is not finite"),
    ],
)
def test_what_is_not_finite_is_refused_and_nothing_of_it_written(tmp_path, damage, says):
    with DatasetWriter(str(tmp_path / "data"), TINY) as writer:
        writer.add(sample(TINY, 0))
        bad = sample(TINY, 1)
        damage(bad)
        with pytest.raises(DataError, match=f"sample 's1': {says}"):
            writer.add(bad)
        assert writer.finish(random_text(TINY, 1)).samples == 1


def test_a_wrong_shape_names_the_sample_and_both_shapes(tmp_path):
    with DatasetWriter(str(tmp_path / "data"), TINY) as writer:
        writer.add(sample(TINY, 0))
        odd = sample(TINY, 1, bucket="2:1")
        odd.bucket = "1:1"
        with pytest.raises(UsageError, match=r"'s1': latent_mean at .* has shape \[4, \d, \d\], not \[4"):
            writer.add(odd)
        unknown = sample(TINY, 2)
        unknown.bucket = "3:4"
        with pytest.raises(UsageError, match="bucket 3:4 is not one of 1:1, 2:1"):
            writer.add(unknown)


def test_a_dataset_is_never_overwritten_but_an_interrupted_one_is_replaced(tmp_path):
    uri = str(tmp_path / "data")
    with DatasetWriter(uri, TINY, rows_per_group=2) as writer:
        for number in range(5):
            writer.add(sample(TINY, number))
    with pytest.raises(DatasetNotFound, match="no latent dataset here"):
        open_dataset(uri)
    write_synthetic(uri, 10)
    before = (tmp_path / "data" / "manifest.json").read_bytes()
    with pytest.raises(UsageError, match="there is a dataset already"):
        DatasetWriter(uri, TINY)
    assert (tmp_path / "data" / "manifest.json").read_bytes() == before


def test_embeddings_beside_the_shards_come_back(tmp_path):
    uri = str(tmp_path / "data")
    write_synthetic(uri, 4, prompts=["one", "two"])
    dataset = open_dataset(uri)
    assert dataset.prompts == ["one", "two"]
    assert dataset.prompt_text["t5"].tokens.shape == (2, 3, 8)
    assert dataset.prompt_text["t5"].pooled is None
    assert dataset.null_text["clip_l"].pooled is not None
    assert np.array_equal(dataset.null_text["clip_l"].tokens[0], sample(TINY, 0, seed=1).text[0]["clip_l"][0])


def test_other_encoders_are_refused_with_everything_that_differs(tmp_path):
    uri = str(tmp_path / "data")
    write_synthetic(uri, 4)
    dataset = open_dataset(uri)
    dataset.check_encoders(
        {"clip_l": (4, 6, 5), "t5": (3, 8, None)}, kind="patch_pca", latent_channels=4, factor=8
    )
    dataset.check_encoders({"clip_l": (4, 6, None)}, fingerprints={"autoencoder": "synthetic"})
    with pytest.raises(DatasetMismatch) as raised:
        dataset.check_encoders(
            {"clip_l": (4, 7, 5), "clip_g": (1, 1, None)}, latent_channels=16, fingerprints={"t5": "0123"}
        )
    for part in (
        "clip_l.width is 6, not 7",
        "no text encoder clip_g",
        "latent_channels is 4, not 16",
        "t5 has",
    ):
        assert part in raised.value.message


def test_shards_may_be_spread_over_roots_and_live_in_any_store(tmp_path):
    mixed(tmp_path / "one")
    (tmp_path / "two").mkdir()
    for path in (tmp_path / "one").glob("part-0000[13579].*"):
        shutil.move(path, tmp_path / "two" / path.name)
    spread = open_dataset([str(tmp_path / "one"), f"file://{tmp_path / 'two'}"])
    assert len(read_blocks(spread, 32, range(len(spread.index)))) == len(spread.index)
    uri = "memory://bucket/data"
    mixed(uri)
    remote = open_dataset(uri)
    assert remote.fingerprint == spread.fingerprint
    assert read_blocks(remote, 32, [0])[0].strings == read_blocks(spread, 32, [0])[0].strings
    assert stats(uri)["samples"] == 60


def test_stores_that_need_an_extra_say_so_and_unknown_ones_suggest():
    with pytest.raises(NotInstalled, match=r"pip install 'isthmus\[azure\]'"):
        _without("adlfs", "az://container/data")
    with pytest.raises(NotInstalled, match=r"pip install 'isthmus\[sagemaker\]'"):
        _without("s3fs", "s3://bucket/data")
    with pytest.raises(UsageError, match=r"did you mean abfs://\?"):
        filesystem("abs://container/data")
    assert join("az://c/x/", "a", "b") == "az://c/x/a/b"
    assert join("/", "a") == "/a"
    assert join("./runs", "a") == "./runs/a"


def _without(module: str, uri: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None if name == module else object())
        filesystem(uri)


@pytest.mark.root
def test_a_full_disk_is_one_line(tmp_path, small_disk):
    with pytest.raises(StorageError) as raised:
        write_synthetic(str(small_disk / "data"), 4000)
    assert "the disk is full" in str(raised.value)
    assert str(small_disk / "data") in str(raised.value)
    assert not (small_disk / "data" / "manifest.json").exists()


@pytest.mark.root
def test_a_read_only_place_is_one_line(small_disk):
    import subprocess

    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"cannot write: the file system is read-only"):
        DatasetWriter(str(small_disk / "data"), TINY)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    import subprocess

    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]).returncode:
        pytest.skip("needs root, to mount a small tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
