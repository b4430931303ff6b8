"""Datasets out of datasets: the same rows to the bit, in other shards; what cannot be done is one line."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import foreign
import pyarrow.parquet as pq
import pytest
import rewriting
from rewriting import files_of, rows_of

from isthmus.errors import CorruptShard, DatasetNotFound, UsageError
from isthmus.storage.shards import open_dataset, verify
from isthmus.storage.shards.dataset import read_manifest
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_settings import parse_settings
from isthmus.storage.shards.manifest import SideFile
from isthmus.storage.shards.rewrite import Options, filtered, repack, split
from isthmus.storage.shards.rewrite_plan import Sizes
from isthmus.storage.shards.synthetic import TINY, write_synthetic


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 samples of two buckets, two size classes and two captions; an autoencoder beside them, two rejected pictures."""
    folder = rewriting.write(tmp_path_factory.mktemp("rewrite") / "data")
    (folder / "autoencoder").mkdir()
    (folder / "autoencoder" / "autoencoder.safetensors").write_bytes(b"weights")
    (folder / "autoencoder" / "config.json").write_bytes(b"{}")
    return folder


def options(*, order: Any = "bucket", threads: int = 2, restart: bool = False, **sizes: int) -> Options:
    return Options(Sizes(**sizes), order, threads, restart)


def check(folder: Path) -> None:
    report = verify(str(folder))
    assert report.ok, report.problems


def test_repacked_rows_are_the_same_to_the_bit(data, tmp_path):
    dest = tmp_path / "out"
    (written,) = repack([str(data)], str(dest), options(group_rows=7, shard_rows=14)).datasets
    check(dest)
    assert rows_of(dest) == rows_of(data)
    before, after = open_dataset(str(data)), open_dataset(str(dest))
    assert after.manifest == written.manifest
    assert after.spec == before.spec
    assert (after.manifest.source, after.manifest.rows) == (before.manifest.source, before.manifest.rows)
    for name in ("_null.parquet", "_prompts.parquet", "_rejected.jsonl"):
        assert (dest / name).read_bytes() == (data / name).read_bytes()
    assert (dest / "autoencoder" / "autoencoder.safetensors").read_bytes() == b"weights"
    assert after.prompts == ["a red heart", "a blue square"]
    # The frequent bucket has row groups of 7, the rare one of 4: in proportion. None is left half empty but the last.
    index = after.index
    assert set(index.rows[index.bucket == 0].tolist()) == {7, 40 * 4 // 5 % 7, 8 - 7}
    assert index.rows[index.bucket == 1].max() == 4
    assert not (dest / "_rewrite").exists()


def test_the_same_settings_as_the_writers_give_the_writers_bytes(tmp_path):
    write_synthetic(str(tmp_path / "one"), 50, TINY, rows_per_shard=16, rows_per_group=4)
    repack([str(tmp_path / "one")], str(tmp_path / "two"), options(group_rows=4, shard_rows=16))
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


@pytest.mark.parametrize("order", ["bucket", "size-class", "source"])
def test_neither_threads_nor_where_it_is_written_change_a_byte(data, tmp_path, order):
    for name, threads in (("one", 1), ("two", 4)):
        repack([str(data)], str(tmp_path / name), options(order=order, threads=threads, group_rows=3))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    check(tmp_path / "one")


def test_shards_lie_in_the_order_that_is_asked_for(data, tmp_path):
    orders = {}
    for order in ("bucket", "size-class", "source"):
        repack([str(data)], str(tmp_path / order), options(order=order, group_rows=4, shard_rows=4))
        index = open_dataset(str(tmp_path / order)).index
        orders[order] = list(zip(index.bucket.tolist(), index.size_class.tolist(), strict=True))
    assert orders["bucket"] == sorted(orders["bucket"])
    assert orders["size-class"] == sorted(orders["size-class"], key=lambda kind: (kind[1], kind[0]))
    assert orders["source"] not in (orders["bucket"], orders["size-class"])
    assert sorted(orders["source"]) == orders["bucket"]


def test_sizes_in_bytes(data, tmp_path):
    repack([str(data)], str(tmp_path / "out"), options(group_bytes=3000, shard_bytes=9000))
    index = open_dataset(str(tmp_path / "out")).index
    text = 2 * (4 * 6 + 5 + 3 * 8)
    assert index.rows.max() == 3000 // (text + 4 * 4 * 8 * 8)
    assert len(index.shard_names) == 10
    check(tmp_path / "out")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"group_rows": 5000}, "within 1 to 4096"),
        ({"group_rows": 20, "shard_rows": 10}, "smaller than a row group of 20"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(data, tmp_path, sizes, said):
    with pytest.raises(UsageError, match=said):
        repack([str(data)], str(tmp_path / "out"), options(**sizes))
    assert not (tmp_path / "out").exists()


def test_files_of_others_become_our_layout(tmp_path):
    rows = foreign.samples(20)
    foreign.write(tmp_path / "theirs" / "x.parquet", foreign.table(rows))
    index_files([str(tmp_path / "theirs")], str(tmp_path / "index"), parse_settings(foreign.mapped()))
    roots = [str(tmp_path / "index"), str(tmp_path / "theirs")]
    repack(roots, str(tmp_path / "out"), options(group_rows=6))
    check(tmp_path / "out")
    found = rows_of(tmp_path / "out")
    assert len(found) == 20
    for row in rows:
        stored = found[row.key]
        mean, logvar = row.latents[64]
        tokens, length, pooled = row.text[0]["clip_l"]
        assert stored["64px/latent_mean"] == mean.tobytes()
        assert stored["64px/latent_logvar"] == logvar.tobytes()
        assert stored["text/clip_l_tokens"] == tokens.tobytes()
        assert stored["text/clip_l_length"] == length
        assert stored["text/clip_l_pooled"] == pooled.tobytes()
        assert stored["text/caption"] == row.captions[0]
        assert (stored["text/original_height"], stored["text/original_width"]) == row.original_size
        assert stored["text/flipped"] == row.flipped


def test_filtered_rows_are_those_of_which_the_predicate_is_true(data, tmp_path):
    where = "flipped and width >= 20 and bucket = '2:1' or caption1 like '%of s7' or clip_l_length is null"
    with pytest.raises(UsageError, match="always told"):
        filtered([str(data)], str(tmp_path / "out"), where)
    where = where.replace("clip_l_length is null", "key in ('s11', 's12')")
    done = filtered([str(data)], str(tmp_path / "out"), where, options())
    every = rows_of(data)
    wanted = {
        key: row
        for key, row in every.items()
        if (row["text/flipped"] and row["text/original_width"] >= 20 and row["bucket"] == "2:1")
        or row["text1/caption"].endswith("of s7")
        or key in ("s11", "s12")
    }
    assert 0 < len(wanted) < 60
    assert rows_of(tmp_path / "out") == wanted
    assert done.left_out == 60 - len(wanted)
    check(tmp_path / "out")
    assert open_dataset(str(tmp_path / "out")).spec == open_dataset(str(data)).spec


def test_a_filter_that_leaves_nothing_is_an_error(data, tmp_path):
    with pytest.raises(UsageError, match="no sample is left"):
        filtered([str(data)], str(tmp_path / "out"), "width > 100000")
    assert not (tmp_path / "out").exists()


def test_a_split_by_hash_puts_every_row_into_one_part_and_keeps_it_there(data, tmp_path):
    shares = {"train": Fraction(7, 10), "val": Fraction(2, 10), "test": Fraction(1, 10)}
    split([str(data)], str(tmp_path / "a"), "hash", options(), shares=shares)
    parts = {name: rows_of(tmp_path / "a" / name) for name in shares}
    assert {key: row for part in parts.values() for key, row in part.items()} == rows_of(data)
    assert sum(map(len, parts.values())) == 60
    for name in shares:
        check(tmp_path / "a" / name)
    # As docs/data.md says it, so that others can draw the same parts.
    for name, rows in parts.items():
        for key in rows:
            place = int(hashlib.sha256(f"0:{key}".encode()).hexdigest()[:13], 16) / 16**13
            assert name == ("train" if place < 0.7 else "val" if place < 0.9 else "test")
    # Of a dataset with more rows the old ones go where they went.
    more = rewriting.write(tmp_path / "more", 80)
    split([str(more)], str(tmp_path / "b"), "hash", options(), shares=shares)
    for name, rows in parts.items():
        assert set(rows) <= set(rows_of(tmp_path / "b" / name))
    assert not (tmp_path / "a" / "_rewrite").exists()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["test", "train", "val"]
    split([str(data)], str(tmp_path / "c"), "hash", options(), shares=shares, seed=1)
    assert set(rows_of(tmp_path / "c" / "val")) != set(parts["val"])


@pytest.mark.parametrize("by", ["bucket", "size-class", "where"])
def test_splits_by_what_a_row_is(data, tmp_path, by):
    where = "caption like '%s1%'" if by == "where" else None
    split([str(data)], str(tmp_path / "out"), by, options(), where=where, names=("ones", "rest"))
    kinds = {
        "bucket": lambda row: row["bucket"].replace(":", "x"),
        "size-class": lambda row: str(row["size_class"]),
        "where": lambda row: "ones" if "s1" in row["text/caption"] else "rest",
    }
    every = rows_of(data)
    names = {kinds[by](row) for row in every.values()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert rows_of(tmp_path / "out" / name) == {k: r for k, r in every.items() if kinds[by](r) == name}
        check(tmp_path / "out" / name)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"by": "hash"}, "sum to 1"),
        ({"by": "hash", "shares": {"a": Fraction(1, 2), "b": Fraction(1, 3)}}, "sum to 1"),
        ({"by": "hash", "shares": {"a": Fraction(1, 2), "../b": Fraction(1, 2)}}, "no folder's"),
        ({"by": "hash", "shares": {"a": Fraction(99999, 100000), "b": Fraction(1, 100000)}}, "part b would have no"),
        ({"by": "where"}, "needs the predicate"),
        ({"by": "where", "where": "true"}, "part false would have no"),
        ({"by": "where", "where": "true", "names": ("a", "a")}, "same name"),
    ],
)  # fmt: skip
def test_splits_that_cannot_be(data, tmp_path, more, said):
    with pytest.raises(UsageError, match=said):
        split([str(data)], str(tmp_path / "out"), more.pop("by"), options(), **more)
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_written_to(data, tmp_path):
    with pytest.raises(UsageError, match="onto itself"):
        repack([str(data)], str(data))
    with pytest.raises(UsageError, match="takes no files"):
        repack([str(data)], "https://example.com/data")
    with pytest.raises(UsageError, match="a dataset already"):
        repack([str(data)], str(rewriting.write(tmp_path / "there", 4)))
    (tmp_path / "begun" / "_encode").mkdir(parents=True)
    (tmp_path / "begun" / "_encode" / "plan.json").write_text("{}")
    for restart in (False, True):
        with pytest.raises(UsageError, match="an encoding was begun here"):
            repack([str(data)], str(tmp_path / "begun"), options(restart=restart))
    (tmp_path / "orphans").mkdir()
    (tmp_path / "orphans" / "part-00000.text.parquet").write_bytes(b"x")
    with pytest.raises(UsageError, match="shards of no dataset"):
        repack([str(data)], str(tmp_path / "orphans"))
    repack([str(data)], str(tmp_path / "orphans"), options(restart=True))
    assert rows_of(tmp_path / "orphans") == rows_of(data)


def test_a_damaged_source_is_named_and_the_destination_is_no_dataset(tmp_path):
    source = rewriting.write(tmp_path / "data")
    path = source / "part-00001.64px.parquet"
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptShard, match=r"part-00001\.64px\.parquet, row group 2, column latent_mean"):
        repack([str(source)], str(tmp_path / "out"), options(group_rows=3))
    with pytest.raises(DatasetNotFound, match=r"begun by `isthmus data repack, merge, split or filter`"):
        open_dataset(str(tmp_path / "out"))
    path.write_bytes(whole)
    # It goes on where it was: shards that are done are not written again.
    done = sorted((tmp_path / "out" / "_rewrite").glob("*.arrow"))
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part-*")}
    repack([str(source)], str(tmp_path / "out"), options(group_rows=3))
    kept = [name for p in done if (name := p.stem.partition("-")[2])]
    assert all(p.stat().st_mtime_ns == t for p, t in times.items() if p.name.split(".")[0] in kept)
    repack([str(source)], str(tmp_path / "again"), options(group_rows=3))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")


def test_other_settings_do_not_go_on_with_what_was_begun(tmp_path):
    source = rewriting.write(tmp_path / "data")
    (source / "part-00001.64px.parquet").write_bytes(b"")
    with pytest.raises(CorruptShard):
        split([str(source)], str(tmp_path / "out"), "bucket", options(group_rows=3))
    with pytest.raises(DatasetNotFound, match="is not finished"):
        open_dataset(str(tmp_path / "out" / "1x1"))
    source = rewriting.write(tmp_path / "data2")
    with pytest.raises(
        UsageError, match=r"another rewriting was begun here \(split\); it differs in .*sizes"
    ):
        split([str(source)], str(tmp_path / "out"), "bucket", options(group_rows=4))
    # The parts of what is forgotten go, too.
    split([str(source)], str(tmp_path / "out"), "size-class", options(group_rows=4, restart=True))
    assert list((tmp_path / "out").rglob("_rewrite")) == []
    assert list((tmp_path / "out" / "1x1").iterdir()) == []
    check(tmp_path / "out" / "32")


def test_siblings_of_other_samples_are_noticed(tmp_path):
    # Two datasets of the same layout: one's latents beside the other's text, with an index that fits each file.
    a, b = rewriting.write(tmp_path / "a", 40), rewriting.write(tmp_path / "b", 40, prefix="t")
    mine, theirs = pq.read_table(a / "_index.parquet"), pq.read_table(b / "_index.parquet")
    for name in [name for name in mine.column_names if name.startswith("64px/")]:
        mine = mine.set_column(mine.column_names.index(name), name, theirs[name])
    for path in b.glob("*.64px.parquet"):
        (a / path.name).write_bytes(path.read_bytes())
    pq.write_table(mine, a / "_index.parquet", compression="zstd", store_schema=False)
    manifest = read_manifest(str(a))
    files = {**manifest.files, "_index.parquet": SideFile.of((a / "_index.parquet").read_bytes())}
    (a / "manifest.json").write_bytes(replace(manifest, files=files).dump())
    with pytest.raises(CorruptShard, match=r"64px.parquet, row group \d+, column key: it has key 't"):
        repack([str(a)], str(tmp_path / "out"), options())
