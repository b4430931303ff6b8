"""The errors of the estimator on published rows that it was not fitted on, beside simpler methods.

``python -m isthmus.cost.fit --report`` prints what docs/cost.md quotes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np

from isthmus.cost.fit import Coefficients, fit, left_out
from isthmus.cost.rows import AT_SCALE, Row, published
from isthmus.cost.spread import QUANTILE_80, chip_spread, waiting, waiting_spread

Kind = Callable[[Row], object]
LEFT_OUT: dict[str, Kind] = {
    "one row": id,
    "one submitter": lambda row: row.submitter,
    "one GPU type": lambda row: row.gpu.chip,
}
NONE = float("nan")
"""The error of a method that has nothing to say of a row."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Median absolute relative errors of images/s per GPU on left-out MLPerf rows; NaN where a method says nothing."""

    below: float
    """Of rows with fewer than AT_SCALE GPUs."""
    at_scale: float


def physics(rows: Sequence[Row], kind: Kind) -> list[float]:
    """Log of published over predicted images/s of every row, without its kind: the estimator."""
    return left_out(rows, kind)


def median(rows: Sequence[Row], kind: Kind) -> list[float]:
    """The same of the trivial baseline: the median of the GPU type, with this model and resolution."""

    def predict(train: Sequence[Row], row: Row) -> float:
        alike = [_rate(other) for other in train if _group(other) == _group(row)]
        return float(np.median(alike)) if alike else NONE

    return _each(rows, kind, predict)


def loglinear(rows: Sequence[Row], kind: Kind) -> list[float]:
    """The same of least squares of log images/s per GPU: one level a group as above, slopes in log GPUs and log batch."""

    def predict(train: Sequence[Row], row: Row) -> float:
        groups = sorted({_group(other) for other in train})
        if _group(row) not in groups:
            return NONE
        design = np.array([_design(other, groups) for other in train])
        found, *_ = np.linalg.lstsq(design, np.array([_rate(other) for other in train]), rcond=None)
        return float(np.array(_design(row, groups)) @ found)

    return _each(rows, kind, predict)


def _rate(row: Row) -> float:
    return log(row.images_per_s / row.gpus)


def _group(row: Row) -> str:
    return f"{row.gpu.name} {row.model} {row.resolution}"


def _design(row: Row, groups: Sequence[str]) -> list[float]:
    return [*(float(_group(row) == group) for group in groups), log(row.gpus), log(row.batch)]


def _each(rows: Sequence[Row], kind: Kind, predict: Callable[[Sequence[Row], Row], float]) -> list[float]:
    train = {kind(row): [other for other in rows if kind(other) != kind(row)] for row in rows}
    return [_rate(row) - predict(train[kind(row)], row) for row in rows]


METHODS = {"estimator": physics, "median of the GPU type": median, "log-linear": loglinear}


def errors(rows: Sequence[Row], logs: Sequence[float]) -> Errors:
    """Summary over MLPerf's rows. A method that is silent on more than half of them has no median."""

    def middle(at_scale: bool) -> float:
        found = [
            abs(exp(-error) - 1)
            for row, error in zip(rows, logs, strict=True)
            if row.at_scale == at_scale and benchmark(row)
        ]
        known = [error for error in found if error == error]
        return float(np.median(known)) if 2 * len(known) > len(found) else NONE

    return Errors(middle(False), middle(True))


def benchmark(row: Row) -> bool:
    """Whether a row is MLPerf's: the others were not measured to one set of rules."""
    return row.publication.startswith("MLPerf")


def coverage(rows: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
    """By scale: the share of left-out MLPerf rows within the interval that is made without them, that interval's mean
    half-width, and its mean interval score, in units of the published rate (lower is better)."""
    logs, found = left_out(rows, id), fit(rows)
    figures: dict[bool, list[tuple[bool, float, float]]] = {False: [], True: []}
    for row, error in zip(rows, logs, strict=True):
        if benchmark(row):
            half = QUANTILE_80 * _spread_without(row, rows, logs, found)
            figures[row.at_scale].append((abs(error) <= half, half, interval_score(error, half)))
    means = {scale: np.mean(np.array(of, dtype=float), axis=0) for scale, of in figures.items()}
    return {
        name: (float(means[scale][0]), float(means[scale][1]), float(means[scale][2]))
        for name, scale in ((f"below {AT_SCALE} GPUs", False), (f"{AT_SCALE} and more", True))
    }


def _spread_without(row: Row, rows: Sequence[Row], logs: Any, found: Coefficients) -> float:
    chips = {chip: chip_spread(rows, logs, chip, without=row) for chip in found.chips}
    scale = waiting_spread(rows, logs, found, chips, without=row)
    return sqrt(chips[row.gpu.chip] ** 2 + (scale * waiting(row, found)) ** 2)


def interval_score(error: float, half: float, alpha: float = 0.2) -> float:
    """Gneiting and Raftery's score of [rate / e^half, rate x e^half], over the published rate."""
    truth, low, high = exp(error), exp(-half), exp(half)
    missed = max(low - truth, 0.0) + max(truth - high, 0.0)
    return (high - low + 2 / alpha * missed) / truth


def report() -> str:
    """The tables, as Markdown."""
    rows = published()
    lines = [
        f"Median absolute error of images/s per GPU on left-out MLPerf rows ({sum(map(benchmark, rows))} rows):",
        "",
        f"| left out | method | below {AT_SCALE} GPUs | {AT_SCALE} and more |",
        "| --- | --- | --- | --- |",
    ]
    for name, kind in LEFT_OUT.items():
        for method, predict in METHODS.items():
            found = errors(rows, predict(rows, kind))
            lines.append(f"| {name} | {method} | {_percent(found.below)} | {_percent(found.at_scale)} |")
    by_type = left_out(rows, LEFT_OUT["one GPU type"])
    by_row = left_out(rows, id)
    lines += ["", "By GPU type, all rows:", ""]
    lines += ["| GPU | rows | left out: one row | left out: the GPU type |", "| --- | --- | --- | --- |"]
    for chip in sorted({row.gpu.chip for row in rows}):
        own = [index for index, row in enumerate(rows) if row.gpu.chip == chip]
        one, whole = (float(np.median([abs(exp(-of[i]) - 1) for i in own])) for of in (by_row, by_type))
        lines.append(f"| {chip} | {len(own)} | {_percent(one)} | {_percent(whole)} |")
    lines += ["", "| 80 % interval, made without the row | covers | half-width | interval score |"]
    lines += ["| --- | --- | --- | --- |"]
    for scale, (covers, half, score) in coverage(rows).items():
        lines.append(f"| {scale} | {_percent(covers)} | {_percent(half)} | {score:.2f} |")
    return "\n".join(lines)


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %") if value == value else "-"
