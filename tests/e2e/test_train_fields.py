"""Every field of a recipe that the trainer reads changes what it does, or is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import EPSILON, run
from training import MODELS, PROMPTS, make_latents, recipe_data, rows

from isthmus.core.models.families import build_from_config
from isthmus.core.recipe import parse_recipe, resolve
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train import loop
from isthmus.core.train.data import make_loader
from isthmus.core.train.parallel import prepare, shard_size
from isthmus.core.train.sources import open_sources
from isthmus.core.train.step import Stepper
from isthmus.errors import CorruptShard, IsthmusError, StorageError, TrainingFailed, UsageError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.stream import Loader, Plan, Segment

TWO = {"stages": [
    {"name": "a", "resolution": 16, "steps": 2, "global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-2},
    {"name": "b", "resolution": 32, "steps": 2, "global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-2},
]}  # fmt: skip
GRID = {"validation": {"prompts": PROMPTS, "every": 2, "sampling_steps": 3}}
LOSS = {"validation": {"loss_by_timestep": True, "every": 2, "samples": 8, "timestep_bins": 2}}

MIXER = {"layers": 1, "width": 16, "head_width": 8}


CASES: list[tuple[str, Any, dict[str, Any], list[str]]] = [
    ("seed", 4, {}, ["losses"]),
    ("model__config__num_layers", 3, {}, ["losses"]),
    ("model__patch_mixer", MIXER, {}, ["losses"]),
    ("model__patch_mixer", MIXER, {"stages__0__token_mask_ratio": 0.5}, ["losses"]),
    ("model__patch_mixer__mlp_ratio", 32.0, {"model__patch_mixer": MIXER}, ["losses"]),
    ("objective__prediction_type", "v_prediction", {}, ["losses"]),
    ("objective__noise_schedule", "linear", EPSILON, ["losses"]),
    ("objective__timestep_sampling", "mode", {}, ["losses"]),
    ("objective__logit_mean", 1.0, {}, ["losses"]),
    ("objective__logit_std", 2.0, {}, ["losses"]),
    ("objective__mode_scale", 0.5, {"objective__timestep_sampling": "mode"}, ["losses"]),
    ("objective__shift", 3.0, {}, ["losses"]),
    ("objective__weighting_scheme", "min_snr", EPSILON, ["losses"]),
    ("objective__snr_gamma", 1.0, EPSILON | {"objective__weighting_scheme": "min_snr"}, ["losses"]),
    ("objective__noise_offset", 0.3, {}, ["losses"]),
    ("objective__caption_dropout", 0.9, {}, ["losses"]),
    ("optimizer__betas", [0.5, 0.9], {}, ["model"]),
    ("optimizer__eps", 1.0, {}, ["model"]),
    ("optimizer__weight_decay", 0.5, {}, ["model"]),
    ("stages__0__resolution", 32, {}, ["losses"]),
    ("stages__0__steps", 6, {}, ["samples"]),
    ("stages__0__global_batch_size", 16, {}, ["losses", "samples"]),
    ("stages__0__learning_rate", 1e-3, {}, ["rates", "model"]),
    ("stages__0__lr_scheduler", "cosine", {}, ["rates", "model"]),
    ("stages__0__lr_warmup_steps", 3, {}, ["rates", "model"]),
    ("stages__0__max_grad_norm", 1e-3, {"optimizer__eps": 1e-3}, ["model"]),
    ("stages__0__objective", {"logit_mean": 1.0}, {}, ["losses"]),
    ("stages__0__token_mask_ratio", 0.5, {}, ["losses"]),
    ("stages__0__pos_embed_interpolation", 2.0, {}, ["losses"]),
    ("stages__0__ema", {"decay": 0.2}, {}, ["ema"]),
    ("stages__1__on_enter", {"optimizer": "reset"}, TWO, ["model"]),
    ("stages__1__on_enter", {"ema": "reset"}, TWO, ["ema"]),
    ("stages__0__validation", {"timestep_bins": 4}, LOSS, ["bins"]),
    ("stages__0__validation", {"prompts": PROMPTS[:1]}, GRID, ["grids"]),
    ("ema__decay", 0.2, {}, ["ema"]),
    ("ema__start", 3, {}, ["ema"]),
    ("ema__update_every", 2, {}, ["ema"]),
    ("checkpoint__every", 1, {}, ["checkpoints"]),
    ("checkpoint__keep", 1, {}, ["checkpoints"]),
    ("checkpoint__keep_every", 2, {"checkpoint__keep": 1}, ["checkpoints"]),
    ("data__shuffle_window", 32, {}, ["losses"]),
    ("data__lanes", 8, {}, ["losses"]),
    ("data__sources__0__repeat", "1/2", {"stages__0__steps": 12}, ["losses"]),
    ("validation__prompts", PROMPTS[:1], GRID, ["grids"]),
    ("validation__every", 1, GRID, ["grids"]),
    ("validation__guidance_scale", 1.0, GRID, ["grids"]),
    ("validation__sampling_steps", 5, GRID, ["grids"]),
    ("validation__scheduler", "euler", EPSILON | GRID, ["grids"]),
    ("validation__loss_by_timestep", True, GRID, ["validation"]),
    ("validation__samples", 16, LOSS, ["validation"]),
    ("validation__timestep_bins", 4, LOSS, ["bins"]),
    ("parallel__precision", "bf16", {}, ["losses"]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "given", "differs"), CASES, ids=[f"{c[0]}={c[1]}" for c in CASES])
def test_a_field_changes_what_it_says(
    latents: dict[str, str], tmp_path: Path, field: str, value: Any, given: dict[str, Any], differs: list[str]
) -> None:
    before = run(tmp_path, latents["dit"], "before", given)
    after = run(tmp_path, latents["dit"], "after", given | {field: value})
    for figure in differs:
        assert before[figure] != after[figure], figure
    if differs == ["ema"]:
        assert before["model"] == after["model"], "the average must not change the weights"


def test_the_same_recipe_does_the_same(latents: dict[str, str], tmp_path: Path) -> None:
    one = run(tmp_path, latents["dit"], "one", LOSS)
    assert one == run(tmp_path, latents["dit"], "two", LOSS)


def test_held_out_sources_are_marked_and_another_source_changes_the_mix(
    latents: dict[str, str], tmp_path: Path
) -> None:
    other = make_latents(tmp_path / "other", seed=5)
    held = LOSS["validation"] | {"sources": [{"uri": other}]}
    found = run(tmp_path, latents["dit"], "held", {"validation": held})
    assert all(row[2] is True for row in found["validation"])
    plain = run(tmp_path, latents["dit"], "plain", LOSS)
    assert found["losses"] == plain["losses"]
    assert found["validation"] != plain["validation"]
    mixed = run(
        tmp_path, latents["dit"], "mixed", {"data__sources": [{"uri": latents["dit"]}, {"uri": other}]}
    )
    assert mixed["losses"] != plain["losses"]


@pytest.fixture
def remote(latents: dict[str, str], tmp_path: Path) -> str:
    """The dataset in a store that is not a disk."""
    import fsspec

    fsspec.filesystem("memory").put(latents["dit"], f"/{tmp_path.name}/data", recursive=True)
    return f"memory://{tmp_path.name}/data"


def test_every_way_to_the_data_trains_the_same_and_grids_find_the_autoencoder(
    latents: dict[str, str], remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE_DIR", str(tmp_path / "cache"))
    plain = run(tmp_path, latents["dit"], "plain", GRID)
    for access in ("stream", "mount", "download"):
        changes = GRID | {"data__access": access, "data__sources": [{"uri": remote}]}
        assert run(tmp_path, "", access, changes) == plain
    assert (tmp_path / "cache").exists()


def test_a_source_may_be_spread_over_several_roots(latents: dict[str, str], tmp_path: Path) -> None:
    first = Path(shutil.copytree(latents["dit"], tmp_path / "first"))
    second = tmp_path / "second"
    second.mkdir()
    for path in sorted(first.glob("part-*"))[::2]:
        path.rename(second / path.name)
    spread = {"data__sources": [{"uri": [str(first), str(second)]}]}
    assert run(tmp_path, "", "spread", spread) == run(tmp_path, latents["dit"], "whole", {})


def test_where_and_how_much_is_cached(
    latents: dict[str, str],
    remote: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE_DIR", str(tmp_path / "default"))
    changes = {"data__access": "download", "data__sources": [{"uri": remote}]}
    place = tmp_path / "chosen"
    run(tmp_path, "", "elsewhere", changes | {"data__cache_directory": str(place)})
    assert place.exists()
    assert f"cache folder {place} has room for" in capsys.readouterr().out
    assert not (tmp_path / "default").exists()
    with pytest.raises(UsageError, match="cache limit of 1,000 bytes is smaller than the largest file"):
        run(tmp_path, "", "tight", changes | {"data__cache_limit": "1 KB"})


def test_a_flipped_bit_is_found_with_checksums_and_not_without(
    latents: dict[str, str], tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(latents["dit"], tmp_path / "damaged"))
    for path in damaged.glob("part-*.16px.parquet"):
        data = bytearray(path.read_bytes())
        data[1000] ^= 1  # within the first row group's latents
        path.write_bytes(data)
    with pytest.raises(CorruptShard, match=r"shard part-0000\d.16px.parquet, row group 0, column latent_"):
        run(tmp_path, str(damaged), "checked", {"stages__0__steps": 12})
    assert run(tmp_path, str(damaged), "unchecked", {"stages__0__steps": 12, "data__checksums": False})


def test_how_many_reads_at_a_time_how_long_a_failing_one_and_how_long_a_step_waits_are_the_recipes(
    latents: dict[str, str], tmp_path: Path
) -> None:
    gone = Path(shutil.copytree(latents["dit"], tmp_path / "gone"))
    text = json.dumps(recipe_data(str(gone), data__read_depth=3))
    recipe = resolve(parse_recipe(text, filename="r").recipe, "local")
    sources = open_sources(recipe, recipe.data.sources)

    def loader(**limits: Any) -> Loader:
        limited = recipe.model_copy(update={"data": recipe.data.model_copy(update=limits)})
        plan = Plan((Segment(0, 0, 0, 8),))
        return make_loader(limited, sources, plan, [16], rank=0, world_size=2, start_step=0)

    with loader() as reading:
        next(reading)
        assert reading.stats()["depth"] == 3
    shutil.rmtree(gone)  # as a mount that went away: it may come back
    with (
        pytest.raises(StorageError, match=r"tried \d+ times in [0-3]\.\d s"),
        loader(retry_budget=0.3) as reading,
    ):
        next(reading)
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"part-\d+"), loader(wait_limit=0.4, retry_budget=60.0) as reading:
        next(reading)
    assert time.monotonic() - began < 20


def test_the_metric_stream_tells_how_the_data_was_read_and_how_sources_were_mixed(
    latents: dict[str, str], tmp_path: Path
) -> None:
    other = make_latents(tmp_path / "other", seed=5)
    both = [{"uri": latents["dit"]}, {"uri": other, "repeat": "1/2"}]
    run(tmp_path, "", "mixed", {"data__sources": both, "stages__0__steps": 24})
    found = rows(tmp_path / "mixed", "data")
    assert found[-1]["step"] == 24
    assert sum(row["bytes"] for row in found) > 24 * 8 * 200
    assert sum(sum(row["latency_histogram"].values()) for row in found) > 0
    last = found[-1]
    assert (last["ranks"], last["wait_rank"], last["retries"], last["throttled"]) == (1, 0, 0, 0)
    assert last["latency_p50_s"] <= last["latency_p99_s"]
    assert last["depth"] >= 1
    assert last["resident_bytes"] > 0
    assert set(last["mix"]) == {latents["dit"], other}
    # 24 steps of 8 are 192 samples: more than two epochs of 48 + 24.
    assert last["mix"][latents["dit"]] == pytest.approx(2 / 3, abs=0.1)
    assert sum(last["mix"].values()) == pytest.approx(1)
    assert "mix" not in run_rows_of_one_source(tmp_path, latents["dit"])[-1]


def run_rows_of_one_source(tmp_path: Path, data: str) -> list[dict[str, Any]]:
    """The rows of kind `data` of a run that has one source."""
    run(tmp_path, data, "single", {})
    return rows(tmp_path / "single", "data")


def test_an_alarm_of_data_wait_names_what_the_counters_show(
    latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the counters say is tested where it is worked out, with real ones; here, that an alarm asks and tells.
    monkeypatch.setattr(loop, "Thresholds", partial(loop.Thresholds, warm_up=0.0))
    monkeypatch.setattr(loop.ReadingLog, "cause", lambda _, seconds: f"9 requests throttled in {seconds:g} s")
    run(tmp_path, latents["dit"], "waits", {"monitor": {"data_wait": {"max": 0.0, "for": "0.001 s"}}})
    alarm, *_ = RunDirectory(tmp_path / "waits").events("alarm")
    assert alarm["cause"] == "9 requests throttled in 0.001 s"
    assert alarm["message"].endswith(" % is above 0 % (over 0.001 s): 9 requests throttled in 0.001 s")


def test_rhythms_by_the_clock_are_kept(latents: dict[str, str], tmp_path: Path) -> None:
    found = run(tmp_path, latents["dit"], "clock", {"checkpoint__every": "0.001 s"})
    assert found["checkpoints"] == [1, 2, 3, 4]


def test_length_in_samples(latents: dict[str, str], tmp_path: Path) -> None:
    stage = {k: v for k, v in TWO["stages"][0].items() if k != "steps"} | {"samples": 24}
    assert run(tmp_path, latents["dit"], "samples", {"stages": [stage]})["samples"] == [8, 16, 24]


def test_a_reached_budget_stops_with_a_checkpoint_and_says_so(
    latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, changes in {
        "hours": {"budget__max_hours": 1e-9},
        "usd": {"budget__max_usd": 1e-6},
    }.items():
        monkeypatch.setenv("ISTHMUS_USD_PER_HOUR", "1000")
        found = run(tmp_path, latents["dit"], name, changes)
        assert found["ending"] == "stopped"
        assert found["checkpoints"] == [1]
        (event,) = RunDirectory(tmp_path / name).events("stop-requested")
        assert event["by"] == "budget"
        assert f"max_{name}" in event["reason"]


def test_memory_limit_is_refused_before_training(latents: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="memory"):
        run(tmp_path, latents["dit"], "memory", {"data__memory_limit": 1000})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stages__0__resolution", 64),
        ("stages__0__token_mask_ratio", 1.0),
        ("code", "./mine"),
        ("validation__prompts", ["never encoded"]),
        ("encoders__text__0__max_tokens", 7),
        ("encoders__autoencoder__factor", 8),
        ("data__sources__0__uri", "/nowhere"),
        ("model__config__in_channels", 8),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    latents: dict[str, str], tmp_path: Path, field: str, value: Any
) -> None:
    with pytest.raises(IsthmusError) as caught:
        run(tmp_path, latents["dit"], "refused", {field: value})
    assert caught.value.exit_code == 2
    assert not (tmp_path / "refused" / "checkpoints").exists()


def test_settings_of_how_a_step_is_computed_take_hold() -> None:
    def engine(**changes: Any) -> Any:
        model = build_from_config("PixArtTransformer2DModel", MODELS["dit"], 0)
        optimizer = Optimizer(**changes.pop("optimizer", {}))
        return prepare(model, optimizer, Parallel(precision="fp32", **changes), cpu=True)

    assert engine(strategy="ddp").optimizer.defaults["foreach"] is True
    assert engine(strategy="ddp", optimizer={"implementation": "fused"}).optimizer.defaults["fused"] is True
    assert engine(strategy="ddp", activation_checkpointing=True).model.is_gradient_checkpointing
    assert engine(strategy="ddp", compile="aot_eager").model.transformer_blocks[0]._compiled_call_impl
    assert engine(strategy="ddp").model.transformer_blocks[0]._compiled_call_impl is None
    assert shard_size(Parallel(strategy="hsdp"), 16, 8) == 8
    assert shard_size(Parallel(strategy="hsdp", shard_size=4), 16, 8) == 4
    for bad in (3, 1):
        with pytest.raises(UsageError, match="shard_size"):
            shard_size(Parallel(strategy="hsdp", shard_size=bad), 16, 8)


def test_micro_batch_size_sets_the_number_of_passes(
    latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.core.train import step as module

    sizes: list[int] = []
    original = module.predict

    def counted(model: Any, family: str, noisy: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(noisy))
        return original(model, family, noisy, *rest)

    monkeypatch.setattr(module, "predict", counted)
    run(tmp_path, latents["dit"], "micro", {"stages__0__micro_batch_size": 2})
    assert sizes == [2, 2, 2, 2] * 4


def test_steps_that_are_not_finite_are_skipped_counted_and_in_the_end_fatal(
    latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, poisoned = Stepper.prepare, {1, 2}

    def prepare_poisoned(self: Stepper, batch: Any, objective: Any) -> Any:
        prepared = original(self, batch, objective)
        if batch.step in poisoned:
            prepared.noised.noisy[0, 0, 0, 0] = math.nan
        return prepared

    monkeypatch.setattr(Stepper, "prepare", prepare_poisoned)
    run(tmp_path, latents["dit"], "some", {})
    found = rows(tmp_path / "some")
    assert [row["skipped"] for row in found] == [False, True, True, False]
    assert [row["loss"] is None for row in found] == [False, True, True, False]
    assert '"skipped": 2' in (tmp_path / "some/checkpoints/step-00000004/trainer.json").read_text()

    poisoned |= set(range(1000))
    changes = {"stages__0__steps": 60, "checkpoint__every": 1000, "watchdog__nonfinite_steps": 12}
    with pytest.raises(TrainingFailed, match="12 steps in a row"):
        run(tmp_path, latents["dit"], "all", changes)
    assert len(rows(tmp_path / "all")) <= 12
    assert not (tmp_path / "all" / "checkpoints").exists()


def test_accelerates_own_variables_have_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = build_from_config("PixArtTransformer2DModel", MODELS["dit"], 0)
    engine = prepare(model, Optimizer(), Parallel(strategy="ddp", precision="fp32"), cpu=True)
    assert not engine.sharded
    assert engine.accelerator.mixed_precision == "no"
    assert "ACCELERATE_USE_FSDP" not in os.environ
