"""The parts of a report: binning, smoothing, axes, numbers and pictures."""

from __future__ import annotations

import base64
import math
from io import BytesIO

import numpy as np
import pytest

from isthmus.core.report.images import choose, picture_of
from isthmus.core.report.series import extent, log_ticks, reduce, smooth, tick_labels, ticks
from isthmus.core.report.text import duration, escape, figure, moment, short, size

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_many_samples_are_thinned_evenly() -> None:
    samples = [(step, f"u{step}") for step in range(100)]
    chosen = [step for step, _ in choose(samples, 9)]
    assert chosen == [0, 12, 25, 37, 50, 62, 74, 87, 99]
    assert choose(samples[:3], 9) == samples[:3]


def test_large_pictures_are_scaled_down_and_bombs_are_left_out() -> None:
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 255, (1024, 2048, 3), dtype=np.uint8)
    buffer = BytesIO()
    image.fromarray(noise).save(buffer, "PNG")
    picture = picture_of(5, buffer.getvalue())
    assert (picture.width, picture.height) == (1400, 700)
    assert picture.data_uri.startswith("data:image/jpeg;base64,")
    assert len(picture.data_uri) < len(buffer.getvalue()) / 3
    cut = picture_of(5, buffer.getvalue()[: 10**6])
    assert "damaged" in cut.missing
    bomb = PIXEL[:16] + (100_000).to_bytes(4, "big") * 2 + PIXEL[24:]
    assert "too many" in picture_of(5, bomb).missing


def test_binning_keeps_extremes_means_and_gaps() -> None:
    x = np.arange(10_000, dtype=np.float64)
    y = np.sin(x / 500)
    y[3000:4000] = np.nan
    y[6000] = 9.0
    series = reduce(x, y)
    assert series.binned
    assert np.nanmax(series.high) == 9.0
    assert np.isnan(series.mean[(series.x > 3050) & (series.x < 3950)]).all()
    assert series.mean[0] == pytest.approx(np.mean(y[:25]))


def test_bins_and_smoothing_do_not_reach_across_stages() -> None:
    x = np.arange(5000, dtype=np.float64)
    group = (x >= 2503).astype(np.int64)
    series = reduce(x, np.where(group == 1, 10.0, 1.0), group)
    smoothed, window = smooth(series)
    assert window > 1
    assert set(np.round(smoothed, 9)) == {1.0, 10.0}
    assert (series.low == series.high).all()


def test_one_spike_does_not_flatten_a_long_series() -> None:
    values = np.r_[np.linspace(1, 2, 999), 1e9]
    low, high, cut = extent([values])
    assert cut
    assert low == 1
    assert high < 2.2
    assert extent([np.array([3.0, 3.0])])[:2] == pytest.approx((2.85, 3.15))
    assert extent([np.array([np.nan])])[:2] == (0.0, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 0.93, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0, 9.3e-5, ["0", "2.5e−5", "5e−5", "7.5e−5", "1e−4"]),
        (0, 37_000, ["0", "10k", "20k", "30k", "40k"]),
        (-1, 1, ["−1.0", "−0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_ticks_are_round_and_span_the_data(low: float, high: float, labels: list[str]) -> None:
    values = ticks(low, high, 4)
    assert values[0] <= low
    assert values[-1] >= high
    assert tick_labels(values) == labels


def test_log_ticks() -> None:
    assert log_ticks(0.09, 1.2) == [0.1, 0.2, 0.5, 1.0]
    assert log_ticks(1e-9, 1e9)[0] == 1e-9
    assert len(log_ticks(1e-9, 1e9)) <= 7
    assert len(log_ticks(0.13, 0.46)) >= 3


def test_numbers_as_people_write_them() -> None:
    assert [figure(v) for v in (0, 1234567.8, 0.012345, 2.5e-5, -3.14159, 1e20)] == [
        "0",
        "1,234,568",
        "0.01235",
        "2.5e−5",
        "−3.142",
        "1e20",
    ]
    assert [short(v) for v in (900, 12_000, 1_250_000, 0.5, 2048)] == ["900", "12k", "1.25M", "0.5", "2,048"]
    assert [duration(s) for s in (0, 8.21, 42, 192, 7500, 273600)] == [
        "0 s",
        "8.2 s",
        "42 s",
        "3 min 12 s",
        "2 h 5 min",
        "3 d 4 h",
    ]
    assert [size(b) for b in (5, 1500, 2.5e9)] == ["5 B", "1.5 kB", "2.5 GB"]
    assert moment(0) == "1970-01-01 00:00:00"
    assert moment(math.nan) == moment("x") == moment(1e18) == "–"
    assert escape("<a&'\"") == "&lt;a&amp;&#x27;&quot;"
    assert escape("x" * 5000, 10) == "xxxxxxxxxx…"
