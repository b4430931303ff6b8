"""The charts over time: what the nodes measured of themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isthmus.core.report.charts import Chart, Line, MarkKind
from isthmus.core.report.collect import Row, RunData
from isthmus.core.report.series import Floats, column, reduce, smooth
from isthmus.core.report.text import figure, finite, short

_LINES = 6
"""More nodes than this are drawn as their mean and range."""
_GRID = 300


@dataclass(frozen=True, slots=True)
class _Metric:
    title: str
    unit: str
    of: Callable[[list[Row]], Floats]
    monitor: str | None = None
    top: float | None = None
    from_zero: bool = True


def _field(name: str, divisor: float = 1.0) -> Callable[[list[Row]], Floats]:
    return lambda rows: column(rows, name) / divisor


def _kilowatts(rows: list[Row]) -> Floats:
    """Mean power between rows: a row's energy is of the time since the one before."""
    elapsed = np.diff(column(rows, "time"), prepend=np.nan)
    energy = column(rows, "gpu_energy_kilojoules")
    power: Floats = np.divide(energy, elapsed, out=np.full(len(rows), np.nan), where=elapsed > 0)
    return power


_METRICS = (
    _Metric(
        "GPU utilization", "% busy, mean of GPUs", _field("gpu_utilization"), "gpu_utilization", 100, False
    ),
    _Metric("GPU memory", "% used, mean of GPUs", _field("gpu_memory"), "gpu_memory", 100, False),
    _Metric("GPU power", "kW, all GPUs of a node", _kilowatts),
    _Metric("Fabric", "GB/s received", _field("fabric_gigabytes_per_s"), "fabric_gigabytes_per_s"),
    _Metric("CPU", "% busy", _field("cpu_percent"), top=100),
    _Metric("Memory", "% used", _field("memory_used_percent"), top=100),
    _Metric("Free disk", "GB", _field("disk_free_bytes", 1e9)),
)


def system_charts(data: RunData) -> list[Chart]:
    """One chart for each metric that was measured, over the time since the run began."""
    nodes = {node: rows for node, rows in data.system.items() if rows}
    if not nodes:
        return []
    first = min(float(rows[0]["time"]) for rows in nodes.values())
    last = max(float(rows[-1]["time"]) for rows in nodes.values())
    unit, seconds = _time_unit(last - first)
    x_range = (0.0, (last - first) / seconds)
    charts = []
    for metric in _METRICS:
        series = {
            node: _with_gaps((column(rows, "time") - first) / seconds, metric.of(rows))
            for node, rows in nodes.items()
        }
        lines = _lines(series, x_range)
        bounds: list[tuple[float, str]] = []
        threshold = data.section("monitor", metric.monitor) if metric.monitor else {}
        for side in ("min", "max"):
            bound = finite(threshold.get(side))
            if bound is not None:
                bounds.append((bound, f"{side} {short(bound)}"))
        marks: list[tuple[float, MarkKind]] = [
            ((time - first) / seconds, "alarm")
            for event in data.events
            if event.get("type") == "alarm"
            and metric.monitor is not None
            and event.get("metric") == metric.monitor
            and (time := finite(event.get("time"))) is not None
            and first <= time <= last
        ]
        charts.append(
            Chart(
                title=metric.title,
                unit=metric.unit,
                lines=lines,
                x_unit=f"{unit} since the first reading",
                x_value=lambda x: f"{figure(x, 3)} {unit}",
                x_range=x_range,
                from_zero=metric.from_zero,
                top=metric.top,
                bounds=bounds,
                marks=marks,
                note=_outlier(series, metric),
            )
        )
    return charts


def energy_kilowatt_hours(data: RunData) -> float | None:
    """Of all GPUs of all nodes; None when no node measured it."""
    columns = [column(rows, "gpu_energy_kilojoules") for rows in data.system.values()]
    known = [values[np.isfinite(values)] for values in columns]
    return math.fsum(v for values in known for v in values.tolist()) / 3600 if any(map(len, known)) else None


def _time_unit(span: float) -> tuple[str, float]:
    if span >= 3 * 86400:
        return "days", 86400
    if span >= 2 * 3600:
        return "hours", 3600
    return ("minutes", 60) if span >= 180 else ("seconds", 1)


def _with_gaps(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """A NaN in each pause (a restart, a lost node), so that no line is drawn through it."""
    if len(x) < 3:
        return x, y
    steps = np.diff(x)
    pauses = np.flatnonzero(steps > 5 * np.median(steps)) + 1
    return np.insert(x, pauses, (x[pauses - 1] + x[pauses]) / 2), np.insert(y, pauses, np.nan)


def _lines(series: dict[int, tuple[Floats, Floats]], x_range: tuple[float, float]) -> list[Line]:
    if len(series) <= _LINES:
        lines = []
        for index, (node, (x, y)) in enumerate(series.items()):
            reduced = reduce(x, y)
            values = smooth(reduced)[0] if reduced.binned else reduced.mean
            lines.append(Line(f"node {node}", reduced.x, values, f"c{index}"))
        return lines
    # Cells wide enough to hold two readings of each node, so that an empty one is a pause.
    cells = max(1, min(_GRID, min(len(x) for x, _ in series.values()) // 2))
    edges = np.linspace(*x_range, cells + 1)
    grid = np.full((len(series), cells), np.nan)
    for row, (x, y) in enumerate(series.values()):
        cell = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, cells - 1)
        known = np.isfinite(y)
        counts = np.bincount(cell[known], minlength=cells)
        sums = np.bincount(cell[known], weights=y[known], minlength=cells)
        grid[row] = np.divide(sums, counts, out=grid[row], where=counts > 0)
    some = np.isfinite(grid).any(axis=0)
    if not some.any():
        return []
    seen = grid[:, some]
    middle = ((edges[1:] + edges[:-1]) / 2)[some]
    x, mean = _with_gaps(middle, np.nanmean(seen, axis=0))
    low, high = (_with_gaps(middle, edge)[1] for edge in (np.nanmin(seen, axis=0), np.nanmax(seen, axis=0)))
    return [Line(f"mean of {len(series)} nodes", x, mean, "c0", band=(low, high))]


def _outlier(series: dict[int, tuple[Floats, Floats]], metric: _Metric) -> str:
    """The node that stands apart, when there are too many to tell from the lines."""
    if len(series) <= _LINES or metric.monitor is None:
        return ""
    means = {node: float(np.nanmean(y)) for node, (_, y) in series.items() if np.isfinite(y).any()}
    if not means:
        return ""
    low = min(means, key=means.__getitem__)
    return f"Lowest over the run: node {low}, mean {short(round(means[low], 2))}."
