"""How a shard's files are laid out: columns, parquet options, and where a column's values lie in the bytes.

A column chunk is one data page of required values, PLAIN, uncompressed: the values of a fixed-width column are
the last ``rows * width`` bytes of the chunk, so a row's bytes are computable from the index alone.
Tried in ``benchmarks``: any other encoding or compression costs a half of the speed or more, and latents do
not compress.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isthmus.storage.shards.spec import DatasetSpec, EncoderSpec

Kind = Literal["string", "bytes", "int32", "bool", "number?", "text?"]
"""Those with a question mark may be null: NaN or an empty text in memory, a null in the file."""

PARQUET_OPTIONS: dict[str, Any] = {
    "version": "2.6",
    "data_page_version": "1.0",
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": False,
    "store_schema": False,
    "data_page_size": 1 << 30,
    "write_batch_size": 1 << 20,
}
"""One page for each column chunk; no statistics, which would sit in the page header and hold whole values."""

MAX_ROWS_PER_GROUP = 4096
MAX_PAGE_HEADER = 256
MAX_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a sibling file."""

    name: str
    kind: Kind
    shape: tuple[int, ...] = ()
    """Of one row's fp16 array, for `bytes`."""

    @property
    def width(self) -> int | None:
        """Bytes of one row's values in the page; None when they vary (strings) or share bytes (bool)."""
        if self.kind == "bytes":
            return 2 * prod(self.shape)
        return 4 if self.kind == "int32" else None

    def arrow(self) -> Any:
        """Its pyarrow field: of what training reads never nullable, so that a page holds values alone."""
        types = {
            "string": pa.string(), "int32": pa.int32(), "bool": pa.bool_(),
            "number?": pa.float64(), "text?": pa.string(),
        }  # fmt: skip
        kind = pa.binary(self.width) if self.kind == "bytes" else types[self.kind]
        return pa.field(self.name, kind, nullable=self.kind.endswith("?"))


def text_sibling(caption: int) -> str:
    """``text`` for the first caption, ``text1`` for the second, and so on."""
    return "text" if caption == 0 else f"text{caption}"


def latent_sibling(resolution: int) -> str:
    """``256px`` for 256."""
    return f"{resolution}px"


FIELDS = "fields"
"""The sibling with what else is told of the samples."""


def siblings(spec: DatasetSpec, size_class: int) -> list[str]:
    """The sibling files of a shard of this size class."""
    texts = [text_sibling(caption) for caption in range(spec.captions)]
    latents = [latent_sibling(resolution) for resolution in spec.resolutions_of(size_class)]
    return texts + latents + ([FIELDS] if spec.fields else [])


def encoder_columns(encoder: EncoderSpec) -> list[Column]:
    """An encoder's columns: tokens [max_tokens, D], length, and pooled [P] where there is one."""
    columns = [
        Column(f"{encoder.name}_tokens", "bytes", (encoder.max_tokens, encoder.width)),
        Column(f"{encoder.name}_length", "int32"),
    ]
    if encoder.pooled_width is not None:
        columns.append(Column(f"{encoder.name}_pooled", "bytes", (encoder.pooled_width,)))
    return columns


SIZE_COLUMNS = ("original_height", "original_width")
CROP_COLUMNS = ("crop_top", "crop_left", "crop_height", "crop_width")


def columns_of(
    spec: DatasetSpec, sibling: str, latent_shape: tuple[int, int, int] | None = None
) -> list[Column]:
    """The columns of a sibling, in the order in which they lie in the file.

    Every sibling carries the key, so that siblings of different samples cannot pass for a shard.
    """
    columns = [Column("key", "string")]
    if sibling == FIELDS:
        columns += [
            Column(told.name, "number?" if told.kind == "number" else "text?") for told in spec.fields
        ]
    elif sibling.startswith("text"):
        columns.append(Column("caption", "string"))
        if sibling == "text":
            columns.append(Column("source", "string"))
            columns += [Column(name, "int32") for name in (*SIZE_COLUMNS, *CROP_COLUMNS)]
            columns.append(Column("flipped", "bool"))
        for encoder in spec.text:
            columns += encoder_columns(encoder)
    else:
        assert latent_shape is not None
        columns += [Column(name, "bytes", latent_shape) for name in ("latent_mean", "latent_logvar")]
    return columns


def table(columns: Sequence[Column], values: Mapping[str, Any], schema: Any) -> Any:
    """A pyarrow table: `bytes` columns from fp16 arrays [rows, ...], the others from sequences."""
    arrays = []
    for column in columns:
        value = values[column.name]
        if column.kind == "bytes":
            data = np.ascontiguousarray(value, dtype="<f2")
            arrays.append(
                pa.FixedSizeBinaryArray.from_buffers(
                    pa.binary(column.width), len(data), [None, pa.py_buffer(data)]
                )
            )
        elif column.kind == "number?":
            numbers = np.asarray(value, np.float64)
            arrays.append(pa.array(numbers, mask=np.isnan(numbers)))
        elif column.kind == "text?":
            arrays.append(pa.array([word or None for word in value], pa.string()))
        else:
            arrays.append(pa.array(value, type=column.arrow().type))
    return pa.Table.from_arrays(arrays, schema=schema)


def finite_rows(values: NDArray[np.float16]) -> NDArray[np.bool_]:
    """Which rows of a [rows, ...] fp16 array hold no NaN and no infinity; [rows]."""
    if not len(values):
        return np.ones(0, np.bool_)
    bits = values.reshape(len(values), -1).view(np.uint16)
    # An fp16 is finite unless its five exponent bits are all ones; numpy has no fast isfinite for fp16.
    return np.fromiter((bool(np.all((row & 0x7C00) != 0x7C00)) for row in bits), np.bool_, len(bits))


def page_header(chunk: bytes | memoryview) -> tuple[int, int]:
    """Length of the page header at the start of `chunk`, and of the page behind it, in bytes.

    Reads just enough of thrift's compact protocol for an uncompressed data page (parquet-format, PageHeader).

    Raises:
        ValueError: not a page header.
    """
    try:
        end, fields = _struct(chunk, 0, depth=0)
    except IndexError:
        raise ValueError("the page header is cut short") from None
    if fields.get(1) != 0 or 3 not in fields or fields.get(2) != fields[3] or fields[3] < 0:
        raise ValueError("not the header of an uncompressed data page")
    return end, fields[3]


def page_of(chunk: memoryview) -> memoryview:
    """The page of a column chunk that is one page behind one header.

    The header that our writer makes says the page's length in its second field; the chunk's end is the page's. Whether the
    page holds what it should is for whoever decodes it to see.

    Raises:
        ValueError: it is not.
    """
    if len(chunk) > 16 and chunk[:3] == _PAGE_BEGINS:
        length, _ = _varint(chunk, 3)
        header = len(chunk) - (length >> 1)
        if 8 < header < MAX_PAGE_HEADER and not chunk[header - 1]:
            return chunk[header:]
    header, length = page_header(chunk[:4096])
    if len(chunk) - header != length:
        raise ValueError("the page does not fill its column chunk")
    return chunk[header:]


_PAGE_BEGINS = b"\x15\x00\x15"
"""Thrift: field 1, the kind of page, is 0 (data); field 2, its length, follows."""


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number in the page header is too long")


def _struct(data: bytes | memoryview, at: int, depth: int) -> tuple[int, dict[int, int]]:
    """End of the thrift struct at `at`, and its integer fields by id."""
    if depth > 4:
        raise ValueError("the page header is nested too deep")
    fields: dict[int, int] = {}
    identifier = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return at, fields
        kind, step = head & 15, head >> 4
        if step:
            identifier += step
        else:
            raw, at = _varint(data, at)
            identifier = (raw >> 1) ^ -(raw & 1)
        if kind in (4, 5, 6):
            raw, at = _varint(data, at)
            fields[identifier] = (raw >> 1) ^ -(raw & 1)
        elif kind == 3:
            at += 1
        elif kind == 8:
            length, at = _varint(data, at)
            at += length
        elif kind == 12:
            at, _ = _struct(data, at, depth + 1)
        elif kind not in (1, 2):
            raise ValueError(f"a field of unknown kind {kind} in the page header")


_LENGTH = struct.Struct("<I")


def decode_strings(page: memoryview, rows: int) -> list[str]:
    """The strings of a PLAIN page. ValueError when they do not fill the page exactly."""
    values: list[str] = []
    data, at, end, length_at = bytes(page), 0, len(page), _LENGTH.unpack_from
    # One decoding for all: cutting a str is quicker than decoding bytes. Where there is more than ASCII, it is undone.
    text = data.decode("latin-1")
    try:
        for _ in range(rows):
            start = at + 4
            at = start + length_at(data, at)[0]
            value = text[start:at]
            values.append(value if value.isascii() else data[start:at].decode())
    except struct.error:
        if at <= end:
            raise ValueError("the page ends before its last string") from None
    if at > end:
        raise ValueError("a string reaches beyond its page")
    if at != end:
        raise ValueError("the page is longer than its strings")
    return values


def decode_bools(page: memoryview, rows: int) -> NDArray[np.bool_]:
    """The booleans of a PLAIN page, bit-packed from the lowest bit; [rows]."""
    if len(page) != (rows + 7) // 8:
        raise ValueError("the page does not hold one bit for each row")
    bits = np.unpackbits(np.frombuffer(page, np.uint8), count=rows, bitorder="little")
    return bits.astype(np.bool_)
