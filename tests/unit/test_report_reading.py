"""The report's section on how the data was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from isthmus.core.report import write_report
from isthmus.core.report.collect import collect
from isthmus.core.report.reading import reading_charts
from isthmus.core.report.training import Training
from isthmus.storage.rundir import RunDirectory


def make_run(folder: Path, rows: list[dict[str, Any]]) -> RunDirectory:
    run = RunDirectory(folder / "run")
    run.create("name: tiny\n", {"id": "tiny-1", "recipe": {"stages": [{"name": "32px", "steps": 100}]}})
    with run.metrics("train") as writer:
        writer.write({"step": 1, "stage": 0, "attempt": 1, "time": 1.0, "step_s": 1.0, "loss": 1.0})
    with run.metrics("data") as writer:
        for row in rows:
            writer.write(row)
    return run


def test_the_rows_become_charts_and_what_was_not_smooth_is_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "step": 10 * at, "seconds": 15.0, "megabytes_per_s": 100.0 + at, "wait_s": 1.5, "retries": at, "throttled": 0,
            "latency_p50_s": 0.02, "latency_p99_s": 0.5, "attempt": 1, "time": 15.0 * at,
        }
        for at in range(1, 5)
    ]  # fmt: skip
    rows.append({"step": 50, "seconds": "junk", "megabytes_per_s": None, "latency_p50_s": float("nan")})
    run = make_run(tmp_path, rows)
    data = collect(run)
    charts = {chart.title: chart for chart in reading_charts(data, Training(data))}
    assert list(charts) == ["Data read", "Read latency", "Longest data wait of a rank"]
    assert charts["Data read"].lines[0].y[:4].tolist() == [101.0, 102.0, 103.0, 104.0]
    assert charts["Data read"].note == "In all: 10 retries."
    assert np.nanmax(charts["Longest data wait of a rank"].lines[0].y) == 10.0
    assert [line.y[0] for line in charts["Read latency"].lines] == [20.0, 500.0]
    page = Path(write_report(run.uri)).read_text()
    assert '<section id="data"><h2>Data</h2>' in page


def test_a_run_without_such_rows_has_no_such_section(tmp_path: Path) -> None:
    run = make_run(tmp_path, [])
    assert reading_charts(collect(run), Training(collect(run))) == []
    assert '<section id="data">' not in Path(write_report(run.uri)).read_text()
