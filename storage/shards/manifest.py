"""manifest.json: the settings and counts of a dataset, written last; its presence is what makes a dataset."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from isthmus.errors import DataError, UsageError
from isthmus.storage.shards.foreign_map import ColumnMap, parse_columns
from isthmus.storage.shards.spec import SCHEMA_VERSION, AutoencoderSpec, DatasetSpec, EncoderSpec, FieldSpec

MANIFEST = "manifest.json"
INDEX = "_index.parquet"
NULL_TEXT = "_null.parquet"
PROMPTS = "_prompts.parquet"
REJECTED = "_rejected.jsonl"

MAX_MANIFEST_BYTES = 1 << 24
FORMAT = "isthmus-latents"
COLUMNS_VERSION = 2
"""Schema version of a manifest with a column map, which older readers would not know to follow."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file beside the shards, as the manifest vouches for it."""

    size: int
    """In bytes."""
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> SideFile:
        """The entry of a file with these contents."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says."""

    spec: DatasetSpec
    latent_shapes: Mapping[str, Mapping[int, tuple[int, int, int]]]
    """Bucket -> resolution -> [C, H, W], for what the samples have."""
    samples: int
    rows: Mapping[str, Mapping[int, int]]
    """Bucket -> size class -> samples."""
    shards: int
    blocks: int
    size: int
    """Bytes of all shard files."""
    rejected: int
    """Images that were refused while encoding; listed in `_rejected.jsonl`."""
    files: Mapping[str, SideFile] = field(default_factory=dict)
    """The index and the other files beside the shards."""
    source: str = ""
    """What the images are, and under which licence."""
    columns: ColumnMap | None = None
    """Of parquet files made by others: where a sample's parts are. None: our own layout."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the index, which holds the checksum of every column chunk: the dataset's identity."""
        return self.files[INDEX].sha256

    def dump(self) -> bytes:
        """As JSON; the same manifest gives the same bytes."""
        spec = self.spec
        data: dict[str, Any] = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION if self.columns is None else COLUMNS_VERSION,
            "fingerprint": self.fingerprint,
            "source": self.source,
            "samples": self.samples,
            "shards": self.shards,
            "blocks": self.blocks,
            "size": self.size,
            "rejected": self.rejected,
            "autoencoder": asdict(spec.autoencoder),
            "text": [asdict(encoder) for encoder in spec.text],
            "resolutions": list(spec.resolutions),
            "captions": spec.captions,
            "buckets": list(spec.buckets),
            "latent_shapes": {
                bucket: {str(resolution): list(shape) for resolution, shape in shapes.items()}
                for bucket, shapes in self.latent_shapes.items()
            },
            "rows": {
                bucket: {str(size): n for size, n in rows.items()} for bucket, rows in self.rows.items()
            },
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
        }
        if spec.fields:
            data["fields"] = [asdict(told) for told in spec.fields]
        if self.columns is not None:
            data["columns"] = self.columns.to_json()
        data["checksum"] = checksum(data)
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def checksum(data: Mapping[str, Any]) -> str:
    """sha256 of a manifest's fields but the checksum itself: a flipped digit in a scaling factor would train on."""
    fields = {name: value for name, value in data.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in `data`, every field checked.

    Raises:
        DataError: it is damaged, or was not written by us; names the field.
        UsageError: it was written by a newer version.
    """
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise ValueError(f"larger than {MAX_MANIFEST_BYTES} bytes")
        raw = json.loads(data)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f'"format" is not "{FORMAT}"')
        version = _get(raw, "schema_version", int)
        if version > max(SCHEMA_VERSION, COLUMNS_VERSION):
            raise UsageError(
                f"the dataset has schema version {version}, "
                f"this isthmus reads up to {max(SCHEMA_VERSION, COLUMNS_VERSION)}",
                where=where,
                hint="upgrade isthmus",
            )
        if raw.get("checksum") != checksum(raw):
            raise ValueError("its contents do not fit its checksum")
        return _parse(raw)
    except UsageError as error:
        if error.where == where:
            raise
        raise DataError(f"not a valid manifest: {error.message}", where=where) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a valid manifest: {error}", where=where) from None


def _parse(raw: dict[str, Any]) -> Manifest:
    spec = DatasetSpec(
        autoencoder=_build(AutoencoderSpec, _get(raw, "autoencoder", dict), "autoencoder"),
        text=tuple(_build(EncoderSpec, item, "text") for item in _get(raw, "text", list)),
        resolutions=tuple(_get(raw, "resolutions", list)),
        captions=_get(raw, "captions", int),
        buckets=tuple(_get(raw, "buckets", list)),
        fields=tuple(
            _build(FieldSpec, item, "fields") for item in _get({"fields": [], **raw}, "fields", list)
        ),
    )
    files = {
        str(name): _build(SideFile, entry, f"files.{name}")
        for name, entry in _get(raw, "files", dict).items()
    }
    for name, entry in files.items():
        if name not in (INDEX, NULL_TEXT, PROMPTS, REJECTED):
            raise ValueError(f"files.{name} is not a file of a dataset")
        if not isinstance(entry.size, int) or entry.size < 0 or not _SHA256.fullmatch(str(entry.sha256)):
            raise ValueError(f"files.{name} needs a size and a sha256")
    if INDEX not in files or files[INDEX].sha256 != raw.get("fingerprint"):
        raise ValueError("fingerprint is not the sha256 of the index")
    shapes = {
        bucket: {int(resolution): _shape(shape, spec) for resolution, shape in by_resolution.items()}
        for bucket, by_resolution in _get(raw, "latent_shapes", dict).items()
    }
    rows = {
        bucket: {int(size): _count(n, f"rows.{bucket}") for size, n in by_size.items()}
        for bucket, by_size in _get(raw, "rows", dict).items()
    }
    for bucket, by_size in rows.items():
        if bucket not in spec.buckets or bucket not in shapes:
            raise ValueError(f"rows.{bucket}: no such bucket")
        for size in by_size:
            if size not in spec.resolutions or set(spec.resolutions_of(size)) - set(shapes[bucket]):
                raise ValueError(f"rows.{bucket}.{size}: no such size class, or no latent shape for it")
    columns = None
    if raw.get("columns") is not None:
        columns = parse_columns(raw["columns"])
        columns.check(spec)
    return Manifest(
        spec=spec,
        latent_shapes=shapes,
        samples=_count(raw.get("samples"), "samples"),
        rows=rows,
        shards=_count(raw.get("shards"), "shards"),
        blocks=_count(raw.get("blocks"), "blocks"),
        size=_count(raw.get("size"), "size"),
        rejected=_count(raw.get("rejected"), "rejected"),
        files=files,
        source=_get({"source": "", **raw}, "source", str),
        columns=columns,
    )


def _get(raw: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = raw.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f'"{name}" is missing or not a {kind.__name__}')
    return value


def _build(kind: type[T], raw: Any, name: str) -> T:
    if not isinstance(raw, dict):
        raise ValueError(f'"{name}" is not an object')
    try:
        return kind(**raw)
    except TypeError as error:
        raise ValueError(f'"{name}": {error}') from None


def _shape(raw: Any, spec: DatasetSpec) -> tuple[int, int, int]:
    if (
        not isinstance(raw, list)
        or len(raw) != 3
        or not all(isinstance(n, int) and 1 <= n <= 1 << 14 for n in raw)
        or raw[0] != spec.autoencoder.latent_channels
    ):
        raise ValueError(f"latent shape {raw} is not [{spec.autoencoder.latent_channels}, height, width]")
    return raw[0], raw[1], raw[2]


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'"{name}" is not a count')
    return value
