"""The hash that is kept of a picture is the same bits, however a machine orders its sums."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("PIL")

from isthmus.core.encode.hashes import SIDE, _resample_whole, _weights

SCRIPT = """
import hashlib
import numpy as np
from PIL import Image
from isthmus.core.encode.hashes import picture_fields
chance, digest = np.random.default_rng(0), hashlib.sha256()
for at in range(1200):
    size = [(48, 24), (24, 48), (40, 24), (32, 32), (24, 24), (64, 48)][at % 6]
    picture = chance.integers(0, 256, (*size, 3), dtype=np.uint8)
    digest.update(repr(picture_fields(Image.fromarray(picture))).encode())
print(digest.hexdigest())
"""


def test_other_processors_find_the_same_bits() -> None:
    """OpenBLAS has kernels for each; their sums of floats differ in the last place."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "OPENBLAS_CORETYPE": kind},
            capture_output=True, text=True, check=True,
        ).stdout
        for kind in ("Sandybridge", "Haswell")
    }  # fmt: skip
    assert len(digests) == 1


def test_small_pictures_are_resampled_without_rounding_in_between() -> None:
    picture = np.random.default_rng(1).integers(0, 256, (24, 40, 3))
    found = _resample_whole(picture)
    rows, columns = (
        [[Fraction(round(float(w) * 4096)) for w in row] for row in _weights(given, SIDE)]
        for given in (24, 40)
    )
    for y, x in ((0, 0), (3, 30), (17, 5), (31, 31)):
        weight = sum(rows[y]) * sum(columns[x])
        for channel in range(3):
            total = sum(
                rows[y][h] * columns[x][w] * int(picture[h, w, channel])
                for h in range(24)
                for w in range(40)
                if rows[y][h] and columns[x][w]
            )
            assert found[y, x, channel] == (total / weight + Fraction(1, 2)) // 1
