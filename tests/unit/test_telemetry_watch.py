"""The worker's telemetry thread, over a real run directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isthmus.core.models import profiles
from isthmus.core.recipe.schema import Monitor, Recipe
from isthmus.core.telemetry import SystemProbe, watch
from isthmus.core.telemetry.watching import FabricExpectation
from isthmus.errors import StorageError
from isthmus.storage.rundir import RunDirectory

LOW = Monitor.model_validate({"gpu_utilization": {"min": 95, "for": "20 s"}})


class ScriptedProbe:
    """Gives one row a call, ten seconds apart, and ends the watch after the last one."""

    def __init__(self, rows: list[Any], stop: threading.Event) -> None:
        self.rows, self.stop, self.calls = rows, stop, 0

    def sample(self) -> dict[str, float]:
        row = self.rows[self.calls]
        self.calls += 1
        if self.calls == len(self.rows):
            self.stop.set()
        if isinstance(row, BaseException):
            raise row
        return {"time": 1000.0 + 10 * self.calls, "gpu_utilization": row}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has been created."""
    return RunDirectory(tmp_path / "run").create("name: x\n", {"id": "x-1"})


def watch_rows(run: RunDirectory, rows: list[Any], **more: Any) -> ScriptedProbe:
    """Runs the watch over scripted rows, in a thread as the worker does."""
    stop = threading.Event()
    probe = ScriptedProbe(rows, stop)
    thread = threading.Thread(
        target=watch,
        args=(run, 3, LOW, stop),
        kwargs={"probe": cast(SystemProbe, probe), "interval": 0.001, "warm_up": 0.0, "attempt": 2, **more},
    )
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    return probe


def test_rows_are_of_this_node_and_attempt(run: RunDirectory) -> None:
    watch_rows(run, [99.0, 98.0])
    rows = run.read_metrics("system-node3")
    assert [(row["gpu_utilization"], row["attempt"], row["time"]) for row in rows] == [
        (99.0, 2, 1010.0),
        (98.0, 2, 1020.0),
    ]
    assert run.events() == []


def test_a_breach_becomes_one_alarm_event_and_one_note(run: RunDirectory) -> None:
    watch_rows(run, [50.0] * 6 + [100.0] * 6)
    alarm, note = run.events()
    assert (alarm["type"], note["type"]) == ("alarm", "note")
    assert alarm["node"] == 3
    assert alarm["message"] == "node 3: gpu_utilization 50 % is below 95 % (over 20 s)"


def test_a_failing_probe_costs_its_row_only(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    probe = watch_rows(run, [99.0, RuntimeError("driver gone"), 97.0])
    assert probe.calls == 3
    assert [row["gpu_utilization"] for row in run.read_metrics("system-node3")] == [99.0, 97.0]
    assert "driver gone" in caplog.text


def test_an_alarm_that_could_not_be_written_is_written_later(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tries = run.event, []

    def refuse_once(type: str, /, **fields: Any) -> dict[str, Any]:
        tries.append(type)
        if len(tries) == 1:
            raise StorageError("the disk is full")
        return write(type, **fields)

    monkeypatch.setattr(run, "event", refuse_once)
    watch_rows(run, [50.0] * 6)
    assert tries == ["alarm", "alarm"]
    assert [event["type"] for event in run.events()] == ["alarm"]


def test_this_machine_is_measured_when_no_probe_is_given(run: RunDirectory) -> None:
    stop = threading.Event()
    stop.set()
    watch(run, 0, Monitor(), stop)
    (row,) = run.read_metrics("system-node0")
    assert row["disk_free_bytes"] > 0


def expectation(run: RunDirectory, parameters: int | None, clock: Callable[[], float]) -> FabricExpectation:
    """Of a made-up recipe: two nodes, ddp."""
    stage = SimpleNamespace(global_batch_size=64, micro_batch_size=8)
    recipe = SimpleNamespace(
        model=None,
        stages=[stage, stage],
        compute=SimpleNamespace(nodes=2, gpus_per_node=8),
        parallel=SimpleNamespace(strategy="ddp", precision="bf16", shard_size=None),
    )
    with pytest.MonkeyPatch.context() as patch:
        found = None if parameters is None else SimpleNamespace(parameters=parameters)
        patch.setattr(profiles, "profile", lambda model: found)
        return FabricExpectation(run, cast(Recipe, recipe), clock=clock, refresh=100)


def test_expected_fabric_figure_follows_the_measured_step_time_of_the_stage(run: RunDirectory) -> None:
    now = [0.0]
    figure = expectation(run, 10**9, lambda: now[0])
    assert figure() is None
    with run.metrics("train") as writer:
        for step in range(1, 300):
            stage = int(step > 290)
            writer.write({"step": step, "stage": stage, "step_s": 2.0 if stage else 1.0, "attempt": 1})
    assert figure() is None, "read again only after `refresh` seconds"
    now[0] = 101.0
    # 1e9 parameters x 4 bytes x 2 (n-1)/n with n = 2 nodes: 4 GB a step of 2 s.
    assert figure() == pytest.approx(2.0)


def test_no_expected_figure_for_a_model_of_unknown_size(run: RunDirectory) -> None:
    with run.metrics("train") as writer:
        writer.write({"step": 1, "stage": 0, "step_s": 1.0})
    assert expectation(run, None, lambda: 0.0)() is None
