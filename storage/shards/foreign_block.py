"""What a column map makes of a row group: which columns at which size, and the block that their rows become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import CorruptShard

# As a module: blocks may import the reader of foreign files, and so this one, while it is being imported itself.
from isthmus.storage.shards import blocks
from isthmus.storage.shards.foreign_arrays import (
    Bytes,
    Wanted,
    WrongRow,
    array_rows,
    flag_rows,
    number_rows,
    raw_rows,
    text_rows,
)
from isthmus.storage.shards.foreign_map import LOGVAR_OF_A_POINT, TextColumns, Values
from isthmus.storage.shards.layout import CROP_COLUMNS, SIZE_COLUMNS
from isthmus.storage.shards.spec import AutoencoderSpec, EncoderSpec

if TYPE_CHECKING:
    from isthmus.storage.shards.manifest import Manifest

MAX_TEXT_BYTES = 1 << 28
"""Of a text column of one row group, without compression."""
ITEM_BYTES = {"float16": 2, "float32": 4}
MAP_HINT = "correct the file, or the column map and index it again"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a column of a row group can hold at most."""

    name: str
    kind: Literal["array", "text", "number"]
    values: int = 1
    """Of a row, numbers of an array."""
    width: int = 0
    """Bytes of a full row where arrays are raw bytes."""

    def decoded(self, rows: int) -> int:
        """Bytes that its pages may unpack to: doubles with levels, dictionaries and half as much again."""
        if self.kind == "text":
            return MAX_TEXT_BYTES
        return rows * (15 * self.values + 96) + (1 << 23)

    def bytes(self, rows: int) -> int:
        """Bytes that it usually takes."""
        return rows * {"array": 2 * self.values, "text": 256, "number": 4}[self.kind]


class Roles:
    """A bucket's columns at one resolution with one caption.

    Args:
        manifest: of a dataset with a column map.
    """

    def __init__(self, manifest: Manifest, bucket: str, resolution: int, caption: int) -> None:
        assert manifest.columns is not None
        self._map, self._spec = manifest.columns, manifest.spec
        self._words, self._latent = self._map.captions[caption], self._map.latents[resolution]
        shapes = manifest.latent_shapes[bucket]
        self._shape = shapes[resolution]
        largest = shapes[max(shapes)]
        self._size = tuple(side * self._spec.autoencoder.factor for side in largest[1:])
        """Height and width in pixels at the largest resolution."""
        self.names = self._map.of(resolution, caption)
        """The columns that are read."""
        self.text = [name for name in dict.fromkeys((self._map.key, self._words.caption)) if name is not None]
        self.expected = self._expectations()
        self.row_bytes = 2 * 2 * prod(self._shape) + sum(
            2 * encoder.max_tokens * encoder.width + 2 * (encoder.pooled_width or 0)
            for encoder in self._spec.text
        )
        """Bytes of a row's arrays in a block."""
        self._point = np.full(prod(self._shape), LOGVAR_OF_A_POINT, "<f2").view(np.uint8)
        self._constants: dict[tuple[type, int | bool, int], NDArray[Any]] = {}

    def _expectations(self) -> list[Expected]:
        arrays = [(self._latent.mean, prod(self._shape)), (self._latent.logvar, prod(self._shape))]
        for encoder in self._spec.text:
            text = self._words.text[encoder.name]
            arrays.append((text.tokens, encoder.max_tokens * encoder.width))
            arrays.append((text.pooled, encoder.pooled_width or 0))
        kinds = {
            told.column: Expected(told.column, "array", values, values * ITEM_BYTES[told.dtype])
            for told, values in arrays
            if told is not None
        }
        for name in self.text:
            kinds.setdefault(name, Expected(name, "text"))
        return [kinds.get(name) or Expected(name, "number") for name in self.names]

    def block(
        self, table: Any, plain: Mapping[str, Bytes], shard: str, row_group: int, rows: int
    ) -> blocks.Block:
        """The block of a decoded row group. CorruptShard names the row and the column that are not as promised.

        Args:
            table: pyarrow's, of the columns that are not in
            plain: raw bytes, [rows, width].
        """
        take = _Taker(table, plain, shard, row_group)
        block, told = blocks.Block(rows), self._map
        block.strings["key"] = (
            [f"{shard}#{row_group}:{row}" for row in range(rows)]
            if told.key is None
            else take(told.key, text_rows)
        )
        words = self._words.caption
        block.strings["caption"] = (
            [""] * rows if words is None else take(words, lambda column: text_rows(column, null=""))
        )
        height, width = self._size
        defaults = {"crop_height": height, "crop_width": width, "crop_top": 0, "crop_left": 0}
        defaults |= {"original_height": height, "original_width": width}
        for names, columns in ((SIZE_COLUMNS, told.original_size), (CROP_COLUMNS, told.crop)):
            for at, name in enumerate(names):
                block.numbers[name] = (
                    self._constant(defaults[name], rows)
                    if columns is None
                    else take(columns[at], lambda column: number_rows(column, 0))
                )
        block.numbers["flipped"] = (
            self._constant(False, rows) if told.flipped is None else take(told.flipped, flag_rows)
        )
        for encoder in self._spec.text:
            self._text(block, take, encoder, self._words.text[encoder.name])
        self._latents(block, take, self._spec.autoencoder)
        return block

    def _constant(self, value: int | bool, rows: int) -> NDArray[Any]:
        """A column of one value, which all blocks of so many rows share."""
        key = type(value), value, rows
        if key not in self._constants:
            made: NDArray[Any] = np.full(rows, value, np.bool_ if isinstance(value, bool) else np.int32)
            made.flags.writeable = False
            self._constants[key] = made
        return self._constants[key]

    def _latents(self, block: blocks.Block, take: _Taker, autoencoder: AutoencoderSpec) -> None:
        latent, values = self._latent, prod(self._shape)
        scale = (autoencoder.shift_factor, autoencoder.scaling_factor) if latent.scaled else (0.0, 1.0)
        block.fixed["latent_mean"], _ = take.array(latent.mean, Wanted(values, latent.mean.dtype, 0, *scale))
        if latent.logvar is None:
            # One row in memory for all of them.
            block.fixed["latent_logvar"] = np.broadcast_to(self._point, (block.rows, len(self._point)))
        else:
            block.fixed["latent_logvar"], _ = take.array(latent.logvar, Wanted(values, latent.logvar.dtype))

    def _text(self, block: blocks.Block, take: _Taker, encoder: EncoderSpec, text: TextColumns) -> None:
        short = text.ragged or text.length is not None
        wanted = Wanted(encoder.max_tokens * encoder.width, text.tokens.dtype, encoder.width if short else 0)
        name = encoder.name
        block.fixed[f"{name}_tokens"], counts = take.array(text.tokens, wanted)
        held = (counts // encoder.width).astype(np.int32)
        if text.length is None:
            block.numbers[f"{name}_length"] = held
        else:
            length = take(text.length, lambda column: number_rows(column, 0, encoder.max_tokens))
            if (length > held).any():
                row = int(np.argmax(length > held))
                raise take.wrong(text.length, f"{length[row]} tokens, the row holds {held[row]}", row)
            block.numbers[f"{name}_length"] = length
        if text.pooled is not None:
            wanted = Wanted(encoder.pooled_width or 0, text.pooled.dtype)
            block.fixed[f"{name}_pooled"], _ = take.array(text.pooled, wanted)


@dataclass(frozen=True, slots=True)
class _Taker:
    """Takes columns out of a table; what is wrong with one gets its place."""

    table: Any
    plain: Mapping[str, Bytes]
    shard: str
    row_group: int

    def __call__(self, name: str, convert: Callable[[Any], Any]) -> Any:
        try:
            return convert(self.plain[name] if name in self.plain else self.table.column(name))
        except WrongRow as error:
            raise self.wrong(name, str(error), error.row) from None
        except (ValueError, TypeError, OverflowError) as error:
            raise self.wrong(name, str(error), None) from None

    def array(self, values: Values, wanted: Wanted) -> tuple[Bytes, NDArray[np.int64]]:
        """Rows of fp16 and how many values each held."""
        convert = raw_rows if values.column in self.plain else array_rows
        found: tuple[Bytes, NDArray[np.int64]] = self(values.column, lambda column: convert(column, wanted))
        return found

    def wrong(self, name: str, message: str, row: int | None) -> CorruptShard:
        return CorruptShard(
            message, shard=self.shard, row_group=self.row_group, row=row, column=name, hint=MAP_HINT
        )
