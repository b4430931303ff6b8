"""The list of a checkpoint's files with size and SHA-256, in COMMITTED; and reading checkpoints without trust.

DCP (`torch.distributed.checkpoint`) has no checksums: a flipped byte loads silently. So every rank hashes the
files that it wrote, and the list, written last, is what makes a checkpoint count. It is verified before
anything is read, each rank hashing its share.

DCP's `.metadata` is a pickle. It is read after its hash was verified, and by an unpickler that knows the dozen
classes that DCP puts into it and refuses any other name: a checkpoint from a stranger cannot run code. Tensors
are read by torch with `weights_only`; everything else of ours is JSON.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from isthmus.errors import CheckpointError, StorageError
from isthmus.storage import filesystems
from isthmus.storage.rundir.patience import may_pass, persistently

FORMAT = 1
_PIECE = 1 << 22

_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {
        "Size", "device", "float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool",
        "strided", "contiguous_format", "preserve_format",
    },
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A dotted name would walk from an allowed object to anything it can reach.
        if name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"its .metadata names {module}.{name}, which no checkpoint of ours contains")


def load_metadata(data: bytes) -> Metadata:
    """DCP's metadata from the bytes of `.metadata`. Raises CheckpointError for anything else."""
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"its .metadata cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError("its .metadata is not DCP's")
    return metadata


class _Reader(FileSystemReader):
    """A DCP reader whose metadata goes through :func:`load_metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata = load_metadata(stream.read())
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def reader(uri: str) -> FileSystemReader:
    """Reads the checkpoint at `uri`, on a file system or an object store."""
    if filesystems.is_local(uri):
        return _Reader(filesystems.local_path(uri))
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    class RemoteReader(_Reader, FsspecReader):
        """The same over fsspec."""

    return RemoteReader(uri)


def file_names(uri: str) -> list[str]:
    """Names of the files at `uri`, sorted; empty when there is nothing."""
    files, path = filesystems.filesystem(uri)
    files.invalidate_cache()
    try:
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in files.ls(path, detail=False))
    except FileNotFoundError:
        return []


def describe(uri: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Name -> {size, sha256} of files at `uri`. Raises FileNotFoundError, and StorageError as the store refuses."""
    files, path = filesystems.filesystem(uri)
    found = {}
    for name in names:
        digest, size = hashlib.sha256(), 0
        with (
            filesystems.storage_errors("read", f"{uri}/{name}"),
            files.open(f"{path}/{name}", "rb") as stream,
        ):
            while piece := stream.read(_PIECE):
                digest.update(piece)
                size += len(piece)
        found[name] = {"size": size, "sha256": digest.hexdigest()}
    return found


def make(files: Mapping[str, Mapping[str, Any]], **facts: Any) -> dict[str, Any]:
    """The content of COMMITTED; `sha256` is over itself, so that damage to the list is seen too."""
    body = {"format": FORMAT, **facts, "files": {name: dict(files[name]) for name in sorted(files)}}
    return {**body, "sha256": _digest(body)}


def check_list(manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with a COMMITTED, or None.

    Raises:
        CheckpointError: it is a newer format's. That is no damage: an older checkpoint must not be taken instead.
    """
    written = manifest.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise CheckpointError(
            f"was written by a newer isthmus: checkpoint format {written}, this version reads {FORMAT}",
            hint="upgrade isthmus to resume this run",
        )
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != _digest(body):
        return "COMMITTED: its own checksum differs"
    if written != FORMAT:
        return f"COMMITTED: format {written}, this version reads {FORMAT}"
    return None


def check_files(
    uri: str, manifest: Mapping[str, Any], rank: int, world_size: int, *, retry_budget: float = 0.0
) -> str | None:
    """What is wrong with this rank's share of the files, or None.

    Args:
        retry_budget: seconds for which a store that is away is asked again.

    Raises:
        StorageError: the store is away; that says nothing about the files.
    """
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    for index, name in enumerate(sorted(files)):
        if index % world_size != rank:
            continue
        expected = files[name]
        try:
            found = persistently(lambda name=name: describe(uri, [name])[name], retry_budget)  # type: ignore[misc]
        except FileNotFoundError:
            return f"{name}: missing"
        except StorageError as error:
            if may_pass(error):
                raise
            return f"{name}: {error.message}"
        if found["size"] != expected["size"]:
            return f"{name}: {found['size']} bytes, {expected['size']} were written"
        if found["sha256"] != expected["sha256"]:
            return f"{name}: its bytes are not the ones written"
    return None


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
