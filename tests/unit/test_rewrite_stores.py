"""Rewriting from and to S3 and Blob: the bytes are those of a rewriting on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import rewriting
from rewriting import files_of

from isthmus.errors import DatasetNotFound, UsageError
from isthmus.storage.filesystems import filesystem
from isthmus.storage.shards import open_dataset, verify
from isthmus.storage.shards.rewrite import Options, repack, split
from isthmus.storage.shards.rewrite_plan import Sizes

OPTIONS = Options(Sizes(group_rows=5, shard_rows=15), threads=3)


@pytest.mark.parametrize("kind", ["s3", "blob"])
def test_from_and_to_a_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store = request.getfixturevalue(kind)
    source = rewriting.write(tmp_path / "data", 40)
    (source / "vae").mkdir()
    for name in ("autoencoder.safetensors", "config.json"):
        (source / "vae" / name).write_bytes(name.encode())
    for path in source.rglob("*"):
        if path.is_file():
            store.put(f"in/{path.relative_to(source)}", path.read_bytes())
    repack([str(source)], str(tmp_path / "here"), OPTIONS)
    there = f"{store.root}/out"
    repack([f"{store.root}/in"], there, OPTIONS)
    assert verify(there).ok
    files, root = filesystem(there)
    files.invalidate_cache()
    names = [str(path).removeprefix(root).lstrip("/") for path in files.find(root)]
    assert sorted(names) == sorted(files_of(tmp_path / "here"))
    for name in names:
        assert files.cat_file(f"{root}/{name}") == (tmp_path / "here" / name).read_bytes()
    with pytest.raises(UsageError, match="a dataset already"):
        repack([str(source)], there, OPTIONS)


def test_a_half_made_dataset_in_a_store_is_none_and_goes_on(s3, tmp_path: Path) -> None:
    source = rewriting.write(tmp_path / "data", 40)
    damaged = source / "part-00003.text.parquet"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    dest = f"{s3.root}/parts"
    with pytest.raises(Exception, match=r"part-00003\.text\.parquet"):
        split([str(source)], dest, "size-class", OPTIONS)
    with pytest.raises(DatasetNotFound, match="not finished"):
        open_dataset(f"{dest}/64")
    damaged.write_bytes(whole)
    split([str(source)], dest, "size-class", OPTIONS)
    assert verify(f"{dest}/64").ok
    assert verify(f"{dest}/32").rows == 8
    files, root = filesystem(dest)
    files.invalidate_cache()
    assert not [path for path in files.find(root) if "_rewrite" in path]
