"""From many rows to what a chart of a few hundred pixels can show, without hiding a spike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.core.report.text import MINUS, finite, scientific, short

Floats = NDArray[np.float64]
RAW_POINTS = 800
BINS = 400


def column(rows: Sequence[Mapping[str, object]], name: str) -> Floats:
    """One field of the rows as float64; what is missing, junk or not finite is NaN."""
    values = (finite(row.get(name)) for row in rows)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Reduced:
    """A series of at most :data:`RAW_POINTS` points or :data:`BINS` bins, x ascending.

    `mean` has NaN where a bin holds no finite value. `low` and `high` are a bin's extremes; for a series
    that was short enough they equal `mean`, and `binned` is False.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    binned: bool
    rows_per_point: float
    group: NDArray[np.int64]


def reduce(x: Floats, y: Floats, group: NDArray[np.int64] | None = None) -> Reduced:
    """Bins a long series over x, keeping each bin's minimum, maximum and mean.

    Args:
        x: ascending, finite.
        y: may hold NaN.
        group: of each row; :func:`smooth` does not look across groups.
    """
    groups = np.zeros(len(x), dtype=np.int64) if group is None else group
    if len(x) <= RAW_POINTS:
        return Reduced(x, y, y, y, False, 1.0, groups)
    span = x[-1] - x[0]
    bins = np.minimum(((x - x[0]) / (span or 1.0) * BINS).astype(np.int64), BINS - 1)
    # A bin does not reach across groups either: at a stage's border the speed jumps.
    starts = np.flatnonzero(np.r_[True, (np.diff(bins) != 0) | (np.diff(groups) != 0)])
    known = np.isfinite(y)
    counts = np.add.reduceat(known.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(known, y, 0.0), starts)
    mean = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    middle = np.add.reduceat(x, starts) / np.diff(np.r_[starts, len(x)])
    return Reduced(
        middle,
        mean,
        np.fmin.reduceat(y, starts),
        np.fmax.reduceat(y, starts),
        True,
        len(x) / len(starts),
        groups[starts],
    )


def smooth(series: Reduced) -> tuple[Floats, int]:
    """Centred moving mean within each group (no lag, unlike an exponential one).

    Returns:
        The smoothed values, and the rows that one averages; 1 when the series is too short to smooth.
    """
    window = len(series.mean) // 40 | 1
    if window < 3:
        return series.mean, 1
    smoothed = np.full(len(series.mean), np.nan)
    for group in np.unique(series.group):
        at = np.flatnonzero(series.group == group)
        for place, index in enumerate(at):
            # Symmetric up to the ends: a window that is cut on one side would bend the line there.
            reach = min(window // 2, place, len(at) - 1 - place)
            values = series.mean[at[place - reach] : at[place + reach] + 1]
            known = values[np.isfinite(values)]
            if np.isfinite(series.mean[index]):
                smoothed[index] = known.mean()
    return smoothed, round(window * series.rows_per_point)


def extent(arrays: Sequence[Floats], *, zero: bool = False) -> tuple[float, float, bool]:
    """The range of y to show: all of it, but for the outermost 0.5 % at each end of a long, spiky series.

    Returns:
        low, high, and whether something lies outside.
    """
    known = [array[np.isfinite(array)] for array in arrays]
    values = np.concatenate(known) if known else np.empty(0)
    if not len(values):
        return 0.0, 1.0, False
    low, high = float(values.min()), float(values.max())
    cut = False
    if len(values) >= 100:
        inner_low, inner_high = (float(v) for v in np.percentile(values, [0.5, 99.5]))
        inner = inner_high - inner_low
        if high - inner_high > 0.5 * inner:
            high, cut = inner_high + 0.1 * inner, True
        if inner_low - low > 0.5 * inner and not zero:
            low, cut = inner_low - 0.1 * inner, True
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        pad = abs(low) * 0.05 or 0.5
        low, high = (low if zero and low == 0 else low - pad), high + pad
    return low, high, cut


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 round numbers that span [low, high]; the first is <= low, the last >= high."""
    step = tick_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within [low, high]; powers alone when those would be more than seven.

    Evenly spaced round numbers when those would be fewer than three.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [float(f"{nice}e{power}") for power in powers for nice in (1, 2, 5)]
    inside = [value for value in fine if low <= value <= high]
    if len(inside) < 3:
        return inner_ticks(low, high, 4)
    if len(inside) <= 7:
        return inside
    every = -(-len(powers) // 7)
    return [value for power in powers[::every] if low <= (value := float(f"1e{power}")) <= high]


def inner_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within [low, high], for an axis that ends where the data end."""
    step = tick_step((high - low) / most)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def tick_step(rough: float) -> float:
    """The round number (1, 2, 2.5 or 5 times a power of ten) at or above `rough`."""
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough * (1 - 1e-9))


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels with the same number of decimals: 0.25, 0.50; 10k, 20k; 2e-5, 4e-5."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest >= 1e4:
        return [short(value).replace("-", MINUS) for value in values]
    if 0 < largest < 1e-2:
        return [scientific(value) if value else "0" for value in values]
    step = abs(values[1] - values[0]) if len(values) > 1 else 1.0
    decimals = 0
    while decimals < 6 and abs(round(step, decimals) - step) > 1e-9 * max(step, 1e-9):
        decimals += 1
    return [f"{value + 0.0:,.{decimals}f}".replace("-", MINUS) for value in values]
