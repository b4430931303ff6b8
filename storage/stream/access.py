"""Where a stage's data is read from: the store itself, a mount, or a copy on the node that is made first."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from isthmus.errors import DataError, StorageError, UsageError
from isthmus.storage.filesystems import filesystem, is_local, storage_errors
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.dataset import Dataset, open_dataset, read_side_file
from isthmus.storage.shards.layout import siblings
from isthmus.storage.shards.verify import verify

COMPLETE = "_COMPLETE"


def place_data(
    uris: Sequence[str], access: str, cache_dir: str | os.PathLike[str], *, wait_limit: float = 3600.0
) -> list[str]:
    """The places to read a dataset from.

    Args:
        uris: roots of one dataset.
        access: `stream` and `mount` read where the data is; `download` makes a verified copy first.
        cache_dir: where copies are kept; a later call finds them there, and so do this node's other ranks.
        wait_limit: seconds to wait for another process that is making the copy.

    Raises:
        DatasetNotFound: there is no dataset.
        DataError: the copy does not verify.
        StorageError: the store or the disk refuses, or the other process takes too long.
    """
    if access in ("stream", "mount"):
        return list(uris)
    if access != "download":
        raise UsageError(f"access is stream, mount or download, not {access}")
    if all(is_local(uri) for uri in uris):
        return list(uris)
    dataset = open_dataset(list(uris))
    # The manifest's hash names the copy: the fingerprint does not cover the embeddings beside the shards.
    name = hashlib.sha256(dataset.manifest.dump()).hexdigest()[:24]
    target = Path(cache_dir) / name
    with storage_errors("write", str(cache_dir)):
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
        with _only_one(target.with_suffix(".lock"), wait_limit):
            if not (target / COMPLETE).exists():
                _copy(dataset, target)
    return [str(target)]


def _copy(dataset: Dataset, target: Path) -> None:
    part = target.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    part.mkdir()
    for uri, name in _files(dataset):
        store, path = filesystem(uri)
        try:
            with store.open(path, "rb") as source, open(part / name, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 24)
        except FileNotFoundError:
            raise DataError("the file is missing", where=uri) from None
    for name in dataset.manifest.files:
        (part / name).write_bytes(read_side_file(dataset.uri, name, dataset.manifest))
    (part / names.MANIFEST).write_bytes(dataset.manifest.dump())
    _copy_folder(dataset.uri, part, "autoencoder")
    report = verify(str(part), finite=False)
    if report.problems:
        first = report.problems[0]
        raise DataError(f"the copy of {dataset.uri} does not verify: {first}", where=str(part))
    (part / COMPLETE).touch()
    part.rename(target)


def _files(dataset: Dataset) -> Iterator[tuple[str, str]]:
    """URI and name of every shard file."""
    seen = set()
    for block in range(len(dataset.index)):
        shard = int(dataset.index.shard[block])
        if shard in seen:
            continue
        seen.add(shard)
        for sibling in siblings(dataset.spec, int(dataset.index.size_class[block])):
            name = dataset.index.file(block, sibling)
            yield dataset.file_uri(name), name


def _copy_folder(uri: str, target: Path, name: str) -> None:
    """A folder beside the shards, when there is one."""
    store, path = filesystem(uri)
    root = f"{path}/{name}"
    if not store.exists(root):
        return
    for entry in store.find(root):
        inside = str(entry).rpartition(f"/{name}/")[2]
        to = target / name / inside
        if not to.resolve().is_relative_to(target.resolve()):
            raise DataError(f"file name {inside!r} leads outside the dataset", where=uri)
        to.parent.mkdir(parents=True, exist_ok=True)
        with store.open(entry, "rb") as source, open(to, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 24)


@contextlib.contextmanager
def _only_one(path: Path, wait_limit: float) -> Iterator[None]:
    """Holds a lock file; the operating system lets go of it when the process dies, however it dies."""
    import fcntl

    deadline = time.monotonic() + wait_limit
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"another process held the lock for {wait_limit:g} s while copying the dataset",
                        where=str(path),
                    ) from None
                time.sleep(0.1)  # a lock file has no event to wait for
        yield
