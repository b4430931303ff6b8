"""One sibling file while it is written, and the small files of embeddings beside the shards."""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.errors import DataError, UsageError
from isthmus.files import replace_file
from isthmus.storage.filesystems import FileSystem, filesystem, is_local, join, storage_errors
from isthmus.storage.shards.check import check_text
from isthmus.storage.shards.index import BlockEntry
from isthmus.storage.shards.layout import (
    MAX_CHUNK_BYTES,
    PARQUET_OPTIONS,
    Column,
    encoder_columns,
    page_header,
    table,
)
from isthmus.storage.shards.spec import DatasetSpec, TextColumn


class Recorder(io.RawIOBase):
    """Passes bytes on to the store and keeps them until they are asked for, to take checksums of what is written."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file, self.position, self.recent = file, 0, bytearray()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Passes bytes on; how many they were."""
        view = memoryview(data).cast("B")
        self.file.write(view)
        self.recent += view
        self.position += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes so far."""
        return self.position

    def take(self) -> bytearray:
        """What was written since the last call."""
        recent, self.recent = self.recent, bytearray()
        return recent


class SiblingFile:
    """A parquet file of a shard that is being written, block by block.

    Args:
        store: the file system, and
        path: the file in it; `uri` is for messages.
        about: what the file metadata says under the key `isthmus`.
    """

    def __init__(
        self,
        store: FileSystem,
        path: str,
        uri: str,
        sibling: str,
        columns: Sequence[Column],
        about: Mapping[str, Any],
    ) -> None:
        self._uri, self._sibling, self._columns = uri, sibling, columns
        self._schema = pa.schema([column.arrow() for column in columns])
        with storage_errors("write", uri):
            self._file = store.open(path, "wb")
            self._recorder = Recorder(self._file)
            self._writer = pq.ParquetWriter(self._recorder, self._schema, **PARQUET_OPTIONS)
            self._writer.add_key_value_metadata({"isthmus": json.dumps(about, sort_keys=True)})

    def write(self, values: Mapping[str, Any], block: BlockEntry) -> None:
        """Writes one row group and enters its byte ranges and checksums into `block`."""
        for column in self._columns:
            if column.width is not None and column.width * block.rows > MAX_CHUNK_BYTES - 1024:
                raise UsageError(
                    f"{block.rows} rows of {column.width} bytes do not fit a column chunk",
                    where=self._uri,
                    hint="lower rows_per_group",
                )
        with storage_errors("write", self._uri):
            self._writer.write_table(table(self._columns, values, self._schema), row_group_size=block.rows)
        written = memoryview(self._recorder.take())
        at = 4 if block.row_group == 0 else 0  # the file starts with the four bytes PAR1
        block.offset[self._sibling] = self._recorder.position - len(written) + at
        for column in self._columns:
            header, page = page_header(written[at : at + 4096])
            if column.width is not None and page != column.width * block.rows:
                raise DataError(f"pyarrow split column {column.name} into pages", where=self._uri)
            end = at + header + page
            block.length[self._sibling, column.name] = end - at
            block.crc32[self._sibling, column.name] = zlib.crc32(written[at:end])
            at = end
        if at != len(written):
            raise DataError("pyarrow left bytes between column chunks", where=self._uri)

    def close(self) -> tuple[int, int]:
        """Writes the footer. Returns the file's size in bytes and the footer's CRC-32."""
        with storage_errors("write", self._uri):
            self._writer.close()
            self._file.close()
        return self._recorder.position, zlib.crc32(self._recorder.take())

    def abandon(self) -> None:
        """Lets go of a file that will not be finished."""
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            self._writer.close()
        with contextlib.suppress(OSError, ValueError):
            self._file.close()


def write_whole(uri: str, name: str, data: bytes) -> None:
    """A small file beside the shards, whole or not at all."""
    store, root = filesystem(uri)
    path = f"{root}/{name}"
    with storage_errors("write", join(uri, name)):
        if is_local(uri):
            replace_file(Path(path), data)
        else:
            store.pipe_file(path, data)


def text_file(
    spec: DatasetSpec, text: Mapping[str, TextColumn], rows: int, strings: Mapping[str, list[str]]
) -> bytes:
    """A parquet file of `rows` embeddings of every encoder, and columns of strings, as bytes."""
    columns = [Column(name, "string") for name in strings]
    values: dict[str, Any] = dict(strings)
    for encoder in spec.text:
        tokens = np.zeros((rows, encoder.max_tokens, encoder.width), np.float16)
        length, pooled = np.zeros(rows, np.int32), np.zeros((rows, encoder.pooled_width or 0), np.float16)
        given = text.get(encoder.name)
        if (0 if given is None else len(given)) != rows:
            raise UsageError(f"text encoder {encoder.name} needs {rows} embeddings beside the shards")
        for row in range(rows):
            assert given is not None
            vector = None if given.pooled is None else given.pooled[row]
            check_text(encoder, given.tokens[row], int(given.length[row]), vector, where=f"embedding {row}")
            tokens[row, : given.tokens.shape[1]] = given.tokens[row]
            length[row] = given.length[row]
            if encoder.pooled_width is not None:
                pooled[row] = vector
        columns += encoder_columns(encoder)
        values |= {f"{encoder.name}_tokens": tokens, f"{encoder.name}_length": length}
        values[f"{encoder.name}_pooled"] = pooled
    schema = pa.schema([column.arrow() for column in columns])
    sink = io.BytesIO()
    pq.write_table(table(columns, values, schema), sink, **PARQUET_OPTIONS)
    return sink.getvalue()


def parse_text_file(spec: DatasetSpec, data: bytes) -> tuple[dict[str, TextColumn], list[str]]:
    """The embeddings in a file of :func:`text_file`, and its prompts (empty when it has none).

    Raises:
        ValueError: it is not such a file of this spec.
    """
    try:
        content = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        rows = content.num_rows
        text = {}
        for encoder in spec.text:
            arrays = {
                column.name: _rows(content[column.name], rows, column)
                for column in encoder_columns(encoder)
                if column.kind == "bytes"
            }
            text[encoder.name] = TextColumn(
                tokens=arrays[f"{encoder.name}_tokens"],
                length=content[f"{encoder.name}_length"].to_numpy().astype(np.int32),
                pooled=arrays.get(f"{encoder.name}_pooled"),
            )
        prompts = content["prompt"].to_pylist() if "prompt" in content.column_names else []
    except (KeyError, pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from None
    return text, prompts


def _rows(column: Any, rows: int, told: Column) -> Any:
    if column.type != pa.binary(told.width) or column.null_count:
        raise ValueError(f"column {told.name} is not {list(told.shape)} fp16")
    data = b"".join(column.to_pylist())
    return np.frombuffer(data, "<f2").astype(np.float16).reshape(rows, *told.shape)
