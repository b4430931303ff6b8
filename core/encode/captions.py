"""Captions to rows of embeddings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.errors import DataError

if TYPE_CHECKING:
    from isthmus.core.encode.text import TextEncoderRunner
    from isthmus.storage.shards import TextColumn

EncodedCaption = Mapping[str, tuple[Any, int, Any]]
"""Encoder -> (tokens fp16 [T, D], length, pooled fp16 [P] or None)."""
_CACHE_BYTES = 64 * 2**20
_BATCH = 64


class CaptionEncoder:
    """Encodes captions, and remembers some: many pictures may share one."""

    def __init__(self, encoders: dict[str, TextEncoderRunner]) -> None:
        self._encoders = encoders
        self._cache: OrderedDict[str, EncodedCaption] = OrderedDict()
        size = sum(2 * (e.max_tokens * e.width + (e.pooled_width or 0)) for e in encoders.values())
        self._room = max(1, _CACHE_BYTES // size)

    def encode(self, texts: Sequence[str]) -> dict[str, EncodedCaption]:
        """Each different caption -> encoder -> (tokens, length, pooled)."""
        wanted = list(dict.fromkeys(texts))
        fresh = [text for text in wanted if text not in self._cache]
        found = {text: self._cache[text] for text in wanted if text in self._cache}
        for start in range(0, len(fresh), _BATCH):
            part = fresh[start : start + _BATCH]
            columns = {name: encoder.encode(part) for name, encoder in self._encoders.items()}
            for row, text in enumerate(part):
                # Copies, so that a remembered row does not keep its whole batch alive.
                found[text] = {name: _row(column, row) for name, column in columns.items()}
        for text in wanted:
            self._cache[text] = found[text]
            self._cache.move_to_end(text)
        while len(self._cache) > self._room:
            self._cache.popitem(last=False)
        return found


def _row(column: TextColumn, row: int) -> tuple[Any, int, Any]:
    pooled = None if column.pooled is None else column.pooled[row].copy()
    return column.tokens[row].copy(), int(column.length[row]), pooled


def finite_columns(text: dict[str, TextEncoderRunner], texts: list[str], what: str) -> dict[str, TextColumn]:
    """Embeddings of `texts` by encoder; DataError, naming `what`, when one is not finite."""
    if not texts:
        return {}
    columns = {name: encoder.encode(texts) for name, encoder in text.items()}
    for name, column in columns.items():
        if not np.isfinite(column.tokens).all() or not (
            column.pooled is None or np.isfinite(column.pooled).all()
        ):
            raise DataError(f"{what} of {name} is not finite")
    return columns


def not_finite(latents: dict[int, tuple[Any, Any]], texts: Sequence[EncodedCaption]) -> str | None:
    """Which of a sample's values are not finite, if any."""
    for resolution, pair in latents.items():
        if not all(np.isfinite(values).all() for values in pair):
            return f"latents at {resolution} px"
    for encoded in texts:
        for name, (tokens, _, pooled) in encoded.items():
            if not np.isfinite(tokens).all() or (pooled is not None and not np.isfinite(pooled).all()):
                return f"embedding of {name}"
    return None
