"""The embedding of the empty caption for files made by others: from a file, from one of their rows, or zeros."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError, UsageError
from isthmus.storage.filesystems import filesystem, storage_errors
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.foreign import ForeignReader
from isthmus.storage.shards.spec import DatasetSpec, EncoderSpec, TextColumn

_MAX_BYTES = 1 << 28
_SAFETENSORS = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "BF16": "<u2"}


def null_from_zeros(spec: DatasetSpec) -> dict[str, TextColumn]:
    """All zeros, all tokens valid: a mask without a valid token would leave attention nothing to look at."""
    return {
        encoder.name: TextColumn(
            np.zeros((1, encoder.max_tokens, encoder.width), np.float16),
            np.array([encoder.max_tokens], np.int32),
            None if encoder.pooled_width is None else np.zeros((1, encoder.pooled_width), np.float16),
        )
        for encoder in spec.text
    }


def null_from_file(uri: str, spec: DatasetSpec) -> dict[str, TextColumn]:
    """From an .npz or .safetensors file with `<encoder>_tokens` [T, width], and where they apply `_length`, `_pooled`.

    Nothing in the file is executed: arrays of objects are refused.
    """
    store, path = filesystem(uri)
    try:
        with storage_errors("read", uri), store.open(path, "rb") as file:
            data = bytes(file.read(_MAX_BYTES + 1))
    except FileNotFoundError:
        raise UsageError("null_text: there is no such file", where=uri) from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"null_text: more than {_MAX_BYTES} bytes", where=uri)
    try:
        arrays = _npz(data) if data[:4] == b"PK\x03\x04" else _safetensors(data)
        return {encoder.name: _column(encoder, arrays) for encoder in spec.text}
    except UsageError:
        raise
    except (ValueError, KeyError, EOFError, OSError, OverflowError, struct.error, TypeError) as error:
        raise UsageError(f"null_text: not such an .npz or .safetensors file: {error}", where=uri) from None


def null_from_row(dataset: Dataset, key: str) -> dict[str, TextColumn]:
    """The embeddings of the row with this key: the first caption's."""
    reader = ForeignReader(dataset, dataset.spec.resolutions[0])
    for block in range(len(dataset.index)):
        found = reader.read(block)
        if key not in found.strings["key"]:
            continue
        row = found.strings["key"].index(key)
        text = {}
        for encoder in dataset.spec.text:
            tokens = found.fixed[f"{encoder.name}_tokens"][row].copy().view("<f2")
            pooled = found.fixed.get(f"{encoder.name}_pooled")
            text[encoder.name] = TextColumn(
                tokens.reshape(1, encoder.max_tokens, encoder.width).astype(np.float16),
                found.numbers[f"{encoder.name}_length"][row : row + 1].copy(),
                None if pooled is None else pooled[row].copy().view("<f2").astype(np.float16)[None],
            )
        return text
    raise UsageError(f"null_text: no row has the key {key!r}", where=dataset.uri)


def _column(encoder: EncoderSpec, arrays: Mapping[str, NDArray[Any]]) -> TextColumn:
    name = f"{encoder.name}_tokens"
    if name not in arrays:
        raise UsageError(
            f"null_text: the file has no {name}", hint=f"it has {', '.join(sorted(arrays)) or 'nothing'}"
        )
    tokens = arrays[name].reshape(-1, arrays[name].shape[-1])
    if tokens.shape[1] != encoder.width or len(tokens) > encoder.max_tokens:
        raise UsageError(
            f"null_text: {name} is {list(tokens.shape)}, not [up to {encoder.max_tokens}, {encoder.width}]"
        )
    stored = np.zeros((1, encoder.max_tokens, encoder.width), np.float16)
    stored[0, : len(tokens)] = _half(tokens, name)
    length = arrays.get(f"{encoder.name}_length")
    count = len(tokens) if length is None else int(length.reshape(-1)[0])
    pooled = None
    if encoder.pooled_width is not None:
        pooled_name = f"{encoder.name}_pooled"
        given = arrays.get(pooled_name)
        if given is None or given.size != encoder.pooled_width:
            raise UsageError(f"null_text: the file needs {pooled_name} of {encoder.pooled_width} values")
        pooled = _half(given.reshape(1, -1), pooled_name)
    return TextColumn(stored, np.array([count], np.int32), pooled)


def _half(values: NDArray[Any], name: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise DataError(f"null_text: {name} is not finite in fp16")
    return half


def _npz(data: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: np.asarray(archive[name]) for name in archive.files}


def _safetensors(data: bytes) -> dict[str, NDArray[Any]]:
    """The format is eight bytes of length, a JSON header, and raw values: huggingface.co/docs/safetensors."""
    (length,) = struct.unpack_from("<Q", data)
    if length > len(data) - 8:
        raise ValueError("its header is longer than the file")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    body = memoryview(data)[8 + length :]
    arrays: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _SAFETENSORS.get(entry["dtype"])
        if dtype is None:
            continue  # a type that no embedding has
        begin, end = entry["data_offsets"]
        shape = [int(side) for side in entry["shape"]]
        values = np.frombuffer(body[begin:end], dtype)
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        if values.size != math.prod(shape):
            raise ValueError(f"tensor {name} does not have its shape")
        arrays[str(name)] = values.reshape(shape)
    return arrays
