"""The charts of how the data was read: all ranks' loaders, from the rows of kind `data`."""

from __future__ import annotations

import numpy as np

from isthmus.core.report.charts import Chart, Line
from isthmus.core.report.collect import RunData
from isthmus.core.report.series import Floats, column, reduce
from isthmus.core.report.text import short
from isthmus.core.report.training import Training

_COUNTS = ("retries", "throttled", "hedged", "cache_hits", "cache_misses")


def reading_charts(data: RunData, training: Training) -> list[Chart]:
    """Bytes a second, block latency and the longest wait of a rank; none when nothing was read through a loader."""
    rows = data.reading
    if not rows:
        return []
    step = column(rows, "step")
    seconds = column(rows, "seconds")
    wait = np.divide(100 * column(rows, "wait_s"), seconds, out=np.full(len(rows), np.nan), where=seconds > 0)
    x_range = (0.0, float(max(step[-1], *training.step[-1:])))
    spans = training.spans()

    def line(label: str, y: Floats, colour: str) -> Line:
        series = reduce(step, y)
        return Line(
            label, series.x, series.mean, colour, band=(series.low, series.high) if series.binned else None
        )

    return [
        Chart(
            title="Data read",
            unit="MB/s, all ranks",
            lines=[line("read", column(rows, "megabytes_per_s"), "c0")],
            spans=spans,
            x_range=x_range,
            from_zero=True,
            note=_counts(data),
        ),
        Chart(
            title="Read latency",
            unit="ms",
            lines=[
                line("half of the reads", 1000 * column(rows, "latency_p50_s"), "c0"),
                line("99 %", 1000 * column(rows, "latency_p99_s"), "c1"),
            ],
            spans=spans,
            x_range=x_range,
            log=True,
        ),
        Chart(
            title="Longest data wait of a rank",
            unit="% of the interval",
            lines=[line("wait", wait, "c0")],
            spans=spans,
            x_range=x_range,
            from_zero=True,
        ),
    ]


def _counts(data: RunData) -> str:
    """What was not smooth, in a line: `12 retries, 3 throttled`."""
    sums = {name: float(np.nansum(column(data.reading, name))) for name in _COUNTS}
    told = [f"{short(count)} {name.replace('_', ' ')}" for name, count in sums.items() if count]
    return f"In all: {', '.join(told)}." if told else "No request had to be tried again."
