"""Pictures in the rows of parquet files, or of the arrow files of a Hugging Face dataset on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.core.encode.filters import CAPTION_FIELDS, PROVENANCE_FIELDS, clean
from isthmus.core.encode.pictures import Unusable
from isthmus.core.encode.pieces import MAX_BYTES, Pending, Piece, PieceSource, pending
from isthmus.core.encode.sources import Rejected
from isthmus.errors import DataError, UsageError
from isthmus.storage.filesystems import join

if TYPE_CHECKING:
    from isthmus.core.encode.places import File, Place
    from isthmus.core.recipe.pictures import Pictures

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "img", "image_bytes", "bytes", "image_path", "path",
                 "file_name", "image_url")  # fmt: skip
_ROWS = 32
"""Of a row group, decoded at once."""
_FOOTERS_AT_ONCE = 16


class _Rows(PieceSource):
    """What both kinds of tables have in common: columns, keys, and a picture that is bytes, a struct or a path."""

    def __init__(self, place: Place, pictures: Pictures) -> None:
        self._place, self._pictures = place, pictures

    def _columns(self, names: list[str], where: str) -> tuple[str, list[str]]:
        """The picture's column, and all columns that are read."""
        wanted = self._pictures
        asked = {
            "image": wanted.image,
            "key": wanted.key,
            "provenance": wanted.provenance,
            "licence": wanted.licence,
        }
        needed = [(f"data.pictures.{field}", name) for field, name in asked.items() if name]
        needed += [("data.pictures.captions", item.field) for item in wanted.captions]
        needed += [("data.pictures.scores", name) for name in wanted.scores]
        needed += [("data.pictures.keep", item.field) for item in wanted.keep]
        for field, name in needed:
            if name not in names:
                raise UsageError(
                    f"{field} is {name}, which is no column",
                    where=where,
                    hint=f"columns: {', '.join(names)[:300]}",
                )
        image = wanted.image or next((name for name in IMAGE_COLUMNS if name in names), None)
        if image is None:
            raise UsageError(
                "no column of pictures",
                where=where,
                hint=f"name it in data.pictures.image; columns: {', '.join(names)[:300]}",
            )
        optional = [
            *(() if wanted.captions else CAPTION_FIELDS),
            *(() if wanted.provenance else PROVENANCE_FIELDS),
        ]
        read = [image, *(name for _, name in needed), *(name for name in optional if name in names)]
        return image, list(dict.fromkeys(read))

    def _pictures_of(
        self, batch: pa.RecordBatch, image: str, prefix: str, row: int, seen: set[str]
    ) -> Iterator[Pending | Rejected]:
        for at, values in enumerate(batch.to_pylist(), start=row):
            value = values.pop(image)
            if self._pictures.key is None:
                key = f"{prefix}:{at}"
            else:
                own = values.get(self._pictures.key)
                if own is None:
                    yield Rejected(key=f"{prefix}:{at}", reason="no-key", detail="its key is null")
                    continue
                key = f"{prefix}/{clean(str(own))[:500]}"
            if key in seen:
                yield Rejected(key=key, reason="duplicate", detail="another picture has this key")
                continue
            seen.add(key)
            try:
                yield self._picture(key, value, values)
            except Unusable as problem:
                yield Rejected(key=key, reason=problem.reason, detail=problem.detail)

    def _picture(self, key: str, value: Any, fields: Mapping[str, Any]) -> Pending:
        if isinstance(value, Mapping):  # as Hugging Face's `Image` has it
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, list):
            raise Unusable("unsupported", "a list, not a picture")
        if value is None:
            raise Unusable("missing", "the picture is null")
        if isinstance(value, str):
            return pending(key, 0, self._from_file(value, fields), self._pictures, self._place.name)
        if not isinstance(value, bytes):
            raise Unusable("unsupported", f"{type(value).__name__}, not a picture")
        if len(value) > MAX_BYTES:
            raise Unusable("too-many-bytes", f"{len(value)} bytes")
        data = value
        return pending(key, len(data), lambda: (data, fields), self._pictures, self._place.name)

    def _from_file(
        self, reference: str, fields: Mapping[str, Any]
    ) -> Callable[[], tuple[bytes, Mapping[str, Any]]]:
        def fetch() -> tuple[bytes, Mapping[str, Any]]:
            try:
                return self._place.read(self._place.within(reference), MAX_BYTES), fields
            except FileNotFoundError:
                raise Unusable("missing", "there is no such file") from None
            except ValueError as error:
                raise Unusable(
                    "escapes" if "outside" in str(error) else "too-many-bytes", str(error)
                ) from None

        return fetch


class ParquetSource(_Rows):
    """Rows of parquet files, a row group at a time.

    Keys are `FILE#GROUP:ROW`, or `FILE#GROUP/KEY` with a key column: unique whatever other files hold.
    """

    def __init__(self, place: Place, files: list[File], pictures: Pictures) -> None:
        super().__init__(place, pictures)
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            found = list(pool.map(self._footer, files))
        self.pieces = [piece for pieces in found for piece in pieces]
        self.description = f"parquet files of {place.name}"

    def _footer(self, file: File) -> list[Piece]:
        with self._open(file) as table:
            names = list(table.schema_arrow.names)
            self._columns(names, join(self._place.root, file.name))
            groups = [table.metadata.row_group(g) for g in range(table.metadata.num_row_groups)]
            return [
                Piece(file, at, sum(group.column(c).total_compressed_size for c in range(group.num_columns)))
                for at, group in enumerate(groups)
            ]

    def read(self, piece: Piece) -> Iterator[Pending | Rejected]:
        """One row group, a few rows at a time."""
        seen: set[str] = set()
        row = 0
        with self._open(piece.file) as table:
            image, columns = self._columns(list(table.schema_arrow.names), piece.file.name)
            batches = table.iter_batches(_ROWS, row_groups=[piece.group], columns=columns, use_threads=False)
            for batch in batches:
                yield from self._pictures_of(batch, image, f"{piece.file.name}#{piece.group}", row, seen)
                row += len(batch)

    def _open(self, file: File) -> Any:
        return _Opened(self._place, file, lambda opened: pq.ParquetFile(opened, pre_buffer=False))


class ArrowSource(_Rows):
    """The arrow files of a dataset that `datasets` saved to disk, or left in its cache. Keys are `FILE:ROW`."""

    def __init__(self, place: Place, files: list[File], pictures: Pictures) -> None:
        super().__init__(place, pictures)
        self.pieces = [Piece(file, size=file.size) for file in _in_order(place, files)]
        self.description = f"arrow files of {place.name}"

    def read(self, piece: Piece) -> Iterator[Pending | Rejected]:
        """One file, a record batch at a time."""
        seen: set[str] = set()
        row = 0
        with _Opened(self._place, piece.file, _batches) as (schema, batches):
            image, columns = self._columns(list(schema.names), piece.file.name)
            for batch in batches:
                for start in range(0, len(batch), _ROWS):
                    part = batch.slice(start, _ROWS).select(columns)
                    yield from self._pictures_of(part, image, piece.file.name, row, seen)
                    row += len(part)


class _Opened:
    """A file as a table; what pyarrow says of a damaged one is one line that names it."""

    def __init__(self, place: Place, file: File, how: Callable[[Any], Any]) -> None:
        self._place, self._file, self._how = place, file, how
        self._opened = place.open(file)

    def __enter__(self) -> Any:
        opened = self._opened.__enter__()
        try:
            return self._how(opened)
        except (pa.ArrowException, ValueError) as error:
            self._opened.__exit__(None, None, None)
            raise self._error(error) from None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._opened.__exit__(kind, error, trace)
        if isinstance(error, pa.ArrowException):
            raise self._error(error) from None

    def _error(self, error: Exception) -> DataError:
        text = " ".join(str(error).split())[:200]
        return DataError(
            f"it cannot be read: {text}",
            where=join(self._place.root, self._file.name),
            hint="a file that is cut short or damaged; replace it, or take it out of the source",
        )


def _batches(opened: Any) -> tuple[Any, Iterator[Any]]:
    """Schema and record batches of either arrow format."""
    magic = opened.read(6)
    opened.seek(0)
    options = pa.ipc.IpcReadOptions(use_threads=False)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(opened, options=options)
        return reader.schema, (reader.get_batch(at) for at in range(reader.num_record_batches))
    stream = pa.ipc.open_stream(opened, options=options)
    return stream.schema, iter(stream)


def _in_order(place: Place, files: list[File]) -> list[File]:
    """In the order that `state.json` gives, where there is one."""
    by_name = {file.name: file for file in files}
    arrows = [file for file in files if file.name.endswith(".arrow")]
    if "dataset_dict.json" in by_name:
        splits = sorted({file.name.partition("/")[0] for file in arrows})
        raise UsageError("it holds several splits", where=place.uri, hint=f"name one: {', '.join(splits)}")
    if "state.json" not in by_name:
        return arrows
    try:
        state = json.loads(place.read("state.json", 2**24))
        order = [str(item["filename"]) for item in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"not a dataset's state: {error}", where=join(place.root, "state.json")) from None
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UsageError(
            "its rows are chosen by an index", where=place.uri, hint="save it again after `flatten_indices()`"
        )
    gone = [name for name in order if name not in by_name]
    if gone:
        raise DataError(f"{gone[0]} is not there", where=place.uri)
    return [by_name[name] for name in order]
