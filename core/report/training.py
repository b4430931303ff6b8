"""The charts over steps: training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from isthmus.core.report.charts import Chart, Line, MarkKind, Span, of_series
from isthmus.core.report.collect import Row, RunData
from isthmus.core.report.series import Floats, column, reduce, smooth
from isthmus.core.report.text import escape, figure, finite, short

_MAX_BINS = 16


class Training:
    """The train rows as columns, and the charts over them."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        rows = data.train
        self.step = column(rows, "step")
        self.loss = column(rows, "loss")
        self.time = column(rows, "time")
        self.samples_per_s = column(rows, "samples_per_s")
        self.step_s = column(rows, "step_s")
        self.data_wait_s = column(rows, "data_wait_s")
        names = [row.get("stage") if isinstance(row.get("stage"), (int, str)) else 0 for row in rows]
        self._stages = list(dict.fromkeys(names))
        self._group = np.array([self._stages.index(name) for name in names], dtype=np.int64)

    def spans(self) -> list[Span]:
        """The stages, by the steps that were trained in them; none for a run of one stage."""
        if len(self._stages) < 2:
            return []
        starts = np.flatnonzero(np.r_[True, np.diff(self._group) != 0])
        edges = [float(self.step[start]) for start in starts] + [float(self.step[-1])]
        return [
            Span(low, high, self._data.stage_name(self._stages[self._group[start]]))
            for (low, high), start in zip(pairwise(edges), starts, strict=True)
        ]

    def not_finite(self) -> Floats:
        """Steps whose loss was not finite."""
        return self.step[~np.isfinite(self.loss)]

    def marks(self) -> list[tuple[float, MarkKind]]:
        """Restarts, alarms and losses that were not finite, at their steps."""
        marks: list[tuple[float, MarkKind]] = []
        attempt = column(self._data.train, "attempt")
        marks += [(float(self.step[at + 1]), "attempt") for at in np.flatnonzero(np.diff(attempt) > 0)]
        marks += [(float(step), "bad") for step in self.not_finite()]
        # fmax: a row without a time takes the time of the rows before it.
        times = np.fmax.accumulate(self.time)
        for event in self._data.events:
            time = finite(event.get("time"))
            if event.get("type") == "alarm" and time is not None:
                at = min(int(np.searchsorted(times, time)), len(times) - 1)
                marks.append((float(self.step[at]), "alarm"))
        return marks

    def data_wait_fraction(self) -> float | None:
        """Share of all step time that was spent waiting for data."""
        known = np.isfinite(self.data_wait_s) & np.isfinite(self.step_s)
        total = float(self.step_s[known].sum())
        return float(self.data_wait_s[known].sum()) / total if total > 0 else None

    def recent_loss(self) -> float | None:
        """Mean of the finite losses among the last fiftieth of the steps (10 at least)."""
        tail = self.loss[-max(10, len(self.loss) // 50) :]
        tail = tail[np.isfinite(tail)]
        return float(tail.mean()) if len(tail) else None

    def charts(self) -> list[Chart]:
        """Loss first, then what explains it."""
        if not len(self.step):
            return []
        x_range = (float(self.step[0]), float(self.step[-1]))
        spans, marks = self.spans(), self.marks()
        restarts = [mark for mark in marks if mark[1] == "attempt"]
        wait = np.divide(
            100 * self.data_wait_s, self.step_s, out=np.full(len(self.step), np.nan), where=self.step_s > 0
        )
        rows = self._data.train
        clip = {value for stage in self._data.stages if (value := finite(stage.get("max_grad_norm")))}
        most_wait = finite(self._data.section("monitor", "data_wait").get("max"))

        def chart(title: str, name: str, unit: str, y: Floats, **more: object) -> Chart:
            series = reduce(self.step, y, self._group)
            lines = of_series(name, series, *smooth(series), "c0")
            options: dict[str, object] = {"spans": spans, "marks": restarts, "x_range": x_range, **more}
            return Chart(title=title, unit=unit, lines=lines, **options)  # type: ignore[arg-type]

        rate = reduce(self.step, column(rows, "learning_rate"), self._group)
        return [
            chart("Loss", "loss", "", self.loss, wide=True, log=True, marks=marks),
            chart("Throughput", "throughput", "samples/s", self.samples_per_s, from_zero=True),
            chart(
                "Data wait",
                "wait",
                "% of step time",
                wait,
                from_zero=True,
                bounds=[(most_wait, f"max {short(most_wait)} %")] if most_wait is not None else [],
            ),
            chart(
                "Gradient norm",
                "norm",
                "before clipping",
                column(rows, "grad_norm"),
                log=True,
                bounds=[(value, f"clip at {short(value)}") for value in clip] if len(clip) == 1 else [],
            ),
            Chart(
                title="Learning rate",
                lines=[Line("learning rate", rate.x, rate.mean, "c0")],
                x_range=x_range,
                from_zero=True,
                spans=spans,
                marks=restarts,
            ),
        ]


def validation_charts(data: RunData, training: Training) -> list[Chart]:
    """Validation loss over steps, and by timestep bin."""
    rows = data.validation
    if not rows:
        return []
    step, loss = column(rows, "step"), column(rows, "loss")
    held_out = [row.get("held_out") is True for row in rows]
    note = (
        "Over held-out samples."
        if all(held_out)
        else "Over a fixed set of training samples: the recipe names no held-out dataset."
    )
    x_range = (min(0.0, float(step[0])), float(max(step[-1], *training.step[-1:])))
    charts = [
        Chart(
            title="Validation loss",
            log=True,
            lines=[Line("validation loss", step, loss, "c0")],
            spans=training.spans(),
            note=note,
            x_range=x_range,
        )
    ]
    bins = _bins(rows)
    if len(bins):
        count = bins.shape[1]
        charts.append(
            Chart(
                title="Validation loss by timestep",
                log=True,
                lines=[
                    Line(bin_label(index, count), step, bins[:, index], f"s{_shade(index, count)}")
                    for index in range(count)
                ],
                ramp=("least noise", "most noise"),
                spans=training.spans(),
                x_range=x_range,
                extra=_bin_table(step, bins),
            )
        )
    return charts


def bin_label(index: int, count: int) -> str:
    """Bounds of a timestep bin on the scale 0 (data) to 1 (noise)."""
    return f"t {index / count:.3g}–{(index + 1) / count:.3g}"


def _shade(index: int, count: int) -> int:
    return round(index * 15 / (count - 1)) if count > 1 else 0


def _bins(rows: Sequence[Row]) -> Floats:
    """[rows, bins] of the losses, with as many bins as most rows have; empty when there are none."""
    lists = [row.get("bins") for row in rows]
    lengths = [len(bins) for bins in lists if isinstance(bins, list)]
    count = max(set(lengths), key=lengths.count) if lengths else 0
    if not 0 < count <= _MAX_BINS:
        return np.empty((0, 0))
    return np.array(
        [
            [np.nan if (value := finite(cell)) is None else value for cell in bins]
            if isinstance(bins, list) and len(bins) == count
            else [np.nan] * count
            for bins in lists
        ]
    )


def _bin_table(step: Floats, bins: Floats) -> str:
    body = []
    for index in range(bins.shape[1]):
        known = np.flatnonzero(np.isfinite(bins[:, index]))
        if not len(known):
            continue
        values = bins[known, index]
        best = int(known[np.argmin(values)])
        body.append(
            f"<tr><td>{escape(bin_label(index, bins.shape[1]))}</td><td>{figure(float(values[0]))}</td>"
            f"<td>{figure(float(bins[best, index]))}</td><td>{step[best]:,.0f}</td>"
            f"<td>{figure(float(values[-1]))}</td></tr>"
        )
    return (
        '<details><summary>Figures</summary><div class="scroll"><table class="numbers"><thead><tr>'
        "<th>timestep</th><th>first</th><th>best</th><th>at step</th><th>last</th></tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div></details>"
    )
