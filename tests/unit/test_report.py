"""The report: what it shows, what it survives, and that run data cannot become markup."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Page

from isthmus.cli.app import main
from isthmus.core.report import write_report
from isthmus.core.report.charts import Chart, Line, render
from isthmus.core.report.collect import collect
from isthmus.core.report.series import reduce
from isthmus.core.report.system import system_charts
from isthmus.core.report.training import Training
from isthmus.core.report.write import render_page
from isthmus.errors import RunNotFound, StorageError
from isthmus.storage.rundir import RunDirectory

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def make_run(folder: Path, **more: Any) -> RunDirectory:
    """A run that has only been created."""
    run = RunDirectory(folder / "run")
    described = {"id": "tiny-1", "backend": "local", "recipe": {"stages": [{"name": "32px", "steps": 100}]}}
    run.create("name: tiny\n", described | more)
    return run


def train(run: RunDirectory, rows: list[dict[str, Any]]) -> None:
    """Writes train rows, with what a row needs besides."""
    with run.metrics("train") as writer:
        for row in rows:
            usual = {"stage": 0, "attempt": 1, "time": 1000.0 + row.get("step", 0), "step_s": 1.0}
            writer.write({**usual, "data_wait_s": 0.01, "samples_per_s": 64.0, **row})


def page_of(run: RunDirectory) -> Page:
    """The run's report, parsed."""
    return Page(Path(write_report(run.uri)).read_text(encoding="utf-8"))


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        write_report(str(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_a_run_that_has_only_been_created(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert "No step has been recorded yet." in page.text
    assert "created" in page.text
    assert page.all("svg") == []


def test_one_step_is_a_dot(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, [{"step": 1, "loss": 0.5}])
    page = page_of(run)
    assert [tag for tag in page.all("path") if "dot" in (tag.get("class") or "")]
    assert "of 100" in page.text


def test_it_goes_where_it_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    target = tmp_path / "new" / "page.html"
    assert write_report(run.uri, target) == str(target)
    assert target.exists()
    with pytest.raises(StorageError, match="cannot write the report"):
        write_report(run.uri, tmp_path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", run.uri, "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"run": run.uri, "report": f"{run.uri}/report.html"}
    assert Path(told["report"]).exists()


def test_command_names_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "nothing")])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_losses_that_are_not_finite_are_gaps_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    losses = [math.nan if step in (5, 6) else math.inf if step == 9 else 1.0 / step for step in range(1, 21)]
    train(
        run,
        [{"step": i + 1, "loss": loss, "skipped": not math.isfinite(loss)} for i, loss in enumerate(losses)],
    )
    page = page_of(run)
    assert "loss not finite (3)" in page.text
    assert "Skipped steps 3" in re.sub(r"\s+", " ", page.text)
    drawn = [tag["d"] or "" for tag in page.all("path")]
    assert not any("nan" in path.lower() or "inf" in path for path in drawn)


def test_a_run_of_only_nan_still_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, [{"step": step, "loss": math.nan, "grad_norm": math.nan} for step in range(1, 30)])
    page = page_of(run)
    assert "Throughput" in page.text
    assert "Gradient norm" not in page.text


def test_attempts_and_redone_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.event("started", attempt=1)
    train(run, [{"step": step, "loss": 1.0, "attempt": 1} for step in range(1, 11)])
    run.event("preempted", step=10)
    run.event("started", attempt=2)
    run.event("resumed", step=8)
    train(run, [{"step": step, "loss": 0.5, "attempt": 2} for step in range(9, 15)])
    data = collect(RunDirectory.open(run.uri))
    assert [(a.number, a.first_step, a.last_step, a.outcome) for a in data.attempts] == [
        (1, 1, 10, "preempted"),
        (2, 9, 14, "running"),
    ]
    assert data.redone_steps == 2
    assert data.state() == "running"
    assert (9.0, "attempt") in Training(data).marks()
    assert "Steps done twice" in page_of(run).text


def test_an_attempt_that_was_killed_is_told_from_one_that_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.event("started", attempt=1)
    train(run, [{"step": 1, "loss": 1.0}])
    run.event("started", attempt=2)
    assert [attempt.outcome for attempt in collect(run).attempts] == ["died", "running"]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([("submitted", {})], "submitted"),
        ([("submitted", {}), ("started", {})], "running"),
        ([("started", {}), ("preempted", {})], "preempted"),
        ([("started", {}), ("preempted", {}), ("resumed", {}), ("alarm", {"metric": "x"})], "running"),
        ([("started", {}), ("stop-requested", {"by": "budget"})], "stopping"),
        ([("started", {}), ("stop-requested", {"by": "budget"}), ("stopped", {})], "stopped"),
        ([("started", {}), ("finished", {}), ("note", {})], "finished"),
        ([("started", {}), ("failed", {"rank": 1, "cause": "boom"})], "failed"),
    ],
)
def test_state(tmp_path: Path, events: list[tuple[str, dict[str, Any]]], state: str) -> None:
    run = make_run(tmp_path)
    for kind, fields in events:
        run.event(kind, **fields)
    assert collect(run).state() == state


def test_the_cause_of_a_failure_is_at_the_top(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.event("started", attempt=1)
    run.event("failed", rank=3, cause="CUDA out of memory at step 12")
    run.event("failed", rank=8, node=1, cause="connection closed by peer")
    text = page_of(run).text
    assert text.index("CUDA out of memory") < text.index("Training") < text.index("connection closed")


def test_stages_are_marked_by_name(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, recipe={"stages": [{"name": "small", "steps": 5}, {"name": "large", "steps": 5}]}
    )
    train(run, [{"step": step, "loss": 1.0, "stage": int(step > 5)} for step in range(1, 11)])
    spans = Training(collect(run)).spans()
    assert [(span.label, span.start, span.end) for span in spans] == [
        ("small", 1.0, 6.0),
        ("large", 6.0, 10.0),
    ]


ATTACK = "</script><script>alert(1)</script><img src=http://evil.test/x onerror=alert(1)>\"'\x00\u202e"


def test_run_data_cannot_become_markup(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        id=ATTACK,
        backend=ATTACK,
        git={"sha": ATTACK},
        packages={ATTACK: ATTACK},
        recipe={"stages": [{"name": ATTACK, "steps": 5}, {"name": ATTACK}]},
    )
    run.write_recipe(ATTACK)
    train(run, [{"step": step, "loss": 1.0, "stage": step % 2, "bucket": ATTACK} for step in range(1, 6)])
    run.event("failed", rank=ATTACK, cause=ATTACK, **{"x" + ATTACK: [ATTACK]})
    run.event("alarm", message=ATTACK, metric=ATTACK)
    page = page_of(run)
    assert page.all("script") == []
    assert page.all("img") == []
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not any(
        (value or "").lstrip().startswith(("http", "javascript"))
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action")
    )
    assert "\x00" not in page.text
    assert "\u202e" not in page.text


@pytest.mark.parametrize(
    "row",
    [
        {"step": "7"},
        {"step": None, "loss": 1},
        {"step": -1, "loss": 1},
        {"step": 3, "loss": "low", "stage": {"a": 1}, "time": "noon", "attempt": "x", "samples": 10**400},
        {"loss": 1.0},
        {"step": 4, "loss": [1], "stage": 99, "time": 1e300, "step_s": 0, "data_wait_s": -1},
    ],
)
def test_junk_rows_do_not_stop_a_report(tmp_path: Path, row: dict[str, Any]) -> None:
    run = make_run(tmp_path)
    run.event("started", attempt="x", time="noon")
    run.event("alarm", time=5)
    good = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 5)]
    train(run, good)
    folder = Path(run.uri) / "metrics"
    (folder / "train" / "9.jsonl").write_text(json.dumps(row) + "\n[1]\n{broken")
    for kind in ("validation", "system-node0", "system-nodeX"):
        (folder / kind).mkdir()
        (folder / kind / "1.jsonl").write_text(
            json.dumps({**row, "bins": "none", "gpu_utilization": "all"}) + "\n"
        )
    assert "Loss" in page_of(run).text


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.event("started")
    next((Path(run.uri) / "events").iterdir()).write_text("{broken")
    text = page_of(run).text
    assert "Not everything could be read." in text
    assert "not valid JSON" in text


def test_samples_are_embedded_and_damaged_ones_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (10, 20):
        run.write_file(f"samples/step-{step:08d}.png", PIXEL)
    run.write_file("samples/step-00000030.png", b"<svg onload=alert(1)>")
    page = page_of(run)
    images = page.all("img")
    assert [image["alt"] for image in images] == ["Samples at step 10", "Samples at step 20"]
    assert base64.b64decode((images[0]["src"] or "").removeprefix("data:image/png;base64,")) == PIXEL
    assert "not a PNG" in page.text


def test_page_asks_for_nothing_and_runs_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, [{"step": step, "loss": 1.0} for step in range(1, 50)])
    text = Path(write_report(run.uri)).read_text()
    page = Page(text)
    policy = page.all("meta")[1]["content"]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert "url(" not in text
    assert "@import" not in text
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert all((a["href"] or "").startswith("#") for a in page.all("a"))


def test_a_million_steps_are_drawn_in_bounded_size(tmp_path: Path) -> None:
    count = 1_000_000
    data = collect(make_run(tmp_path))
    step = np.arange(1, count + 1, dtype=np.float64)
    loss = 1 / np.sqrt(step)
    loss[777_777] = 50.0
    series = reduce(step, loss)
    assert len(series.x) <= 400
    assert np.nanmax(series.high) == 50.0
    assert np.nanmin(series.low) == loss.min()
    chart = render(Chart(title="Loss", lines=[Line("loss", series.x, series.mean, "c0")]))
    assert len(chart) < 60_000
    data.train = [{"step": int(s), "loss": 0.5, "time": 1.0, "step_s": 1.0} for s in step[:20_000]]
    assert len(render_page(data, written=0)) < 250_000


def test_many_nodes_are_a_mean_a_range_and_the_lowest(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, recipe={"stages": [], "monitor": {"gpu_utilization": {"min": 95, "for": "600 s"}}}
    )
    for node in range(16):
        with run.metrics(f"system-node{node}") as writer:
            for at in range(60):
                writer.write(
                    {
                        "time": 1000.0 + 15 * at,
                        "gpu_utilization": 80.0 if node == 7 else 98.0,
                        "gpu_energy_kilojoules": 45.0,
                    }
                )
    charts = {chart.title: chart for chart in system_charts(collect(run))}
    (line,) = charts["GPU utilization"].lines
    assert line.band is not None
    assert (float(line.band[0].min()), float(line.band[1].max())) == (80.0, 98.0)
    assert "node 7, mean 80" in charts["GPU utilization"].note
    (power,) = charts["GPU power"].lines
    assert np.allclose(power.y[np.isfinite(power.y)], 3.0)
    assert "GPU energy" in page_of(run).text


def test_a_pause_is_a_gap(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with run.metrics("system-node0") as writer:
        for at in [*range(20), *range(200, 220)]:
            writer.write({"time": 1000.0 + 15 * at, "cpu_percent": 50.0})
    (line,) = next(chart for chart in system_charts(collect(run)) if chart.title == "CPU").lines
    assert int(np.isnan(line.y).sum()) == 1


def test_validation_by_timestep(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, [{"step": step, "loss": 1.0} for step in range(1, 31)])
    with run.metrics("validation") as writer:
        for step in (10, 20, 30):
            writer.write(
                {"step": step, "loss": 1.0 / step, "bins": [0.1, 0.2, math.nan, 0.4], "held_out": False}
            )
    text = page_of(run).text
    assert "Validation loss by timestep" in text
    assert "fixed set of training samples" in text
    assert "t 0.75–1" in text


def test_report_of_many_rows_takes_seconds_not_minutes(tmp_path: Path) -> None:
    """Guards against a quadratic step: 50,000 rows, read from disk."""
    run = make_run(tmp_path)
    folder = Path(run.uri) / "metrics" / "train"
    folder.mkdir(parents=True)
    lines = (
        f'{{"step":{step},"stage":0,"loss":{1 / step},"grad_norm":1,"learning_rate":1e-4,"samples":{step},'
        f'"samples_per_s":64,"step_s":1,"data_wait_s":0,"attempt":1,"time":{step}}}\n'
        for step in range(1, 50_001)
    )
    (folder / "1.jsonl").write_text("".join(lines))
    started = time.process_time()
    write_report(run.uri)
    assert time.process_time() - started < 30
