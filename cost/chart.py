"""Charts of costs: a run by its lines and by its number of nodes; a comparison by dollars and hours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.summary import admitted_world_sizes
from isthmus.cost.drawing import Circle, Drawing, Polyline, Rect, Text, log_ticks, nice_ticks
from isthmus.cost.estimate import Estimate
from isthmus.cost.table import amount, dollars

INK, MUTED, GRID = "#1b1f24", "#5b636e", "#e3e6ea"
COLOURS = {"azure": "#0072b2", "sagemaker": "#d55e00"}
"""Of backends; Okabe and Ito's palette, as in the reports of runs."""
OTHER = "#00805f"
_LOG_FROM = 6.0  # times between the ends of an axis
_BARS = ("#0072b2", "#56b4e9", "#00805f", "#b0578d", "#d55e00", "#8a6d00", "#333b46")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtNodes:
    """The same run on another number of nodes."""

    nodes: int
    usd: float | None
    hours: float
    node_hours: float


def node_counts(recipe: Recipe, gpus_per_node: int, most: int = 12) -> list[int]:
    """Numbers of nodes that lanes and batches admit, ascending; of many, the largest."""
    sizes = [size for size in admitted_world_sizes(recipe) if size % gpus_per_node == 0]
    return [size // gpus_per_node for size in sizes][-most:]


def cost_chart(found: Estimate, sweep: Sequence[AtNodes]) -> Drawing:
    """Left: what is paid for. Right: cost and hours against the number of nodes, with what scaling loses."""
    drawing = Drawing(1080, 430, title=f"{found.recipe}: cost by line and by nodes")
    head = "unpriced" if found.usd is None else dollars(found.usd)
    drawing.add(
        Text(24, 32, f"{found.recipe}: {head}, {amount(found.hours)} h", INK, 17, bold=True),
        Text(24, 52, found.place.label, MUTED, 12),
    )
    _bars(drawing, found)
    _nodes(drawing, found, sweep)
    return drawing


def _bars(drawing: Drawing, found: Estimate) -> None:
    """A bar a line; stages of compute first."""
    price = found.place.usd_per_hour
    rows: list[tuple[str, float, str]] = []
    for line in found.lines:
        value = line.usd if price is not None else (line.quantity if line.unit == "node-hours" else None)
        if value is not None:
            name = line.name if line.group == "compute" else f"{line.group}: {line.name}"
            rows.append((name, value, line.group))
    rows.sort(key=lambda row: (row[2] != "compute", -row[1] if row[2] != "compute" else 0))
    rows = rows[:12]
    unit = "US dollars" if price is not None else "node-hours (unpriced)"
    left, top, width, step = 230, 92, 250, 26
    drawing.add(Text(24, 78, f"By line, {unit}", INK, 13, bold=True))
    most = max((value for _, value, _ in rows), default=1.0) or 1.0
    groups = list(dict.fromkeys(group for *_, group in rows))
    for index, (name, value, group) in enumerate(rows):
        y = top + index * step
        colour = _BARS[groups.index(group) % len(_BARS)]
        shown = name if len(name) <= 32 else f"{name[:31]}…"
        drawing.add(
            Text(left - 8, y + 13, shown, INK, 11.5, "end"),
            Rect(left, y, max(1.0, width * value / most), 17, colour),
            Text(
                left + max(1.0, width * value / most) + 6,
                y + 13,
                dollars(value) if price is not None else amount(value),
                MUTED,
                11.5,
            ),
        )


def _nodes(drawing: Drawing, found: Estimate, sweep: Sequence[AtNodes]) -> None:
    left, right, top, bottom = 650, 1010, 100, 356
    priced = found.place.usd_per_hour is not None
    drawing.add(Text(600, 78, "By number of nodes", INK, 13, bold=True))
    if len(sweep) < 2:
        drawing.add(Text(600, 100, "only one number of nodes is admitted by lanes and batches", MUTED))
        return
    cost = [(row.usd or 0.0) if priced else row.node_hours for row in sweep]
    ticks, hour_ticks = nice_ticks(max(cost), 4), nice_ticks(max(row.hours for row in sweep), 4)
    step = (right - left) / (len(sweep) - 1)

    def y(value: float, of: Sequence[float]) -> float:
        return bottom - (bottom - top) * value / of[-1]

    for tick in ticks:
        drawing.add(
            Polyline(((left, y(tick, ticks)), (right, y(tick, ticks))), GRID),
            Text(left - 8, y(tick, ticks) + 4, dollars(tick) if priced else amount(tick), MUTED, 11, "end"),
        )
    for tick in hour_ticks:
        drawing.add(Text(right + 8, y(tick, hour_ticks) + 4, f"{amount(tick)} h", MUTED, 11))
    # Without a loss, more nodes would cost what the fewest do.
    ideal = cost[0]
    drawing.add(
        Polyline(((left, y(ideal, ticks)), (right, y(ideal, ticks))), MUTED, 1, True),
        Polyline(tuple((left + i * step, y(value, ticks)) for i, value in enumerate(cost)), _BARS[0], 2.5),
        Polyline(
            tuple((left + i * step, y(row.hours, hour_ticks)) for i, row in enumerate(sweep)), _BARS[4], 2
        ),
    )
    for index, row in enumerate(sweep):
        x = left + index * step
        loss = cost[index] / ideal - 1
        here = row.nodes == found.place.nodes
        drawing.add(
            Circle(x, y(cost[index], ticks), 4, _BARS[0], f"{row.nodes} nodes: {loss:+.0%}", not here),
            Text(x, bottom + 18, str(row.nodes), INK if here else MUTED, 11, "middle", here),
            Text(x, bottom + 33, f"{loss:+.0%}", MUTED, 10, "middle"),
        )
    unit = "cost" if priced else "node-hours"
    drawing.add(
        Text(
            left,
            bottom + 52,
            f"nodes of {found.place.gpus_per_node} GPUs; below: {unit} over the fewest",
            MUTED,
            11,
        ),
        Rect(780, 68, 12, 12, _BARS[0]),
        Text(796, 78, unit, INK, 11.5),
        Rect(880, 68, 12, 12, _BARS[4]),
        Text(896, 78, "hours", INK, 11.5),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """An offer in a comparison's chart."""

    usd: float
    hours: float
    backend: str
    label: str
    pareto: bool


def scatter(dots: Sequence[Dot], title: str) -> Drawing:
    """Dollars against hours; the Pareto front joined by a line, the rest hollow."""
    drawing = Drawing(940, 420, title=title)
    left, right, top, bottom = 92, 910, 40, 362
    if not dots:
        drawing.add(Text(left, 80, "nobody prices any of these offers", MUTED, 14))
        return drawing
    x_ticks, x_log = _axis([dot.hours for dot in dots])
    y_ticks, y_log = _axis([dot.usd for dot in dots])

    def x(hours: float) -> float:
        return left + (right - left) * _share(hours, x_ticks, x_log)

    def y(usd: float) -> float:
        return bottom - (bottom - top) * _share(usd, y_ticks, y_log)

    for tick in y_ticks:
        drawing.add(
            Polyline(((left, y(tick)), (right, y(tick))), GRID),
            Text(left - 8, y(tick) + 4, dollars(tick), MUTED, 11, "end"),
        )
    for tick in x_ticks:
        drawing.add(Text(x(tick), bottom + 18, f"{tick:,.6g}", MUTED, 11, "middle"))
    scale = ", ".join(name for name, log in (("hours", x_log), ("dollars", y_log)) if log)
    label = f"hours (logarithmic: {scale})" if scale else "hours"
    drawing.add(Text((left + right) / 2, bottom + 40, label, MUTED, 12, "middle"))
    front = sorted((dot for dot in dots if dot.pareto), key=lambda dot: dot.hours)
    if len(front) > 1:
        drawing.add(Polyline(tuple((x(dot.hours), y(dot.usd)) for dot in front), INK, 1.2, True))
    for dot in sorted(dots, key=lambda dot: dot.pareto):
        colour = COLOURS.get(dot.backend, OTHER)
        title_of = f"{dot.label}: {dollars(dot.usd)}, {amount(dot.hours)} h"
        drawing.add(Circle(x(dot.hours), y(dot.usd), 5, colour, title_of, not dot.pareto))
    backends = list(dict.fromkeys(dot.backend for dot in dots))
    for index, backend in enumerate(backends):
        at = left + 110 * index
        drawing.add(Circle(at + 6, 18, 5, COLOURS.get(backend, OTHER)), Text(at + 18, 22, backend, INK, 12))
    drawing.add(Text(right, 22, "filled, joined: nothing is both cheaper and faster", MUTED, 11, "end"))
    return drawing


def _axis(values: Sequence[float]) -> tuple[list[float], bool]:
    """Ticks, and whether they are logarithmic: where the values span much."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= _LOG_FROM:
        return log_ticks(low / 1.05, high * 1.05), True
    return nice_ticks(high * 1.05, 6), False


def _share(value: float, ticks: Sequence[float], log: bool) -> float:
    """Of the axis, from 0 to 1."""
    if log:
        return math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])
    return value / ticks[-1]
