"""Makes a dataset of parquet files that others made, without changing them: an index, a manifest, a null embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isthmus.errors import CorruptShard, DataError, DatasetNotFound, UsageError
from isthmus.storage.filesystems import filesystem, join, make_folder, storage_errors
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.dataset import Dataset, read_manifest
from isthmus.storage.shards.files import text_file, write_whole
from isthmus.storage.shards.foreign import Decoder, ForeignReader
from isthmus.storage.shards.foreign_arrays import first_shape
from isthmus.storage.shards.foreign_block import Expected
from isthmus.storage.shards.foreign_index import ForeignFile, dump_foreign_index
from isthmus.storage.shards.foreign_map import ColumnMap
from isthmus.storage.shards.foreign_null import null_from_file, null_from_row, null_from_zeros
from isthmus.storage.shards.foreign_scan import File, Group, Scan, list_files, read_footer, scan_files
from isthmus.storage.shards.foreign_settings import ForeignSettings, Shape
from isthmus.storage.shards.index import parse_index
from isthmus.storage.shards.manifest import Manifest, SideFile
from isthmus.storage.shards.spec import AutoencoderSpec, DatasetSpec, TextColumn

THREADS = 16
"""Footers that are read at once."""
_LEAST_AREA, _MOST_AREA = 0.15, 1.1  # of a bucket at a resolution, against that resolution's square


def index_files(
    sources: Sequence[str],
    dest: str | None,
    settings: ForeignSettings,
    *,
    pattern: str = "*.parquet",
    replace: bool = False,
    like: Dataset | None = None,
    threads: int = THREADS,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Indexes parquet files and writes `_index.parquet`, the null embedding and, last, `manifest.json`.

    The footers of all files are read, and the first row group of each bucket, which must be what the settings say.

    Args:
        sources: the roots of the files.
        dest: where the index goes; beside the files (in the first root) if not told.
        pattern: of the names of the files that count.
        replace: an index that is there is replaced; a dataset of our own layout never is.
        like: another dataset whose null embedding is taken when the settings say so.
        progress: called with the files done and all files.

    Raises:
        UsageError: the files are not as the settings say; names file, row group and column.
        CorruptShard: a file is damaged.
        StorageError: a store refuses.
    """
    dest = dest or sources[0]
    _check_dest(dest, replace)
    files = list_files(sources, pattern)
    found = _Found(settings.columns)
    for scan in scan_files(files, settings.columns, settings.bucket, threads=threads, progress=progress):
        found.add(scan)
    if not found.files:
        raise UsageError("the files have no rows", where=", ".join(sources))
    buckets, shapes = _bucket_shapes(found.first, settings)
    spec = settings.spec(buckets)
    size_class = spec.resolutions[-1]
    index = dump_foreign_index(found.files, settings.columns, size_class)
    manifest = Manifest(
        spec=spec,
        latent_shapes=shapes,
        samples=sum(found.rows.values()),
        rows={bucket: {size_class: found.rows[bucket]} for bucket in buckets},
        shards=len(found.files),
        blocks=sum(len(file.rows) for file in found.files),
        size=sum(file.file_bytes for file in found.files),
        rejected=0,
        files={names.INDEX: SideFile.of(index)},
        source=settings.about,
        columns=settings.columns,
    )
    # As a later reader will see it, before anything is written.
    where = join(dest, names.INDEX)
    places = {file.name: file.root for file in files}
    dataset = Dataset(
        (dest, *sources) if dest not in sources else tuple(sources),
        manifest,
        parse_index(index, manifest, where),
        places,
    )
    _check_first_blocks(dataset)
    contents = {
        names.NULL_TEXT: text_file(spec, _null_text(dataset, settings, like), 1, {}),
        names.PROMPTS: text_file(spec, {}, 0, {"prompt": []}),
        names.INDEX: index,
    }
    return _write(dest, manifest, contents)


def _write(dest: str, manifest: Manifest, contents: Mapping[str, bytes]) -> Manifest:
    fields = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    fields["files"] = {name: SideFile.of(data) for name, data in contents.items()}
    manifest = Manifest(**fields)
    store, path = filesystem(dest)
    with storage_errors("write", dest):
        make_folder(store, path, dest)
        if store.exists(f"{path}/{names.MANIFEST}"):
            store.rm_file(f"{path}/{names.MANIFEST}")
    for name, data in contents.items():
        write_whole(dest, name, data)
    write_whole(dest, names.MANIFEST, manifest.dump())
    return manifest


def _check_dest(dest: str, replace: bool) -> None:
    try:
        there = read_manifest(dest)
    except DatasetNotFound:
        return
    except DataError:
        there = None  # damaged: nobody can say whose it was
    if there is None or there.columns is None:
        raise UsageError("there is a dataset already", where=dest, hint="choose another --dest")
    if not replace:
        raise UsageError("there is an index already", where=dest, hint="--replace writes it anew")


class _Found:
    """The files' row groups as they are scanned, a few numbers each."""

    def __init__(self, columns: ColumnMap) -> None:
        self._columns = len(columns.names())
        self.files: list[ForeignFile] = []
        self.first: dict[str, tuple[File, Group]] = {}
        """Bucket -> its first row group."""
        self.rows: dict[str, int] = {}
        """Of each bucket."""

    def add(self, scan: Scan) -> None:
        """Takes a file's row groups. UsageError when a bucket has other sides than before."""
        if not scan.groups:
            return
        for group in scan.groups:
            file, other = self.first.setdefault(group.bucket, (scan.file, group))
            if other.sides != group.sides:
                raise UsageError(
                    f"bucket {group.bucket} has sides {group.sides}, {other.sides} in {file.name}",
                    where=f"{scan.file.uri}, row group {group.number}",
                    hint="index the files of one resolution at a time (--files PATTERN)",
                )
            self.rows[group.bucket] = self.rows.get(group.bucket, 0) + group.rows
        shape = len(scan.groups), self._columns
        self.files.append(
            ForeignFile(
                shard=scan.file.name,
                file_bytes=scan.file.size,
                footer_bytes=scan.footer_bytes,
                footer_crc32=scan.footer_crc32,
                row_group=np.array([group.number for group in scan.groups], np.int64),
                rows=np.array([group.rows for group in scan.groups], np.int64),
                # One string for each bucket, not for each row group.
                bucket=[self.first[group.bucket][1].bucket for group in scan.groups],
                stored=np.array([group.stored for group in scan.groups], np.int64).reshape(shape),
                decoded=np.array([group.decoded for group in scan.groups], np.int64).reshape(shape),
            )
        )


def _bucket_shapes(
    first: Mapping[str, tuple[File, Group]], settings: ForeignSettings
) -> tuple[tuple[str, ...], dict[str, dict[int, Shape]]]:
    """The buckets, and each one's latent shape at each resolution.

    Args:
        first: bucket -> its first row group.
    """
    unknown = sorted(set(settings.shapes) - set(first))
    if unknown:
        raise UsageError(
            f"shapes.{unknown[0]}: the files have no such bucket, but {', '.join(sorted(first))}"
        )
    buckets = tuple(sorted(first))
    shapes = {}
    for bucket in buckets:
        file, group = first[bucket]
        shapes[bucket] = {
            resolution: _shape(bucket, resolution, file, group, settings)
            for resolution in sorted(settings.columns.latents)
        }
    return buckets, shapes


def _shape(bucket: str, resolution: int, file: File, group: Group, settings: ForeignSettings) -> Shape:
    """A bucket's latent shape at a resolution, from its first row group."""
    latent = settings.columns.latents[resolution].mean
    where = f"{file.uri}, row group {group.number}, column {latent.column}"
    found = _first_row(file, group, latent.column, latent.dtype)
    return latent_shape(bucket, resolution, found, group.sides, settings, where)


def latent_shape(
    bucket: str,
    resolution: int,
    found: tuple[int, ...],
    sides: tuple[int, int] | None,
    settings: ForeignSettings,
    where: str,
) -> Shape:
    """A bucket's latent shape: told, by the sides, by nested lists, or from the number of values and the name.

    Args:
        found: the shape of a row's values, or how many there are.
        sides: what the bucket's columns say of the height and width.

    Raises:
        UsageError: they contradict each other, or do not tell it.
    """
    autoencoder = settings.autoencoder
    count = math.prod(found)
    told = settings.shapes.get(bucket, {}).get(resolution)
    if told is None and sides is not None and resolution == max(settings.columns.latents):
        unit = autoencoder.factor if settings.bucket.pixels else 1
        if sides[0] % unit or sides[1] % unit:
            raise UsageError(
                f"sides {sides} are not divisible by the autoencoder's factor {unit}",
                where=where,
                hint="`unit: latent` under bucket says that they are latent cells",
            )
        told = (autoencoder.latent_channels, sides[0] // unit, sides[1] // unit)
    if told is None and len(found) == 3:
        told = found[0], found[1], found[2]
    if told is None:
        told = _shape_of_name(bucket, count, autoencoder, where)
    if told[0] != autoencoder.latent_channels or math.prod(told) != count:
        raise UsageError(
            f"its first row has {found if len(found) == 3 else count} values, not "
            f"{list(told)} with {autoencoder.latent_channels} channels",
            where=where,
            hint="correct autoencoder, shapes or bucket; raw bytes of fp32 are {column: NAME, dtype: float32}",
        )
    area = told[1] * told[2] * autoencoder.factor**2 / resolution**2
    if not _LEAST_AREA <= area <= _MOST_AREA:
        raise UsageError(
            f"latents of {told[1]} x {told[2]} cells are {told[1] * autoencoder.factor} x "
            f"{told[2] * autoencoder.factor} pixels, which is no bucket at {resolution} px",
            where=where,
            hint="correct the resolution in columns.latents, or the autoencoder's factor",
        )
    return told


def _shape_of_name(bucket: str, count: int, autoencoder: AutoencoderSpec, where: str) -> Shape:
    """[C, H, W] of `count` values whose width to height is nearest to the bucket's name."""
    cells, rest = divmod(count, autoencoder.latent_channels)
    width, _, height = bucket.partition(":")
    if rest or not cells or not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise UsageError(
            f"its first row has {count} values: no [{autoencoder.latent_channels}, H, W] of bucket {bucket}",
            where=where,
            hint=f'tell it: `shapes: {{"{bucket}": [CHANNELS, HEIGHT, WIDTH]}}`',
        )
    aspect = math.log(int(width) / int(height))
    high = min(
        (side for side in range(1, cells + 1) if cells % side == 0),
        key=lambda side: abs(math.log(cells / side / side) - aspect),
    )
    if abs(math.log(cells / high / high) - aspect) > 0.1:
        raise UsageError(
            f"its first row has {count} values, which is no latent of aspect {bucket}",
            where=where,
            hint=f'tell it: `shapes: {{"{bucket}": [CHANNELS, HEIGHT, WIDTH]}}`, or correct bucket',
        )
    return autoencoder.latent_channels, high, cells // high


def _first_row(file: File, group: Group, column: str, dtype: str) -> tuple[int, ...]:
    """The shape of a column's first row: [values], or of nested lists all their sides."""
    ranges = open_ranges(file.root)
    try:
        footer, footer_bytes, _ = read_footer(ranges, file)
        # What the row group's bytes can hold at most; the check of the first blocks is exact.
        most = sum(chunk.decoded for chunk in footer.chunks(group.number, column))
        expected = Expected(column, "array", max(1, most // group.rows))
        decoder = Decoder(footer, file.name, group.number, group.rows, [expected])
        decoder.fetch(ranges, file.size - footer_bytes, file.size)
        return first_shape(decoder.decode()[0].column(column), dtype)
    except ValueError as error:
        raise CorruptShard(str(error), shard=file.uri, row_group=group.number, column=column) from None
    finally:
        ranges.close()


def _check_first_blocks(dataset: Dataset) -> None:
    """The first block of each bucket must be what the map says, at every resolution and with every caption."""
    for number in range(len(dataset.spec.buckets)):
        block = int((dataset.index.bucket == number).argmax())
        for resolution in dataset.spec.resolutions:
            reader = ForeignReader(dataset, resolution)
            for caption in range(dataset.spec.captions):
                reader.read(block, caption)


def _null_text(dataset: Dataset, settings: ForeignSettings, like: Dataset | None) -> dict[str, TextColumn]:
    if settings.null_text.startswith("key:"):
        return null_from_row(dataset, settings.null_text.removeprefix("key:"))
    return stored_null_text(dataset.spec, settings, like)


def stored_null_text(
    spec: DatasetSpec, settings: ForeignSettings, like: Dataset | None
) -> dict[str, TextColumn]:
    """The null embedding that the settings name and that is not one of the files' rows."""
    told = settings.null_text
    if told == "like":
        if like is None or like.spec.text != spec.text:
            raise UsageError(
                "null_text: the other dataset has other text encoders",
                hint="say `null_text:` in the map file",
            )
        return dict(like.null_text)
    return null_from_zeros(spec) if told == "zeros" else null_from_file(told, spec)


def describe(manifest: Manifest) -> dict[str, Any]:
    """What was indexed, JSON-able."""
    spec: DatasetSpec = manifest.spec
    return {
        "samples": manifest.samples,
        "files": manifest.shards,
        "blocks": manifest.blocks,
        "bytes": manifest.size,
        "fingerprint": manifest.fingerprint,
        "captions": spec.captions,
        "resolutions": list(spec.resolutions),
        "buckets": {
            bucket: {
                "samples": sum(manifest.rows[bucket].values()),
                "latents": {str(at): list(shape) for at, shape in manifest.latent_shapes[bucket].items()},
            }
            for bucket in spec.buckets
        },
    }
