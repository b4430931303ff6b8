"""How far published rows lie from predictions that were made without them: what the stated intervals are made of.

The variance of a prediction's logarithm is that of the chip (same machine, another submitter or release), plus one
that grows with the share of the step in which the GPU does not compute, plus one for each thing that no row shows:
the chip, the family, or the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isthmus.cost.fit import CHIP, NOISE, NOISE_AT_SCALE, Coefficients, left_out
from isthmus.cost.rows import Row

QUANTILE_80 = 1.2816
"""Half-width of the central 80 % of a normal distribution, in standard deviations."""
PRIOR_ROWS = 2
"""Rows' worth of NOISE with which a chip's own variance is pooled."""


def spreads(rows: Sequence[Row], found: Coefficients) -> dict[str, Any]:
    """Standard deviations of log images/s, from rows left out one by one and by kind."""
    errors = np.array(left_out(rows, id))
    chips = {chip: chip_spread(rows, errors, chip) for chip in found.chips}
    by_chip = left_out(rows, lambda row: row.gpu.chip)
    medians = [
        float(np.median([error for row, error in zip(rows, by_chip, strict=True) if row.gpu.chip == chip]))
        for chip in found.chips
    ]
    return {
        "chip": chips,
        "waiting": waiting_spread(rows, errors, found, chips),
        "unseen_chip": float(np.sqrt(np.mean(np.square(medians)))),
        "unseen_family": _family_spread(found),
        "unseen_pair": _pair_spread(rows),
    }


def chip_spread(rows: Sequence[Row], errors: Any, chip: str, without: Row | None = None) -> float:
    """Of one chip: of its rows below `AT_SCALE`, pooled with what any chip has, and what its factor may be off by."""
    own = [
        error
        for row, error in zip(rows, errors, strict=True)
        if row.gpu.chip == chip and not row.at_scale and row is not without
    ]
    total = PRIOR_ROWS * NOISE**2 + float(np.sum(np.square(own)))
    # The posterior of a factor with a normal prior: one row at scale tells little of a chip.
    seen = [
        (NOISE_AT_SCALE if row.at_scale else NOISE) ** -2
        for row in rows
        if row.gpu.chip == chip and row is not without
    ]
    factor = 1 / (CHIP[1] ** -2 + sum(seen))
    return float(np.sqrt(total / (PRIOR_ROWS + len(own)) + factor))


def waiting_spread(
    rows: Sequence[Row], errors: Any, found: Coefficients, chips: dict[str, float], without: Row | None = None
) -> float:
    """Per share of the step that is no computation: the least with which four of five rows at scale lie within."""
    needed = []
    for row, error in zip(rows, errors, strict=True):
        if row.at_scale and row is not without:
            missing = (abs(error) / QUANTILE_80) ** 2 - chips[row.gpu.chip] ** 2
            needed.append(np.sqrt(max(0.0, missing)) / waiting(row, found))
    # Of n rows left out, the one below which a new one falls with 80 %: no lower than (n + 1) x 0.8.
    needed.sort()
    return float(needed[min(len(needed) - 1, int(np.ceil(0.8 * (len(needed) + 1))) - 1)])


def waiting(row: Row, found: Coefficients) -> float:
    """The share of a row's step, as predicted, in which the GPU does not compute."""
    step, compute = found.step_seconds(row)
    return 1 - compute / step


def _family_spread(found: Coefficients) -> float:
    # Two families with rows tell little; their factors are all there is.
    return float(np.sqrt(np.mean(np.square(np.log(list(found.families.values()))))))


def _pair_spread(rows: Sequence[Row]) -> float:
    """Of a chip with a family when both have rows, but not together."""
    errors = left_out(rows, lambda row: (row.gpu.chip, row.family))
    kinds: dict[tuple[str, str], list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        if len({other.family for other in rows if other.gpu.chip == row.gpu.chip}) > 1:
            kinds.setdefault((row.gpu.chip, row.family), []).append(error)
    return float(np.sqrt(np.mean([np.median(found) ** 2 for found in kinds.values()])))
