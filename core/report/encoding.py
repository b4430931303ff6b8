"""What the page shows of an encode job, in the place of a training's charts: how far it is, how fast, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import numpy as np

from isthmus.core.report.charts import Chart, Line, render
from isthmus.core.report.collect import Row, RunData
from isthmus.core.report.series import Floats, column, reduce
from isthmus.core.report.text import duration, escape, figure, finite, short

_LONG_H = 2.0
"""From here on the charts count hours, not minutes."""


def encoding_tiles(data: RunData) -> list[tuple[str, str, str]]:
    """Name, value and aside of what people open the report for."""
    found: list[tuple[str, str, str]] = []
    if not data.encode:
        return found
    last = data.encode[-1]
    done, expected = finite(last.get("pictures")), finite(last.get("expected"))
    if done is not None:
        whole = data.state() == "finished"
        aside = "all of the source's" if whole else f"of about {short(expected)}" if expected else ""
        found.append(("Pictures", f"{done:,.0f}", aside))
    left_out = finite(last.get("rejected"))
    if left_out is not None and done:
        # Until the end each attempt counts its own.
        counted = "" if "reasons" in last or len(data.attempts) < 2 else ", of this attempt"
        found.append(("Left out", f"{left_out:,.0f}", f"{100 * left_out / done:.2g} %{counted}"))
    seconds = sum(attempt.seconds for attempt in data.attempts)
    if seconds:
        count = len(data.attempts)
        found.append(("Duration", duration(seconds), f"over {count} attempts" if count > 1 else ""))
    paces = [pace for row in data.encode[-200:] if (pace := finite(row.get("images_per_s")))]
    if paces:
        found.append(("Pace", short(float(f"{median(paces):.4g}")), "images/s, recent median"))
    remaining = finite(last.get("seconds_left"))
    if remaining and data.state() == "running":
        found.append(("Time left", duration(remaining), "about"))
    usd = finite(last.get("usd"))
    if usd is not None:
        found.append(("Cost", f"${usd:,.2f}", "at the launch's price"))
    return found


def encoding_section(data: RunData) -> str:
    """Charts over the time that it ran, where it reads and writes, and what was left out."""
    rows = data.encode
    places = _pairs({"source": _place(data, "source"), "dataset": _place(data, "dest")})
    if not rows:
        return f'{places}<p class="empty">No picture has been counted yet.</p>'
    # Several attempts are one line: what each counts from may lie a moment before the last word of the one before.
    hours = np.maximum.accumulate(np.nan_to_num(column(rows, "hours")))
    unit = "hours" if hours[-1] >= _LONG_H else "minutes"
    at = hours if unit == "hours" else 60 * hours

    def chart(title: str, y: Floats, of: str, colour: str) -> Chart:
        series = reduce(at, y)
        band = (series.low, series.high) if series.binned else None
        return Chart(
            title=title,
            unit=of,
            lines=[Line(title.lower(), series.x, series.mean, colour, band=band)],
            x_unit=f"{unit} of running",
            x_value=lambda value: f"{figure(value, 3)} {unit}",
            from_zero=True,
        )

    charts = [
        chart("Pictures done", column(rows, "pictures"), "", "c0"),
        chart("Pace", column(rows, "images_per_s"), "images/s, all ranks", "c1"),
        chart("Cost so far", column(rows, "usd"), "US dollars", "c2"),
    ]
    drawn = "".join(render(one) for one in charts)
    return f'{places}<div class="charts">{drawn}</div>{_reasons(rows[-1])}'


def _reasons(last: Row) -> str:
    """Why pictures were left out, as the whole dataset's last word has it."""
    told = last.get("reasons")
    if not isinstance(told, Mapping) or not told:
        return ""
    counts = {str(reason): count for reason, value in told.items() if (count := finite(value)) is not None}
    rows = "".join(
        f"<tr><td>{escape(reason, 60)}</td><td>{count:,.0f}</td></tr>"
        for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:50]
    )
    return (
        '<div class="scroll"><table class="numbers"><thead><tr><th>left out</th><th>pictures</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _place(data: RunData, name: str) -> str:
    """`encode.source` or `dest`, for the backend that it ran on."""
    place = data.section("encode").get(name)
    if isinstance(place, Mapping):
        place = place.get(str(data.run.get("backend")))
    return "" if place is None else str(place)


def _pairs(pairs: Mapping[str, str]) -> str:
    body = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value, 400)}</dd></div>"
        for name, value in pairs.items()
        if value
    )
    return f'<dl class="pairs">{body}</dl>' if body else ""
