"""Line charts as plain HTML and SVG.

The SVG is stretched over its frame (lines keep their width), labels are HTML around it, so that text is
as sharp and as large at 400 px as at 1280. Values under the pointer come from CSS alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from isthmus.core.report.series import Floats, Reduced, extent, inner_ticks, log_ticks, tick_labels, ticks
from isthmus.core.report.text import escape, figure, short

_HOVER_COLUMNS = 96
_LOG_FROM = 3.0  # times between the ends of y
_UNITS = 1000.0  # of the SVG's own coordinates, both ways
MarkKind = Literal["attempt", "alarm", "bad"]
_MARK_NAMES: dict[MarkKind, str] = {"attempt": "resumed", "alarm": "alarm", "bad": "loss not finite"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, and the band of what it sums up."""

    label: str
    x: Floats
    y: Floats
    colour: str
    """A class of the style sheet, `c0` to `c5`, or `s0` to `s15` of the ordered ramp."""
    band: tuple[Floats, Floats] | None = None
    faint: bool = False
    """Background to another line: drawn thin, not shown in the legend or under the pointer."""


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of the x axis: a training stage."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What to draw. x is ascending in every line."""

    title: str
    unit: str = ""
    lines: Sequence[Line]
    x_unit: str = "step"
    x_value: Callable[[float], str] = "{:,.0f}".format
    """How an x under the pointer is written."""
    x_range: tuple[float, float] | None = None
    from_zero: bool = False
    log: bool = False
    """A logarithmic y axis where the values span enough and are all above zero."""
    top: float | None = None
    """A fixed upper end of y, such as 100 for a percentage."""
    bounds: Sequence[tuple[float, str]] = ()
    """Horizontal thresholds with their labels."""
    marks: Sequence[tuple[float, MarkKind]] = ()
    spans: Sequence[Span] = ()
    note: str = ""
    wide: bool = False
    ramp: tuple[str, str] | None = None
    """Labels of the two ends of the ordered ramp, instead of a legend entry for each line."""
    extra: str = field(default="")
    """HTML under the chart, already escaped."""


def of_series(label: str, series: Reduced, smoothed: Floats, window: int, colour: str) -> list[Line]:
    """A series as faint raw values (or the band of their extremes) under its moving mean."""
    if window <= 1 and not series.binned:
        return [Line(label, series.x, series.mean, colour)]
    name = f"mean of {short(window)} steps"
    if series.binned:
        return [Line(name, series.x, smoothed, colour, band=(series.low, series.high))]
    return [
        Line(label, series.x, series.mean, colour, faint=True),
        Line(name, series.x, smoothed, colour),
    ]


def render(chart: Chart) -> str:
    """The chart as HTML; an empty string when there is no finite value to show."""
    lines = [line for line in chart.lines if np.isfinite(line.y).any()]
    if not lines:
        return ""
    x_low, x_high = chart.x_range or _x_range(lines)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    shown = [line.y for line in lines] + [edge for line in lines for edge in line.band or ()]
    low, high, cut = extent([*shown, np.array([bound for bound, _ in chart.bounds])], zero=chart.from_zero)
    log = chart.log and low > 0 and high / low >= _LOG_FROM
    if log:
        low, high = low / 1.06, high * 1.06
    y_ticks = log_ticks(low, high) if log else ticks(low, max(high, chart.top or high), 4)
    frame = _Frame(x_low, x_high, low if log else y_ticks[0], high if log else y_ticks[-1], log)
    notes = [chart.note] if chart.note else []
    if cut:
        notes.append("The y axis leaves out the outermost 0.5 % of the values.")
    labels = [short(value) for value in y_ticks] if log else tick_labels(y_ticks)
    width = max(len(label) for label in labels)
    unit = "logarithmic" if log and not chart.unit else chart.unit
    name = f"{chart.title}{f' in {chart.unit}' if chart.unit else ''}"
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}">'
        f"<figcaption><h3>{escape(chart.title)}</h3>"
        + (f'<span class="unit">{escape(unit)}</span>' if unit else "")
        + _legend(chart, lines)
        + f'</figcaption><div class="frame" style="--yw:{max(width, 3) + 1}ch">'
        + _spans(chart.spans, frame)
        + '<div class="ys" aria-hidden="true">'
        + "".join(
            f'<span style="bottom:{100 - frame.y(value) / 10:.2f}%">{label}</span>'
            for value, label in zip(y_ticks, labels, strict=True)
        )
        + f'</div><div class="plot"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">'
        + "".join(f'<path class="grid" d="M0 {frame.y(value):.1f}H1000"/>' for value in y_ticks)
        + _svg_marks(chart, frame)
        + "".join(_band(line, frame) for line in lines)
        + "".join(_path(line, frame) for line in lines)
        + "".join(f'<path class="bound" d="M0 {frame.y(bound):.1f}H1000"/>' for bound, _ in chart.bounds)
        + "</svg>"
        + "".join(
            f'<span class="bound-label{_side(bound, lines)}" style="bottom:{100 - frame.y(bound) / 10:.2f}%">'
            f"{escape(label)}</span>"
            for bound, label in chart.bounds
        )
        + _hover(chart, lines, frame)
        + '</div><div class="xs" aria-hidden="true">'
        + _x_labels(frame)
        + f'</div><div class="x-unit">{escape(chart.x_unit)}</div></div>'
        + (f'<p class="note">{escape(" ".join(notes))}</p>' if notes else "")
        + chart.extra
        + "</figure>"
    )


def _side(bound: float, lines: Sequence[Line]) -> str:
    """A threshold's label goes to the side of it where the lines do not end."""
    ends = np.concatenate([line.y[-max(1, len(line.y) // 6) :] for line in lines])
    ends = ends[np.isfinite(ends)]
    return " below" if len(ends) and float(ends.mean()) >= bound else ""


@dataclass(frozen=True, slots=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool = False

    def x(self, value: float) -> float:
        return (value - self.x_low) / (self.x_high - self.x_low) * _UNITS

    def y(self, value: float) -> float:
        """Downwards, kept near the frame: renderers do not like coordinates of 1e30."""
        if self.log:
            share = 1 - math.log(max(value, 1e-300) / self.y_low) / math.log(self.y_high / self.y_low)
        else:
            share = 1 - (value - self.y_low) / (self.y_high - self.y_low)
        return min(max(share, -1.0), 2.0) * _UNITS


def _x_range(lines: Sequence[Line]) -> tuple[float, float]:
    return min(float(line.x[0]) for line in lines), max(float(line.x[-1]) for line in lines)


def _runs(line: Line) -> list[tuple[int, int]]:
    """[start, end) of each stretch without a gap."""
    known = np.isfinite(line.y).astype(np.int8)
    edges = np.diff(np.r_[0, known, 0])
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))


def _points(x: Floats, y: Floats, frame: _Frame) -> str:
    return " ".join(f"{frame.x(a):.1f} {frame.y(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _path(line: Line, frame: _Frame) -> str:
    strokes, dots = [], []
    for start, end in _runs(line):
        if end - start == 1:
            # A line of no length with round caps: a dot that stays round when the SVG is stretched.
            dots.append(f"M{frame.x(float(line.x[start])):.1f} {frame.y(float(line.y[start])):.1f}h.01")
        else:
            strokes.append("M" + _points(line.x[start:end], line.y[start:end], frame))
    look = f"line {line.colour}{' faint' if line.faint else ''}"
    return (f'<path class="{look}" d="{"".join(strokes)}"/>' if strokes else "") + (
        f'<path class="{look} dot" d="{"".join(dots)}"/>' if dots else ""
    )


def _band(line: Line, frame: _Frame) -> str:
    if line.band is None:
        return ""
    low, high = line.band
    parts = []
    for start, end in _runs(line):
        x = line.x[start:end]
        parts.append(
            f"M{_points(x, high[start:end], frame)} {_points(x[::-1], low[start:end][::-1], frame)}Z"
        )
    return f'<path class="band {line.colour}" d="{"".join(parts)}"/>'


def _svg_marks(chart: Chart, frame: _Frame) -> str:
    shapes: dict[MarkKind, list[str]] = {}
    for at, kind in chart.marks:
        # Full height for a restart; a tick at an edge for what may come often.
        stroke = {"attempt": "0V1000", "alarm": "1000V940", "bad": "0V60"}[kind]
        shapes.setdefault(kind, []).append(f"M{frame.x(at):.1f} {stroke}")
    borders = "".join(f"M{frame.x(span.start):.1f} 0V1000" for span in chart.spans[1:])
    return (f'<path class="border" d="{borders}"/>' if borders else "") + "".join(
        f'<path class="mark {kind}" d="{"".join(strokes)}"/>' for kind, strokes in shapes.items()
    )


def _spans(spans: Sequence[Span], frame: _Frame) -> str:
    if not spans:
        return ""
    blocks = []
    for span in spans:
        start, end = max(0.0, frame.x(span.start) / 10), min(100.0, frame.x(span.end) / 10)
        label = escape(span.label, 60)
        blocks.append(
            f'<span title="{label}" style="left:{start:.2f}%;width:{end - start:.2f}%">{label}</span>'
        )
    return f'<div class="spans">{"".join(blocks)}</div>'


def _legend(chart: Chart, lines: Sequence[Line]) -> str:
    entries = []
    if chart.ramp:
        swatches = "".join(f'<i class="swatch {line.colour}"></i>' for line in lines)
        entries.append(f'<span class="ramp">{escape(chart.ramp[0])}{swatches}{escape(chart.ramp[1])}</span>')
    else:
        named = [line for line in lines if not line.faint]
        if len(named) > 1 or named[0].band is not None or len(named) < len(lines):
            entries += [
                f'<span><i class="swatch {line.colour}"></i>{escape(line.label, 80)}</span>' for line in named
            ]
        if any(line.band is not None for line in lines):
            entries.append('<span><i class="swatch band c0"></i>range</span>')
    for kind, name in _MARK_NAMES.items():
        count = sum(1 for _, other in chart.marks if other == kind)
        if count:
            entries.append(
                f'<span><i class="key {kind}"></i>{name}{f" ({count})" if count > 1 else ""}</span>'
            )
    return f'<span class="legend">{"".join(entries)}</span>' if entries else ""


def _x_labels(frame: _Frame) -> str:
    values = inner_ticks(frame.x_low, frame.x_high, 6)
    labels = []
    for value, label in zip(values, tick_labels(values), strict=True):
        at = frame.x(value) / 10
        edge = " start" if at < 4 else " end" if at > 96 else ""
        labels.append(f'<span class="tick{edge}" style="left:{at:.2f}%">{label}</span>')
    return "".join(labels)


def _hover(chart: Chart, lines: Sequence[Line], frame: _Frame) -> str:
    """Invisible columns that show the values at their place while the pointer is over them."""
    told = [line for line in lines if not line.faint] or list(lines)
    longest = max(told, key=lambda line: len(line.x))
    count = min(_HOVER_COLUMNS, len(longest.x))
    picks = np.unique(np.linspace(0, len(longest.x) - 1, count).round().astype(np.int64))
    at = longest.x[picks]
    edges = np.r_[frame.x_low, (at[1:] + at[:-1]) / 2, frame.x_high]
    reach = float(np.max(np.diff(edges)))
    columns = []
    for index, x in enumerate(at.tolist()):
        values = _values_at(told, x, reach, chart.unit)
        if not values:
            continue
        left, right = frame.x(float(edges[index])) / 10, frame.x(float(edges[index + 1])) / 10
        side = ' class="r"' if left > 50 else ""
        head = f"{chart.x_unit} {chart.x_value(x)}" if chart.x_unit == "step" else chart.x_value(x)
        columns.append(
            f'<i{side} style="left:{left:.2f}%;width:{right - left:.2f}%">'
            f'<s style="left:{(frame.x(x) / 10 - left) / max(right - left, 1e-9):.0%}"></s>'
            f"<b>{escape(head)}\n{escape(chr(10).join(values))}</b></i>"
        )
    return f'<div class="hover" aria-hidden="true">{"".join(columns)}</div>'


def _values_at(lines: Sequence[Line], x: float, reach: float, unit: str) -> list[str]:
    values = []
    for line in lines:
        nearest = int(np.argmin(np.abs(line.x - x)))
        value = float(line.y[nearest])
        if math.isfinite(value) and abs(float(line.x[nearest]) - x) <= reach:
            text = f"{figure(value)} {unit}".rstrip()
            if line.band is not None:
                text += (
                    f"  ({figure(float(line.band[0][nearest]))} to {figure(float(line.band[1][nearest]))})"
                )
            values.append(f"{line.label}: {text}" if len(lines) > 1 else text)
    return values
