"""What a short run says of the whole one, from metrics that are made up so that the answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.catalog import Catalog
from isthmus.cost.estimate import estimate
from isthmus.cost.measured import Measurement, fitting, measurements, record, speed_key
from isthmus.cost.measuring import read, short_overrides, special_steps, steps_of
from isthmus.cost.placing import Place, place
from isthmus.errors import UsageError

NOWHERE = Catalog(prices=())
STEP_S = (0.5, 2.0)
"""Seconds of a step of each stage."""
START_S, CHECKPOINT_S, FIRST_VALIDATION_S, END_S = 20.0, 3.0, 10.0, 7.0


def whole(*overrides: str) -> Recipe:
    """Two stages on this machine."""
    stages = (
        "stages=[{name: a, resolution: 32, steps: 1000, global_batch_size: 64, micro_batch_size: 32, learning_rate: 1e-3},"
        "{name: b, resolution: 32, samples: 12800, global_batch_size: 128, micro_batch_size: 32, learning_rate: 1e-3}]"
    )
    return load_recipe("quickstart", [stages, *overrides]).recipe


def short(recipe: Recipe, steps: int | None = None) -> Recipe:
    counts = steps_of(recipe, steps)
    return load_recipe("quickstart", [f"stages={_stages(recipe)}", *short_overrides(recipe, counts)]).recipe


def _stages(recipe: Recipe) -> str:
    return json.dumps([stage.model_dump(mode="json", exclude_unset=True) for stage in recipe.stages])


def happened(recipe: Recipe, begun: float = 1000.0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and events of a run of a recipe, with every step, checkpoint and validation as long as said above."""
    clock, step, rows = begun + START_S, 0, []
    total = sum(stage.total_steps for stage in recipe.stages)
    every = recipe.checkpoint.every.steps or 10**9
    validated = 0
    for index, stage in enumerate(recipe.stages):
        for _ in range(stage.total_steps):
            clock, step = clock + STEP_S[index], step + 1
            rows.append({"step": step, "stage": index, "time": clock, "step_s": STEP_S[index], "attempt": 1})
            if step == total:
                break
            if step % every == 0:
                clock += CHECKPOINT_S
            if step % (recipe.validation.every.steps or 10**9) == 0:
                clock += FIRST_VALIDATION_S if not validated else END_S
                validated += 1
    events = [
        {"type": "submitted", "time": begun},
        {"type": "started", "time": begun + 1},
        {"type": "finished", "time": clock + END_S},
    ]
    return rows, events


def local(recipe: Recipe) -> Place:
    return place(recipe, NOWHERE, backend="local")


def measured(recipe: Recipe, steps: int | None = None) -> Measurement:
    brief = short(recipe, steps)
    rows, events = happened(brief)
    return read(brief, local(recipe), rows=rows, events=events, run_uri="here")


def test_every_part_of_the_short_run_is_read_back() -> None:
    found = measured(whole())
    assert [stage.images_per_s for stage in found.stages] == pytest.approx([64 / 0.5, 128 / 2.0])
    assert found.start_s == pytest.approx(START_S)
    assert found.checkpoint_stall_s == pytest.approx(CHECKPOINT_S)
    assert found.first_validation_s == pytest.approx(FIRST_VALIDATION_S)
    assert found.validation_s == pytest.approx(END_S)
    assert found.end_s == pytest.approx(END_S)
    for stage in found.stages:
        assert stage.low < stage.images_per_s < stage.high


def test_the_whole_run_takes_as_long_as_predicted_stage_by_stage() -> None:
    recipe = whole("checkpoint.every=300 steps", "validation.every=450 steps")
    prediction = estimate(recipe, place=local(recipe), catalog=NOWHERE, measured=measured(recipe))
    rows, events = happened(recipe)
    took = events[-1]["time"] - events[0]["time"]
    assert prediction.hours * 3600 == pytest.approx(took, rel=1e-3)
    assert [stage.hours * 3600 for stage in prediction.by_stage] == pytest.approx([500, 200])
    assert rows[-1]["step"] == 1100
    assert prediction.basis.startswith("measured over")
    low, high = prediction.hours_interval
    assert low < prediction.hours < high


def test_a_stalled_step_is_cut_and_widens_the_interval() -> None:
    recipe = whole()
    brief = short(recipe)
    rows, events = happened(brief)
    for row in rows[12:]:
        row["time"] += 60
    stalled = read(brief, local(recipe), rows=rows, events=events, run_uri="here").stages[0]
    calm = measured(recipe).stages[0]
    assert 0.85 * calm.images_per_s < stalled.images_per_s < calm.images_per_s
    assert stalled.high / stalled.low > calm.high / calm.low


def test_the_short_run_is_short_keeps_its_batches_and_writes_and_validates_on_the_way() -> None:
    recipe = whole()
    brief = short(recipe)
    assert [stage.total_steps for stage in brief.stages] == [50, 8]
    assert brief.stages[1].samples == 8 * 128
    checkpoint, validation = special_steps(58)
    assert (brief.checkpoint.every.steps, brief.validation.every.steps) == (checkpoint, validation)
    assert checkpoint != validation
    for total in range(8, 400):
        one, other = special_steps(total)
        assert total / 2 < other < one < total
    assert speed_key(brief) == speed_key(recipe)


def test_too_little_to_measure_is_one_clear_line() -> None:
    recipe = whole()
    with pytest.raises(UsageError, match="3 steps tell nothing"):
        steps_of(recipe, 3)
    few = load_recipe("quickstart", ["stages.0.steps=5", "stages.0.lr_warmup_steps=0"]).recipe
    with pytest.raises(UsageError, match="stage 32px has 5 steps"):
        steps_of(few, None)
    brief = short(recipe)
    rows, events = happened(brief)
    with pytest.raises(UsageError, match="interrupted"):
        read(brief, local(recipe), rows=[{**rows[0], "attempt": 2}, *rows[1:]], events=events, run_uri="here")
    with pytest.raises(UsageError, match="tells no finished"):
        read(brief, local(recipe), rows=rows, events=events[:2], run_uri="here")


def test_a_measurement_is_kept_and_found_again_by_kind_and_machines(tmp_path: Path) -> None:
    recipe = whole()
    found = measured(recipe)
    folder = tmp_path / "measured"
    assert measurements(folder, found.key) == []
    record(folder, found)
    newer = replace(found, time=found.time + 60, start_s=1.0)
    record(folder, newer)
    record(folder, replace(found, nodes=2))
    kept = measurements(folder, speed_key(whole("stages.0.steps=500", "seed=7")))
    assert len(kept) == 2
    assert fitting(kept, backend="local", sku="this-machine", nodes=1, gpus_per_node=2) == newer
    assert fitting(kept, backend="azure", sku="this-machine", nodes=1, gpus_per_node=2) is None
    assert measurements(folder, speed_key(whole("stages.0.micro_batch_size=16"))) == []


def test_a_file_that_is_no_measurement_is_named(tmp_path: Path) -> None:
    (tmp_path / "abc-there.json").write_text('{"stages": []}')
    with pytest.raises(UsageError, match="not a measurement") as error:
        measurements(tmp_path, "abc")
    assert "abc-there.json" in str(error.value)


def test_what_was_measured_is_told_stage_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    from isthmus.cli.measuring import show
    from isthmus.cost.measure import Measured

    recipe = whole()
    found = measured(recipe)
    prediction = estimate(recipe, place=local(recipe), catalog=NOWHERE, measured=found)
    one = Measured(
        backend="local",
        measurement=found,
        estimate=prediction,
        steps=58,
        whole_steps=1100,
        file=Path("kept.json"),
    )
    failed = Measured(backend="azure", error=UsageError("no workspace"))
    show([one, failed], as_json=False)
    out = capsys.readouterr().out
    assert "a: 128 images/s" in out
    assert "the short run: 58 steps, 5.3 % of all" in out
    assert "kept in kept.json" in out
    assert "azure: no workspace" in out
    show([one, failed], as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told[0]["prediction"]["speed"] == "measured"
    assert told[1]["error"] == "no workspace"
