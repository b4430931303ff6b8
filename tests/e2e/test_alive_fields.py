"""Every field of `watchdog` and `on_loss_spike` changes what it says, in a training of the test's own process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import run
from training import PROMPTS, rows

from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.core.telemetry import disk
from isthmus.core.telemetry.watching import watch
from isthmus.core.train import alive, setup
from isthmus.core.train.step import Stepper
from isthmus.core.train.stragglers import StragglerWatch
from isthmus.core.train.watchdog import Watchdog
from isthmus.errors import TrainingFailed
from isthmus.storage.rundir import RunDirectory

SPIKE = {"action": "rewind", "window": 16, "lasts": 1, "skip": 3, "z_score": 20}
LONG = {"stages__0__steps": 30, "checkpoint__every": 4}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Step (1 after the first) -> the keys of the batch that came at it first, whose loss is huge from then on."""
    bad: dict[int, Any] = {21: None}
    prepare = Stepper.prepare

    def poisoned(self: Stepper, batch: Any, objective: Any) -> Any:
        prepared = prepare(self, batch, objective)
        keys = tuple(batch.keys)
        if batch.step + 1 in bad and bad[batch.step + 1] is None:
            bad[batch.step + 1] = keys
        if keys in bad.values():
            prepared.noised.target.mul_(100.0)
        return prepared

    monkeypatch.setattr(Stepper, "prepare", poisoned)
    monkeypatch.setenv("ISTHMUS_RECORD_KEYS", "1")
    return bad


def keys(place: Path) -> dict[int, list[str]]:
    """Step -> the keys that were trained on in the end."""
    return {row["step"]: row["keys"] for row in rows(place, "keys-rank0")}


def events(place: Path, metric: str) -> list[dict[str, Any]]:
    """What was told of a metric."""
    return [event for event in RunDirectory(place).events() if event.get("metric") == metric]


@pytest.mark.slow
def test_a_spike_is_undone_and_its_samples_never_come_again(
    latents: dict[str, str], tmp_path: Path, poisoned: dict[int, Any]
) -> None:
    found = run(tmp_path, latents["dit"], "rewound", LONG | {"on_loss_spike": SPIKE})
    assert found["ending"] == "finished"
    assert found["samples"][-1] == 30 * 8
    alarm, note = events(tmp_path / "rewound", "loss_spike")
    assert alarm["message"].startswith("loss spike at step 21: ")
    assert alarm["message"].endswith(
        "back to the checkpoint of step 16, on without the samples of steps 19 to 21"
    )
    assert note["message"] == "went back to the checkpoint of step 16; steps 19 to 21 get other samples"
    assert max(found["losses"]) < 50, "the spike is not among the losses that count"

    spoiled = poisoned[21]
    poisoned.clear()
    run(tmp_path, latents["dit"], "plain", LONG | {"stages__0__steps": 33})
    rewound, plain = keys(tmp_path / "rewound"), keys(tmp_path / "plain")
    assert [rewound[step] for step in range(1, 19)] == [plain[step] for step in range(1, 19)]
    assert [rewound[step] for step in range(19, 31)] == [plain[step] for step in range(22, 34)]
    assert plain[21] == list(spoiled)
    assert list(spoiled) not in rewound.values()


def test_what_is_undone_leaves_no_trace_in_weights_average_and_moments(
    latents: dict[str, str], tmp_path: Path, poisoned: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path, latents["dit"], "rewound", LONG | {"on_loss_spike": SPIKE})
    poisoned.clear()
    # A run that has left the samples out from the beginning.
    place = RunDirectory(tmp_path / "forewarned")
    place.append_segment(
        {"stage": 0, "first_step": 0, "first_sample": 0, "global_batch_size": 8, "skipped": []}
    )
    segment = RunDirectory(tmp_path / "rewound").segments()[-1]
    assert segment["skipped"] == [[18 * 8, 21 * 8]]
    place.append_segment(segment)
    forewarned = run(tmp_path, latents["dit"], "forewarned", LONG | {"on_loss_spike": SPIKE})
    for figure in ("losses", "norms", "model", "ema", "samples"):
        assert forewarned[figure] == found[figure], figure


def test_a_crash_at_any_point_of_undoing_changes_nothing(
    latents: dict[str, str], tmp_path: Path, poisoned: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    changes = LONG | {"on_loss_spike": SPIKE}
    whole = run(tmp_path, latents["dit"], "whole", changes)
    for name, method in [("removed", "remove_checkpoint"), ("appended", "append_segment")]:
        original = getattr(RunDirectory, method)
        poisoned[21] = None

        def crashing(self: RunDirectory, what: Any, original: Any = original, method: str = method) -> Any:
            done = original(self, what)
            if method == "append_segment" and not what["skipped"]:
                return done
            # A checkpoint that is written clears its place first, in a thread of its own.
            if threading.current_thread() is not threading.main_thread():
                return done
            raise Crash

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, method, crashing)
            with pytest.raises(Crash):
                run(tmp_path, latents["dit"], name, changes)
        again = run(tmp_path, latents["dit"], name, changes)
        for figure in ("losses", "model", "ema"):
            assert again[figure] == whole[figure], (name, figure)
        assert RunDirectory(tmp_path / name).segments() == RunDirectory(tmp_path / "whole").segments()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"action": "alarm", "window": 16, "lasts": 1, "z_score": 20}, "robust standard deviations)"),
        (SPIKE | {"z_score": 1e9}, None),
        (SPIKE | {"lasts": 2}, None),
        (SPIKE | {"window": 64}, None),
        (SPIKE | {"skip": 2}, "on without the samples of steps 20 to 21"),
        (SPIKE | {"skip": 20}, "not undone: no checkpoint is from before step 2"),
    ],
    ids=["alarm", "z_score", "lasts", "window", "skip", "no checkpoint"],
)
def test_a_spike_is_what_the_recipe_says_and_met_as_it_says(
    latents: dict[str, str],
    tmp_path: Path,
    poisoned: dict[int, Any],
    changes: dict[str, Any],
    said: str | None,
) -> None:
    run(tmp_path, latents["dit"], "run", LONG | {"on_loss_spike": changes})
    alarms = [event for event in events(tmp_path / "run", "loss_spike") if event["type"] == "alarm"]
    assert [said in alarm["message"] for alarm in alarms if said] == ([] if said is None else [True]), alarms
    assert len(alarms) == (said is not None)


def test_rewinds_are_limited_over_the_whole_run(
    latents: dict[str, str], tmp_path: Path, poisoned: dict[int, Any]
) -> None:
    poisoned |= {25: None, 28: None}
    run(tmp_path, latents["dit"], "run", LONG | {"on_loss_spike": SPIKE | {"max_rewinds": 2, "skip": 1}})
    told = [event["message"] for event in events(tmp_path / "run", "loss_spike") if event["type"] == "alarm"]
    assert len(told) == 3
    assert [text.endswith("not undone: on_loss_spike.max_rewinds 2 is used up") for text in told] == [
        False, False, True,
    ]  # fmt: skip


def test_the_limits_reach_those_who_keep_them(
    latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    join, begin = setup.join_processes, Watchdog.start

    def joined(**named: Any) -> Any:
        seen["timeout"] = named["timeout"].total_seconds()
        return join(**named)

    def started(self: Watchdog) -> None:
        seen["limit"] = self.limit
        begin(self)

    monkeypatch.setattr(setup, "join_processes", joined)
    monkeypatch.setattr(Watchdog, "start", started)
    run(tmp_path, latents["dit"], "auto", {})
    assert seen == {"timeout": 6 * 660 + 300, "limit": 660}
    run(tmp_path, latents["dit"], "told", {"watchdog": {"limit": "20 min"}})
    assert seen == {"timeout": 6 * 1200 + 300, "limit": 1200}
    # Only what has several ranks has a timeout of its own; the field is refused otherwise.
    recipe = load_recipe("quickstart", ["watchdog.collective_timeout=33 min"]).recipe
    assert recipe.watchdog.collective_timeout_s(recipe.data.wait_limit) == 33 * 60


def test_when_a_straggler_is_named_is_the_recipes() -> None:
    slow = {
        "data": [0.0, 0.0],
        "own": [1.0, 1.8],
        "wait": [0.8, 0.0],
        "host": [0.0, 0.0],
        "block": [0.0, 0.0],
    }
    told: dict[str, int] = {}
    for name, field in [
        ("default", "watchdog={}"),
        ("factor", "watchdog.straggler_factor=2"),
        ("for", "watchdog.straggler_for=30 s"),
    ]:
        found = alive.Alive(load_recipe("quickstart", [field]).recipe, RunDirectory("memory://runs/x"))
        settings = found.recipe.watchdog
        assert found.interval == min(15.0, settings.straggler_for / 4)
        watched = StragglerWatch(settings.straggler_factor, settings.straggler_for)
        for second in range(0, 300, 15):
            if watched.observe(slow, 15.0):
                told[name] = second + 15
    assert told == {"default": 120, "for": 30}


@pytest.mark.parametrize(("least", "alarms"), [("900 TB", 1), ("1 KB", 0)])
def test_how_much_must_be_free_is_the_recipes(tmp_path: Path, least: str, alarms: int) -> None:
    recipe: Recipe = load_recipe("quickstart", [f"watchdog.disk_free={least}"]).recipe
    stop = threading.Event()
    stop.set()
    watch(RunDirectory(tmp_path), 0, recipe.monitor, stop, recipe=recipe)
    assert len(events(tmp_path, "disk_free")) == alarms


def test_a_checkpoint_without_room_is_told_before_it_is_written(
    latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 100_000)
    run(tmp_path, latents["dit"], "full", {"checkpoint__every": 4})
    told = [event for event in RunDirectory(tmp_path / "full").events() if event["type"] != "started"]
    assert [event["type"] for event in told] == ["alarm", "checkpoint-committed"]
    assert "GB are free at" in told[0]["message"]
    size = told[1]["bytes"] / 1e9
    assert f"the checkpoint needs {size:.1g}"[:24] in told[0]["message"]


def test_out_of_memory_is_one_line_with_the_arithmetic(
    latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Stepper, "prepare", exhausted)
    with pytest.raises(
        TrainingFailed, match=r"rank 0: out of memory at step 1: weights 0\.0 \+ gradients"
    ) as caught:
        run(tmp_path, latents["dit"], "large", {})
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_tracker_gets_what_a_training_gives(latents: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    validation = {
        "prompts": PROMPTS[:1],
        "every": 4,
        "sampling_steps": 2,
        "loss_by_timestep": True,
        "samples": 8,
    }
    found = run(
        tmp_path,
        latents["dit"],
        "tracked",
        {"validation": validation, "trackers": [{"name": "tensorboard", "every": 2}]},
    )
    curves = EventAccumulator(str(tmp_path / "tracked/tensorboard"))
    curves.Reload()
    losses = curves.Scalars("train/loss")
    assert [event.step for event in losses] == [2, 4]
    assert losses[1].value == pytest.approx(found["losses"][3])
    assert curves.Scalars("validation/loss")[0].value == pytest.approx(found["validation"][0][1])
    assert [event.step for event in curves.Images("samples")] == [4]
