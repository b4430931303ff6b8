"""Columns as pyarrow decodes them -> what a block holds: rows of fp16 bytes, numbers, strings.

Where a column's type lets the rows lie one behind the other in fp16, the result is a view of arrow's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

_FLOATS: dict[str, np.dtype[Any]] = {
    "halffloat": np.dtype("<f2"),
    "float": np.dtype("<f4"),
    "double": np.dtype("<f8"),
}


def allocate(size: int) -> Bytes:
    """Memory of arrow's pool: what blocks gave back is taken again, without new page faults."""
    return np.asarray(memoryview(pa.allocate_buffer(size)).cast("B"))


class WrongRow(ValueError):
    """One row of a column is to blame."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a column's rows must be."""

    values: int
    """Numbers of a full row."""
    dtype: str = "float16"
    """Of raw bytes."""
    unit: int = 0
    """Rows may hold fewer values, a multiple of these; 0: none may."""
    shift: float = 0.0
    scaling: float = 1.0
    """The files hold (x - shift) * scaling; x is wanted."""


def wrong_array_type(kind: Any) -> str | None:
    """Why a column of this arrow type cannot hold arrays of numbers; None when it can."""
    kind = _plain(kind)
    if _is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return None
    if not _is_list(kind):
        return "is neither binary nor a list"
    while _is_list(kind):
        kind = _plain(kind.value_type)
    return None if str(kind) in _FLOATS else f"is a list of {kind}, not of float16, float32 or float64"


def wrong_text_type(kind: Any, *, key: bool = False) -> str | None:
    """Why a column of this type cannot hold text (or, of a key, whole numbers); None when it can."""
    kind = _plain(kind)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return None
    if _is_binary(kind) or (key and pa.types.is_integer(kind)):
        return None
    return "is neither text nor whole numbers" if key else "is not text"


def wrong_number_type(kind: Any, *, flag: bool = False) -> str | None:
    """Why a column of this type cannot hold whole numbers (or flags); None when it can."""
    if pa.types.is_integer(kind) or (flag and pa.types.is_boolean(kind)):
        return None
    return "is neither true and false nor whole numbers" if flag else "does not hold whole numbers"


def wrong_field_type(kind: Any, told: str) -> str | None:
    """Why a column of this type cannot hold a field's numbers or text; None when it can."""
    if told == "text":
        return wrong_text_type(kind)
    if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return None
    return "does not hold numbers"


def array_rows(column: Any, wanted: Wanted) -> tuple[Bytes, Int64]:
    """Rows of little-endian fp16, uint8 [rows, 2 * values], zeros behind short ones; and the values of each, [rows].

    Args:
        column: a pyarrow ChunkedArray.

    Raises:
        WrongRow: a row is null, has another number of values, or one that fp16 does not hold.
        ValueError: the column's type cannot hold arrays.
    """
    parts: list[Bytes] = []
    counts: list[Int64] = []
    first = 0
    for chunk in column.chunks:
        if not len(chunk):
            continue
        data, offsets, dtype = _raw(chunk, wanted, first)
        sizes = np.diff(offsets)
        _check_sizes(sizes, dtype.itemsize, wanted, first)
        full = wanted.values * dtype.itemsize
        if (sizes == full).all():
            rows = data[offsets[0] : offsets[-1]].reshape(len(chunk), full)
        else:
            rows = np.zeros((len(chunk), full), np.uint8)
            for row, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
                rows[row, : end - begin] = data[begin:end]
        parts.append(_as_half(rows, dtype, wanted, first))
        counts.append(sizes // dtype.itemsize)
        first += len(chunk)
    if len(parts) == 1:
        return parts[0], counts[0]
    return np.concatenate(parts), np.concatenate(counts)


def raw_rows(rows: Bytes, wanted: Wanted) -> tuple[Bytes, Int64]:
    """The same of raw bytes that are rows already, uint8 [rows, bytes of a full row]."""
    dtype = np.dtype("<f2" if wanted.dtype == "float16" else "<f4")
    counts = np.full(len(rows), wanted.values)
    return _as_half(rows, dtype, wanted, 0), counts


def _check_sizes(sizes: Int64, item: int, wanted: Wanted, first: int) -> None:
    wrong = sizes != wanted.values * item
    if wanted.unit:
        wrong = (sizes > wanted.values * item) | (sizes % (wanted.unit * item) != 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        size = int(sizes[row])
        found = f"{size // item} values" if size % item == 0 else f"{size} bytes"
        least = f"at most {wanted.values}, a multiple of {wanted.unit}" if wanted.unit else str(wanted.values)
        raise WrongRow(first + row, f"it has {found}, not {least}")


def _as_half(rows: Bytes, dtype: np.dtype[Any], wanted: Wanted, first: int) -> Bytes:
    """The rows in fp16, unscaled; a view where they are so already."""
    scaled = wanted.shift != 0.0 or wanted.scaling != 1.0
    if dtype.itemsize == 2 and not scaled:
        return rows
    values: NDArray[Any] = rows.view(dtype)
    if scaled:
        values = values.astype(np.float32) / np.float32(wanted.scaling) + np.float32(wanted.shift)
    half = allocate(2 * values.size).view("<f2").reshape(values.shape)
    try:
        with np.errstate(over="raise"):
            np.copyto(half, values, casting="unsafe")
    except FloatingPointError:
        row = int(np.argmax((np.abs(np.nan_to_num(values, posinf=0, neginf=0)) >= 65520).any(axis=1)))
        raise WrongRow(first + row, "a value is beyond what fp16 holds (65504)") from None
    return half.view(np.uint8)


def _raw(chunk: Any, wanted: Wanted, first: int) -> tuple[Bytes, Int64, np.dtype[Any]]:
    """The chunk's bytes, where each row begins in them and the last ends [rows + 1], and the type of its numbers."""
    chunk = _storage(chunk)
    _refuse_nulls(chunk, first)
    kind = chunk.type
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        offsets = (chunk.offset + np.arange(len(chunk) + 1)) * width
        return _buffer(chunk, 1), offsets, np.dtype(f"<f{2 if wanted.dtype == 'float16' else 4}")
    if _is_binary(kind):
        if pa.types.is_binary_view(kind):
            chunk = chunk.cast(pa.large_binary())
        width = np.int32 if pa.types.is_binary(chunk.type) else np.int64
        offsets = _buffer(chunk, 1).view(width)[chunk.offset : chunk.offset + len(chunk) + 1]
        return (
            _buffer(chunk, 2),
            offsets.astype(np.int64),
            np.dtype("<f2" if wanted.dtype == "float16" else "<f4"),
        )
    offsets = np.arange(len(chunk) + 1)
    while _is_list(chunk.type):
        if pa.types.is_fixed_size_list(chunk.type):
            offsets = (chunk.offset + offsets) * chunk.type.list_size
        else:
            offsets = chunk.offsets.to_numpy().astype(np.int64)[offsets]
        chunk = _storage(chunk.values)
        if chunk.null_count:
            inside = chunk.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
            at = next(_nulls(inside), None)
            if at is not None:
                row = int(np.searchsorted(offsets, offsets[0] + at, side="right")) - 1
                raise WrongRow(first + row, "it has a null among its values")
    kind = _FLOATS.get(str(chunk.type))
    if kind is None:
        raise ValueError(f"the column {wrong_array_type(chunk.type)}")
    return _buffer(chunk, 1), (offsets + chunk.offset) * kind.itemsize, kind


def first_shape(column: Any, dtype: str) -> tuple[int, ...]:
    """The shape of a column's first row: of nested lists all their sides, otherwise how many values it has."""
    chunk = _storage(column.chunk(0).slice(0, 1))
    if not _is_list(chunk.type):
        _, offsets, kind = _raw(chunk, Wanted(0, dtype), 0)
        return (int(offsets[1] - offsets[0]) // kind.itemsize,)
    value, shape = chunk.to_pylist()[0], []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def text_rows(column: Any, *, null: str | None = None) -> list[str]:
    """The rows of a text column; whole numbers as their digits.

    Args:
        null: what stands for a row without text; None: such a row is WrongRow.
    """
    found = _pylist(column)
    if not column.null_count and str(column.type) in ("string", "large_string"):
        return found
    found, values = [], found
    for row, value in enumerate(values):
        if value is None:
            if null is None:
                raise WrongRow(row, "it is null")
            value = null
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                raise WrongRow(row, "it is not UTF-8") from None
        if not isinstance(value, str):
            value = str(value)
        found.append(value)
    return found


def _pylist(column: Any) -> list[Any]:
    """The rows as Python values; of a dictionary's each once, however many rows have it."""
    if not pa.types.is_dictionary(column.type):
        found: list[Any] = column.to_pylist()
        return found
    rows: list[Any] = []
    for chunk in column.chunks:
        words = chunk.dictionary.to_pylist()
        rows += [None if at is None else words[at] for at in chunk.indices.to_pylist()]
    return rows


def number_rows(column: Any, low: int = -(1 << 31), high: int = (1 << 31) - 1) -> NDArray[np.int32]:
    """The rows of a column of whole numbers, all within `low` to `high`; [rows]."""
    first = 0
    for chunk in column.chunks:
        _refuse_nulls(chunk, first)
        first += len(chunk)
    values = column.to_numpy()
    if values.dtype.kind not in "iub":
        raise ValueError(f"the column {wrong_number_type(column.type)}")
    wrong = (values < low) | (values > high)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise WrongRow(row, f"{values[row]} is not within {low} to {high}")
    return np.asarray(values.astype(np.int32))


def flag_rows(column: Any) -> NDArray[np.bool_]:
    """The rows of a column of true and false, or of zeros and ones; [rows]."""
    return number_rows(column, 0, 1).astype(np.bool_)


def real_rows(column: Any) -> NDArray[np.float64]:
    """The rows of a column of numbers, NaN where there is none or it is not finite; [rows]."""
    parts = [
        chunk.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False) for chunk in column.chunks
    ]
    found = np.concatenate(parts) if parts else np.zeros(0)
    return np.where(np.isfinite(found), found, np.nan)


def field_rows(column: Any, kind: str) -> Any:
    """The rows of a field: numbers with NaN, or a list of text in which an empty one stands for a null."""
    return real_rows(column) if kind == "number" else text_rows(column, null="")


def _refuse_nulls(chunk: Any, first: int) -> None:
    if chunk.null_count:
        raise WrongRow(first + next(_nulls(chunk)), "it is null")


def _nulls(chunk: Any) -> Iterator[int]:
    valid = chunk.is_valid().to_numpy(zero_copy_only=False)
    yield from np.flatnonzero(~valid).tolist()


def _buffer(chunk: Any, number: int) -> Bytes:
    buffer = chunk.buffers()[number]
    return np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)


def _plain(kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(chunk: Any) -> Any:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
