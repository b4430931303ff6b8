"""No field of the recipe without a test that shows what it does: a new one must name its test here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.core.recipe.json_schema import descriptions, recipe_schema
from isthmus.core.recipe.stages import EMA, EMAOverride, Objective, ObjectiveOverride

TESTS = Path(__file__).parents[1]
FIELDS = "e2e/test_train_fields.py"
OPTIM = "e2e/test_optim_fields.py"
ALIVE = "e2e/test_alive_fields.py"
PICTURES = "unit/test_encode_inputs.py"
KEPT = "unit/test_encode_fields.py"

SHOWN: dict[str, dict[str, str]] = {
    "Recipe": {
        "version": "unit/test_recipe_load.py", "name": "unit/test_recipe_load.py", "seed": FIELDS, "model": FIELDS,
        "encoders": "e2e/test_export.py", "data": FIELDS, "objective": FIELDS, "optimizer": FIELDS, "stages": FIELDS,
        "parallel": FIELDS, "ema": FIELDS, "checkpoint": FIELDS, "validation": FIELDS, "compute": "faults/test_worker_nodes_training.py",
        "run_directory": "e2e/test_launch_local.py", "code": "e2e/test_own_denoiser.py",
        "monitor": "unit/test_telemetry_thresholds.py", "watchdog": ALIVE, "on_loss_spike": ALIVE, "trackers": ALIVE,
        "budget": "unit/test_train_control.py", "encode": "e2e/test_encode_jobs.py", "backends": "e2e/test_launch_local.py",
    },
    "Model": {
        "family": "e2e/test_train_families.py", "preset": "unit/test_profiles.py", "config": FIELDS,
        "init_from": "e2e/test_train_init.py", "patch_mixer": FIELDS, "guidance_embedding": "unit/test_families.py",
    },
    "PatchMixer": {
        "layers": "unit/test_patch_mixer.py", "width": "unit/test_patch_mixer.py", "head_width": "unit/test_patch_mixer.py",
        "mlp_ratio": FIELDS,
    },
    "Encoders": dict.fromkeys(("autoencoder", "text"), "e2e/test_export.py"),
    "Autoencoder": {
        "kind": "e2e/test_export.py", "source": "e2e/test_export.py",
        "latent_channels": "unit/test_encode_autoencoders.py", "factor": "unit/test_encode_autoencoders.py",
    },
    "TextEncoder": dict.fromkeys(
        ("name", "kind", "source", "max_tokens", "width", "pooled_width"), "unit/test_encode_text.py"
    ),
    "Data": {
        **dict.fromkeys(
            ("sources", "access", "shuffle_window", "lanes", "memory_limit", "checksums", "read_depth", "retry_budget",
             "wait_limit", "cache_limit", "cache_directory"), FIELDS,
        ),
        "allow_changed": "e2e/test_saving_input.py", "buckets": "unit/test_encode.py", "pictures": PICTURES,
    },
    "Source": {"uri": FIELDS, "repeat": FIELDS},
    "Buckets": dict.fromkeys(("step", "min_ratio", "max_ratio"), "unit/test_encode_buckets.py"),
    "Pictures": {
        **dict.fromkeys(
            ("image", "key", "captions", "provenance", "min_side", "min_ratio", "max_ratio", "scores", "licence",
             "licences"), PICTURES,
        ),
        **dict.fromkeys(("keep", "phash"), KEPT),
    },
    "CaptionField": dict.fromkeys(("field", "weight"), PICTURES),
    "KeptField": dict.fromkeys(("field", "kind", "name"), KEPT),
    "Bounds": dict.fromkeys(("min", "max"), PICTURES),
    "Objective": {
        **dict.fromkeys(
            ("prediction_type", "noise_schedule", "timestep_sampling", "logit_mean", "logit_std", "mode_scale", "shift",
             "weighting_scheme", "snr_gamma", "noise_offset", "caption_dropout"), FIELDS,
        ),
        "quasi_random": OPTIM, "p2_gamma": OPTIM,
    },
    "Optimizer": {
        **dict.fromkeys(("betas", "eps", "weight_decay", "implementation"), FIELDS),
        **dict.fromkeys(("name", "momentum", "weight_decay_on"), OPTIM),
    },
    "Stage": {
        **dict.fromkeys(
            ("name", "resolution", "steps", "samples", "global_batch_size", "micro_batch_size", "learning_rate",
             "lr_scheduler", "lr_warmup_steps", "max_grad_norm", "objective", "ema", "on_enter", "validation",
             "pos_embed_interpolation", "token_mask_ratio"), FIELDS,
        ),
    },
    "EMA": dict.fromkeys(("decay", "start", "update_every"), FIELDS),
    "OnEnter": dict.fromkeys(("optimizer", "ema"), FIELDS),
    "StageValidation": dict.fromkeys(("timestep_bins", "prompts"), FIELDS),
    "Parallel": {
        **dict.fromkeys(("precision", "strategy"), FIELDS), "shard_size": "e2e/test_train_parallel.py",
        "compile": "e2e/test_train_parallel.py", "activation_checkpointing": "e2e/test_train_parallel.py",
        "deterministic": OPTIM,
    },
    "Checkpoint": {
        **dict.fromkeys(("every", "keep", "keep_every", "wait_limit", "retry_budget"), FIELDS),
        "asynchronous": "unit/test_saving.py",
    },
    "Validation": dict.fromkeys(
        ("prompts", "every", "loss_by_timestep", "sources", "samples", "timestep_bins", "guidance_scale", "sampling_steps",
         "scheduler"), FIELDS,
    ),
    "Offer": {
        "backend": "unit/test_supervisor.py", "region": "unit/test_sagemaker_render.py", "tier": "unit/test_sagemaker_render.py",
        "sku": "unit/test_sagemaker_lint.py",
    },
    "Compute": {
        "nodes": "faults/test_worker_nodes_training.py", "gpus_per_node": "faults/test_worker_nodes_training.py", "gpu": "unit/test_memory_fit.py",
        "offers": "unit/test_supervisor.py", "max_restarts": "unit/test_supervisor.py",
    },
    "Threshold": dict.fromkeys(("min", "max", "for"), "unit/test_telemetry_thresholds.py"),
    "Monitor": {
        "gpu_utilization": "unit/test_telemetry_thresholds.py", "gpu_memory": "unit/test_telemetry_thresholds.py",
        "gpu_energy_kilojoules": "unit/test_telemetry_thresholds.py",
        "fabric_gigabytes_per_s": "unit/test_telemetry_thresholds.py", "data_wait": "unit/test_telemetry_thresholds.py",
    },
    "Watchdog": {
        **dict.fromkeys(("limit", "collective_timeout", "straggler_factor", "straggler_for", "disk_free"), ALIVE),
        "nonfinite_steps": FIELDS,
    },
    "LossSpike": dict.fromkeys(("action", "z_score", "window", "lasts", "skip", "max_rewinds"), ALIVE),
    "Tracker": dict.fromkeys(("name", "project", "every", "options"), "unit/test_alive_trackers.py"),
    "Budget": dict.fromkeys(("max_usd", "max_hours"), "unit/test_train_control.py"),
    "Encode": {
        **dict.fromkeys(("source", "dest", "batch_size"), "e2e/test_encode_jobs.py"),
        **dict.fromkeys(("captions", "precision", "unit", "access"), "unit/test_encode_jobs.py"), "threads": PICTURES,
        "origin": "unit/test_encode_mounted.py",
    },
}  # fmt: skip
"""Section -> field -> the test file that shows what it changes."""
OBJECTIVE = {
    "prediction_type": "epsilon", "noise_schedule": "linear", "timestep_sampling": "mode", "quasi_random": True,
    "logit_mean": 1.0, "logit_std": 2.0, "mode_scale": 1.0, "shift": 3.0, "weighting_scheme": "cosmap", "snr_gamma": 2.0,
    "p2_gamma": 0.5, "noise_offset": 0.1, "caption_dropout": 0.2,
}  # fmt: skip
AVERAGE = {"decay": 0.5, "start": 3, "update_every": 2}

OVERRIDES = {"ObjectiveOverride": "Objective", "EMAOverride": "EMA"}
"""Sections that change another one within a stage, field by field."""


def test_a_stage_changes_each_field_of_objective_and_ema() -> None:
    for override, of, changes in ((ObjectiveOverride, Objective, OBJECTIVE), (EMAOverride, EMA, AVERAGE)):
        assert set(override.model_fields) == set(changes)
        for field, value in changes.items():
            changed = override.model_validate({field: value}).over(of())  # type: ignore[attr-defined]
            assert changed == of().model_copy(update={field: value}) != of()
            assert override().over(changed) == changed  # type: ignore[attr-defined]


def test_each_field_names_the_test_that_shows_what_it_does() -> None:
    documented = {name: set(fields) for name, (_, fields) in descriptions().items() if fields}
    documented["Threshold"] = {field.rstrip("_") for field in documented["Threshold"]}
    for override, of in OVERRIDES.items():
        assert documented.pop(override) == documented[of], "a stage can change what the recipe says"
    assert {name: set(fields) for name, fields in SHOWN.items()} == documented
    reached = set(recipe_schema()["$defs"]) - set(OVERRIDES) | {"Recipe"}
    assert reached - {"Interval"} <= set(SHOWN)


@pytest.mark.parametrize("section", SHOWN)
def test_the_test_that_is_named_speaks_of_the_field(section: str) -> None:
    for field, file in SHOWN[section].items():
        text = (TESTS / file).read_text("utf-8")
        assert re.search(rf"(?<![a-z]){field}(?![a-z])", text), f"{section}.{field} in {file}"
