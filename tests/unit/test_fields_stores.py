"""Fields of datasets in S3 and Blob: filtered, counted and hashes read as on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rewriting
from encoding import put, tree
from rewriting import files_of

from isthmus.core.encode.hashes import FIELDS, Hashes
from isthmus.core.encode.kept_hashes import kept_hashes
from isthmus.errors import DataError
from isthmus.storage.shards import fields as module
from isthmus.storage.shards import open_dataset, stats, verify
from isthmus.storage.shards.rewrite import Options, filtered, repack
from isthmus.storage.shards.rewrite_plan import Sizes
from isthmus.storage.shards.rewrite_source import Source
from isthmus.storage.shards.spec import FieldSpec
from isthmus.storage.shards.synthetic import random_text, sample
from isthmus.storage.shards.writer import DatasetWriter

SPEC = replace(
    rewriting.SPEC,
    fields=(
        FieldSpec("aesthetic", "number"),
        FieldSpec("licence", "text"),
        *(FieldSpec(n, "text") for n in FIELDS),
    ),
)
OPTIONS = Options(Sizes(group_rows=5, shard_rows=15), threads=3)
WHERE = "aesthetic >= 5.5 and licence in ('licence 0', 'licence 2')"


def write(folder: Path, rows: int = 40, wrong: str | None = None) -> Path:
    """Rows of a few bytes with a hash each; the last one's is `wrong`, if that is told."""
    with DatasetWriter(str(folder), SPEC, rows_per_shard=16, rows_per_group=4) as writer:
        for number in range(rows):
            one = sample(SPEC, number)
            told = {"phash": f"{number * 7:016x}", "phash_colours": f"{number:024x}"}
            if wrong is not None and number == rows - 1:
                told["phash"] = wrong
            writer.add(replace(one, fields={**one.fields, **told}))
        writer.finish(random_text(SPEC, 1))
    return folder


@pytest.mark.parametrize("kind", ["s3", "blob"])
def test_stores_give_what_this_machine_gives(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = request.getfixturevalue(kind)
    here = write(tmp_path / "data")
    there = put(here, f"{store.root}/in")
    filtered([str(here)], str(tmp_path / "few"), WHERE + " and width > 0", OPTIONS)
    with monkeypatch.context() as patched:  # by fields alone no row group is asked for by itself
        patched.setattr(Source, "small", lambda *_: pytest.fail("a request for each row group"))
        done = filtered([there], f"{store.root}/few", WHERE, OPTIONS)
    assert 0 < done.datasets[0].manifest.samples < 40
    assert verify(f"{store.root}/few").ok
    assert set(tree(f"{store.root}/few")) == set(files_of(tmp_path / "few"))
    assert all(
        content == (tmp_path / "few" / name).read_bytes()
        for name, content in tree(f"{store.root}/few").items()
    )
    assert stats(there)["fields"] == stats(str(here))["fields"]
    for run in (4 << 20, 1000, 1):  # whole files, some row groups, one after the other
        monkeypatch.setattr(module, "RUN_BYTES", run)
        found, own = kept_hashes(open_dataset(there)), kept_hashes(open_dataset(str(here)))
        assert isinstance(found, Hashes)
        assert isinstance(own, Hashes)
        np.testing.assert_array_equal(found.bits, np.arange(40, dtype=np.uint64) * 7)
        np.testing.assert_array_equal(found.bits, own.bits)
        np.testing.assert_array_equal(found.colours, own.colours)
        assert found.colours[39].tolist() == [0] * 11 + [39]


@pytest.mark.parametrize("wrong", ["0123", "z" * 16, "ä" * 8, "0" * 17])
def test_what_is_no_hash_is_named(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"phash|digits"):
        kept_hashes(open_dataset(str(write(tmp_path / "d", 12, wrong))))
    repack([str(tmp_path / "d")], str(tmp_path / "z"), replace(OPTIONS, compression="zstd"))
    with pytest.raises(DataError, match=r"phash|digits"):
        kept_hashes(open_dataset(str(tmp_path / "z")))


def test_compressed_files_give_their_hashes_too(tmp_path: Path) -> None:
    repack([str(write(tmp_path / "d"))], str(tmp_path / "z"), replace(OPTIONS, compression="zstd"))
    found = kept_hashes(open_dataset(str(tmp_path / "z")))
    assert isinstance(found, Hashes)
    np.testing.assert_array_equal(found.bits, np.arange(40, dtype=np.uint64) * 7)
    assert open_dataset(str(write(tmp_path / "none", 4, ""))).manifest.samples == 4
    assert "some of its rows have none" in str(kept_hashes(open_dataset(str(tmp_path / "none"))))


def test_training_opens_no_fields(tmp_path: Path) -> None:
    from isthmus.storage.shards.blocks import BlockReader, block_reader

    dataset = open_dataset(str(write(tmp_path / "d")))
    for path in (tmp_path / "d").glob("*.fields.parquet"):
        path.unlink()
    for resolution in (32, 64):
        for reader in (BlockReader(dataset, resolution), block_reader(dataset, resolution)):
            assert all("fields" not in name for name, _ in reader.files(0))
            assert len(reader.read(0).strings["key"]) == 4
