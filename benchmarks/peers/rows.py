"""The rows that every format holds: seeded, so that a reader's output can be compared with what was written.

Only numpy: this module runs in every peer's own environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LATENT = (4, 64, 64)
TOKENS = (77, 768)
LATENT_BYTES = 2 * int(np.prod(LATENT))
TOKEN_BYTES = 2 * int(np.prod(TOKENS))
ROW_BYTES = 2 * LATENT_BYTES + TOKEN_BYTES
"""Of the arrays; key, caption and length are another hundred."""
ARRAYS = {"latent_mean": LATENT, "latent_logvar": LATENT, "tokens": TOKENS}
SHARD_ROWS = 2560
"""Rows of a file, for the formats whose writer does not choose for itself."""
SEED = 20


class Row(NamedTuple):
    """One encoded image."""

    key: str
    caption: str
    latent_mean: NDArray[np.float16]
    latent_logvar: NDArray[np.float16]
    tokens: NDArray[np.float16]
    length: int


def key_of(number: int) -> str:
    """The key of row `number`."""
    return f"{number:09d}"


def row(number: int) -> Row:
    """Row `number`; its values depend on nothing else."""
    random = np.random.default_rng([SEED, number])
    # Two exponent bits cleared: every pattern that is left is a finite number below 2.
    bits = np.frombuffer(random.bytes(ROW_BYTES), np.uint16) & np.uint16(0xBBFF)
    values = bits.view(np.float16)
    mean, logvar, tokens = np.split(values, [LATENT_BYTES // 2, LATENT_BYTES])
    words = " ".join(f"word{word}" for word in random.integers(0, 500, int(random.integers(8, 30))))
    return Row(
        key_of(number),
        words,
        mean.reshape(LATENT),
        logvar.reshape(LATENT),
        tokens.reshape(TOKENS),
        int(random.integers(1, TOKENS[0] + 1)),
    )


def rows(start: int, stop: int) -> Iterator[Row]:
    """Rows `start` to `stop` - 1."""
    return map(row, range(start, stop))
