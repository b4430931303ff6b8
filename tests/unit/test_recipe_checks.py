"""Checks across fields: each refusal names the settings that disagree and what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.recipe import load_recipe, parse_recipe
from isthmus.core.recipe.batches import divisors, nearest_multiple, world_sizes
from isthmus.core.recipe.summary import admitted_world_sizes
from isthmus.errors import RecipeError

SMALL = str(Path(__file__).with_name("small_recipe.yaml"))


def problems(recipe: str, overrides: list[str]) -> list[str]:
    try:
        load_recipe(recipe, overrides)
    except RecipeError as error:
        return error.problems
    return []


def drop(field: str) -> str:
    """The small recipe's text without the line of a field."""
    lines = Path(SMALL).read_text("utf-8").splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith(field))


REFUSED = [
    # world size | lanes | batch, and accumulation
    ("sdxl-progressive", ["stages.1.global_batch_size=1000"],
     "stages[1].global_batch_size 1000 is not divisible by data.lanes 128 (nearest: 1024, which admits world sizes"
     " 1, 2, 4, 8, 16, 32, 64, 128)"),
    ("sdxl-progressive", ["data.lanes=100"], "data.lanes 100 is not divisible by the world size 128"
     " (compute.nodes 16 x compute.gpus_per_node 8) (nearest: 128; 100 lanes admit 1, 2, 4, 5, 10, 20, 25, 50, 100 ranks)"),
    (SMALL, ["stages.0.micro_batch_size=24"], "stages[0].micro_batch_size 24: global_batch_size 64 is not divisible"
     " by world size 2 x micro_batch_size 24 = 48 (micro_batch_size can be 1, 2, 4, 8, 16, 32;"),
    (SMALL, ["stages.0.micro_batch_size=64"], "global_batch_size 64 is not divisible by world size 2 x"),
    (SMALL, ["data.shuffle_window=3"], "data.shuffle_window 3 is below data.lanes 4"),
    (SMALL, ["data.memory_limit=100 kB"], "must be a size such as"),
    (SMALL, ["data.memory_limit=1 MB"], "data.memory_limit: 0.001 GB cannot hold a rank's 128 rows"),
    # how data is read
    (SMALL, ["data.cache_limit=1 TB"], "data.cache_limit: has no effect: only download keeps a cache; data.access is stream"),
    (SMALL, ["data.access=mount", "data.cache_directory=/fast"], "data.cache_directory: has no effect: only download"),
    (SMALL, ["data.access=download", "data.cache_directory=s3://b/c"], "data.cache_directory: is a folder of the node"),
    (SMALL, ["data.retry_budget=10 min"], "data.retry_budget: a failing read is tried again for 600 s, but a step waits no"
     " longer than data.wait_limit 600 s"),
    # staying alive
    (SMALL, ["watchdog.limit=10 min"], "watchdog.limit: 600 s is not above data.wait_limit 600 s"),
    (SMALL, ["watchdog.collective_timeout=11 min"], "watchdog.collective_timeout: 660 s is not above watchdog.limit 660 s"),
    (SMALL, ["watchdog.limit=soon"], "watchdog.limit: must be one of `auto` or a duration such as `30 s`"),
    (SMALL, ["watchdog.straggler_factor=2", "compute.gpus_per_node=1"], "watchdog.straggler_factor: has no effect: there is one rank"),
    (SMALL, ["on_loss_spike={skip: 5}"], "on_loss_spike.skip: is of rewind; on_loss_spike.action is alarm"),
    (SMALL, ["on_loss_spike={action: resume}"], "on_loss_spike.action: must be one of `alarm`, `rewind`, not `resume`"),
    (SMALL, ["trackers=[tensorboard, {name: tensorboard}]"], "trackers[1]: tensorboard is named twice"),
    (SMALL, ["trackers=[tensorbord]"], "trackers[0]: must be one of `tensorboard`, `mlflow`, `wandb`"),
    (SMALL, ["trackers=[{name: tensorboard, project: x}]"], "trackers[0].project: has no effect: tensorboard writes into"),
    (SMALL, ["trackers=[{name: wandb, options: {api_key: abcd}}]"], "a recipe holds no secrets"),
    (SMALL, ["data.read_depth=0"], "data.read_depth: must be one of `auto` or above 0, not 0"),
    (SMALL, ["data.read_depth=fast"], "data.read_depth: must be one of `auto` or a whole number, not `fast`"),
    # lengths
    (SMALL, ["stages.0.samples=640"], "needs exactly one of `steps` and `samples`, and has both"),
    ("pixart-512", ["stages.1.samples=25_600_001"], "stages[1].samples 25600001 is not a multiple of"
     " global_batch_size 512 (nearest: 25600000)"),
    (SMALL, ["stages.0.steps=50"], "stages[0].lr_warmup_steps: 50 is not shorter than the stage's 50 steps"),
    ("pixart-512", ["stages.1.samples=51200"], "500 is not shorter than the stage's 100 steps"),
    # names and prompts
    ("sdxl-progressive", ["stages.2.name=256px"], "stages[2].name: `256px` is already the name of stages[0]"),
    ("sdxl-progressive", ["encoders.text.1.name=clip_l"], "`clip_l` is already the name of encoders.text[0]"),
    (SMALL, ["stages.0.validation.prompts=[red hart]"], "is not among validation.prompts, whose embeddings are"
     " stored beside the shards (did you mean `red heart`?)"),
    (SMALL, ["stages.0.on_enter.optimizer=reset"], "stages[0].on_enter: the first stage inherits no state"),
    # the model
    (SMALL, ["model.preset=quikstart"], "there is no preset `quikstart` (did you mean `quickstart`?)"),
    (SMALL, ["model.preset=sdxl"], "sdxl is a unet, model.family is dit (presets of dit: pixart-512, quickstart)"),
    (SMALL, ["model={family: dit}"], "model: needs a `preset`, a `config`, or both"),
    (SMALL, ["model.config.num_layer=4"], "is not an argument of PixArtTransformer2DModel (did you mean `num_layers`?)"),
    (SMALL, ["model.config.num_layers='4'"], "model.config.num_layers: must be a whole number above 0"),
    (SMALL, ["model.config.patch_size=0"], "model.config.patch_size: must be a whole number above 0"),
    (SMALL, ["model.config.out_channels=33"], "out_channels 33 is neither in_channels 32 nor twice that"),
    ("sdxl-progressive", ["model.config.block_out_channels=320"], "model.config.block_out_channels: must be a list"),
    (SMALL, ["encoders.autoencoder.latent_channels=16"], "latent_channels 16 is not the model's in_channels 32"),
    (SMALL, ["encoders.autoencoder.latent_channels=49", "model.config.in_channels=49", "model.config.out_channels=49"],
     "49 is more than the 48 values of a patch of factor 4"),
    # resolutions
    ("sdxl-progressive", ["stages.0.resolution=272"], "stages[0].resolution 272 is not a multiple of 32 (autoencoder factor 8"
     " x the model's down-sampling 4) (nearest: 256)"),
    ("pixart-512", ["stages.0.resolution=200"], "200 is not a multiple of 16 (autoencoder factor 8 x the model's patch_size 2)"),
    ("sd3-medium", ["stages.2.resolution=4096"], "4096 px are 256 patches a side, pos_embed_max_size is 192 (at most 3072)"),
    ("sdxl-progressive", ["data.buckets.step=40"], "data.buckets.step: 40 is not a multiple of 32"),
    (SMALL, ["data.buckets.step=8"], "data.buckets.step: has no effect while min_ratio and max_ratio are 1"),
    # text
    ("sdxl-progressive", ["encoders.text.0.width=1024"], "the text is 1024 + 1280 = 2304 wide, which is not the model's"
     " cross_attention_dim 2048"),
    ("sdxl-progressive", ["encoders.text.0.max_tokens=64"], "encoders.text[1].max_tokens: 77 is not the 64 of clip_l"),
    ("sdxl-progressive", ["encoders.text.1.pooled_width=1024"], "1024 is not the 1280 that the model takes"),
    ("sdxl-progressive", ["encoders.text.0.pooled_width=768"], "would be unused: this unet takes the last one's pooled"),
    (SMALL, ["encoders.text.0.width=768"], "encoders.text[0].width: the text is 768 wide, which is not the model's"
     " caption_channels 384"),
    (SMALL, ["encoders.text.0.pooled_width=384"], "would be unused: a dit takes no pooled vector"),
    (SMALL, ["encoders.text.1={name: b, kind: minilm, source: x, max_tokens: 10, width: 384}"],
     "a dit takes one text encoder, not 2"),
    ("sd3-medium", ["encoders.text.2.width=2048"], "encoders.text[2].width: 2048 is not the model's joint_attention_dim 4096"),
    ("sd3-medium", ["encoders.text.0.width=4000"], "4000 + 1280 = 5280 wide, which is more than the model's joint_attention_dim"),
    ("sd3-medium", ["encoders.text.0.pooled_width=1024"], "pooled widths 1024 + 1280 = 2304 are not the model's"
     " pooled_projection_dim 2048"),
    ("sd3-medium", ["encoders.text.2.pooled_width=4096"], "t5 has no pooled vector"),
    ("sd3-medium", ["encoders.text.0.max_tokens=78", "encoders.text.1.max_tokens=78"], "78 is more than the 77 positions of clip"),
    # the objective
    ("sdxl-progressive", ["objective.shift=3"], "objective.shift: is of prediction_type flow; it is epsilon"),
    ("sdxl-progressive", ["stages.0.objective.shift=3"], "stages[0].objective.shift: is of prediction_type flow"),
    ("sdxl-progressive", ["objective.snr_gamma=5"], "objective.snr_gamma: is of weighting_scheme min_snr and soft_min_snr; it is none"),
    (SMALL, ["objective.weighting_scheme=min_snr"], "objective.weighting_scheme: min_snr is defined for epsilon and"),
    (SMALL, ["objective.noise_schedule=linear"], "is of prediction_type epsilon and v_prediction; it is flow"),
    ("sdxl-progressive", ["objective.logit_std=1"], "objective.logit_std: is of timestep_sampling logit_normal; it is uniform"),
    (SMALL, ["objective.mode_scale=1"], "objective.mode_scale: is of timestep_sampling mode; it is logit_normal"),
    (SMALL, ["validation.scheduler=ddim"], "validation.scheduler: ddim cannot sample prediction_type flow (auto or"),
    ("sdxl-progressive", ["validation.scheduler=flow_match_euler"], "cannot sample prediction_type epsilon (auto, ddim,"),
    ("sd3-medium", ["stages.1.objective.prediction_type=epsilon"], "stages[1].objective.shift: is of prediction_type flow"),
    ("sd3-medium", ["objective.shift=2", "stages.0.objective.prediction_type=epsilon"],
     "stages[0].objective: inherits objective.shift 2, which only flow has (set shift in the stages that use flow)"),
    ("sdxl-progressive", ["objective.weighting_scheme=min_snr", "stages.1.objective.prediction_type=flow"],
     "stages[1].objective.weighting_scheme: min_snr is defined for epsilon and v_prediction"),
    # what another choice leaves without effect
    (SMALL, ["parallel.shard_size=2"], "parallel.shard_size: is of hsdp; parallel.strategy is fsdp"),
    ("sdxl-progressive", ["parallel.shard_size=3"], "3 does not divide the world size 128 (can be 2, 4, 8, 16, 32, 64, 128)"),
    ("sdxl-progressive", ["parallel.shard_size=1"], "hsdp with one rank to a shard shards nothing"),
    (SMALL, ["validation.loss_by_timestep=false", "validation.samples=64"], "validation.samples: has no effect without"),
    (SMALL, ["validation={every: 500 steps}"], "validation.every: has no effect without prompts or loss_by_timestep"),
    (SMALL, ["validation={guidance_scale: 3}"], "validation.guidance_scale: has no effect without validation.prompts"),
    (SMALL, ["validation.loss_by_timestep=false", "stages.0.validation.timestep_bins=4"], "has no effect without"),
    # machines
    (SMALL, ["monitor.gpu_memory.min=70"], "monitor.gpu_memory: cannot be measured: compute.gpu is none"),
    ("sdxl-progressive", ["monitor.gpu_memory={}"], "monitor.gpu_memory: neither min nor max is set"),
    ("sdxl-progressive", ["monitor.gpu_utilization.min=800"], "is a mean percentage, 0 to 100"),
    ("sdxl-progressive", ["budget.max_hours=24"], "24 hours cannot be enough: the stages need 52.8 hours even at the GPUs' peak"),
    # backends
    (SMALL, ["compute.offers=[{backend: sagemkaer}]"], "`sagemkaer` is not a backend (did you mean `sagemaker`?)"),
    (SMALL, ["backends.Azure={}"], "backends.Azure: `Azure` is not a backend (did you mean `azure`?)"),
    (SMALL, ["run_directory={local: ./r}", "compute.offers=[{backend: azure}]"],
     "compute.offers[0].backend: azure has no place in run_directory"),
    ("sdxl-progressive", ["compute.offers.3={backend: azure, region: italynorth, tier: spot}"], "is the same as an offer before"),
    # not in this version
    (SMALL, ["code=./mine"], "code: is of a model.family of your own; dit is one of isthmus's (leave it out)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"), REFUSED, ids=[" ".join(row[1])[:60] for row in REFUSED]
)
def test_refused(recipe: str, overrides: list[str], words: str) -> None:
    found = problems(recipe, overrides)
    assert any(words in line for line in found), found
    assert all("\n" not in line for line in found)


ACCEPTED = [
    (SMALL, ["compute.gpus_per_node=1"]),
    (SMALL, ["compute.gpus_per_node=4", "stages.0.micro_batch_size=16"]),
    (SMALL, ["stages.0.micro_batch_size=8"]),
    (SMALL, ["model.config.num_layers=2"]),
    (SMALL, ["parallel.strategy=hsdp"]),
    (SMALL, ["parallel={strategy: hsdp, shard_size: 2, precision: bf16}"]),
    (SMALL, ["objective={prediction_type: epsilon, weighting_scheme: min_snr, snr_gamma: 3}"]),
    (SMALL, ["objective={prediction_type: v_prediction, noise_schedule: linear, timestep_sampling: mode, mode_scale: 1}"]),
    (SMALL, ["objective={prediction_type: epsilon}", "validation.scheduler=dpmsolver"]),
    (SMALL, ["objective={timestep_sampling: logit_normal, logit_mean: 0.5, logit_std: 2, shift: 3}"]),
    (SMALL, []),
    (SMALL, ["data.buckets={step: 8, min_ratio: 0.5, max_ratio: 2}"]),
    (SMALL, ["backends.some-plugin.setting=3", "compute.offers=[{backend: some-plugin}]"]),
    (SMALL, ["data.access=download", "data.cache_limit=1 TB", "data.cache_directory=/fast"]),
    (SMALL, ["data.read_depth=8", "data.checksums=false", "data.retry_budget=20 s", "data.wait_limit=30 s"]),
    (SMALL, ["data.wait_limit=2 h"]),
    (SMALL, ["watchdog={limit: 20 min, collective_timeout: 30 min, disk_free: 1 GB}", "trackers=[mlflow, {name: wandb}]"]),
    (SMALL, ["on_loss_spike={action: rewind, skip: 10, max_rewinds: 1}"]),
    ("sdxl-progressive", ["compute.nodes=8"]),
    ("sdxl-progressive", ["model.config.attention_head_dim=8", "budget.max_hours=9000"]),
    ("sdxl-progressive", ["data.lanes=1920", "stages.0.global_batch_size=1920", "stages.0.micro_batch_size=15",
                          "stages.1.global_batch_size=1920", "stages.1.micro_batch_size=15",
                          "stages.2.global_batch_size=1920", "stages.2.micro_batch_size=3"]),
    ("sdxl-progressive", ["stages.2.objective={prediction_type: v_prediction, weighting_scheme: min_snr}"]),
    ("sd3-medium", ["encoders.text=[{name: g, kind: clip, source: x, max_tokens: 77, width: 1280, pooled_width: 2048}]"]),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "overrides"), ACCEPTED)
def test_accepted(recipe: str, overrides: list[str]) -> None:
    assert problems(recipe, overrides) == []


def test_a_length_is_needed() -> None:
    with pytest.raises(RecipeError, match="needs exactly one of `steps` and `samples`, and has neither"):
        parse_recipe(drop("steps:"), filename="r.yaml")


def test_world_sizes_of_the_design() -> None:
    assert world_sizes(1920, 1920)[-4:] == [480, 640, 960, 1920]
    assert {128, 120, 96, 64} <= set(world_sizes(1920, 1920))
    assert world_sizes(128, 2048, 16) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert world_sizes(128, 2048, 32) == [1, 2, 4, 8, 16, 32, 64]
    assert world_sizes(128, 1000) == []
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert (nearest_multiple(1000, 128), nearest_multiple(1, 128), nearest_multiple(192, 128)) == (
        1024,
        128,
        256,
    )


def test_admitted_world_sizes_are_those_that_load() -> None:
    recipe = load_recipe(SMALL, ["stages.0.micro_batch_size=16"]).recipe
    assert admitted_world_sizes(recipe) == [1, 2, 4]
    for size in range(1, 9):
        found = problems(SMALL, ["stages.0.micro_batch_size=16", f"compute.gpus_per_node={size}"])
        assert (found == []) == (size in (1, 2, 4)), found


def test_a_rank_that_waits_for_data_speaks_before_the_watchdog_and_that_before_the_process_group() -> None:
    for overrides in ([], ["data.wait_limit=2 h"], ["watchdog.limit=20 min"]):
        recipe = load_recipe(SMALL, overrides).recipe
        wait, watchdog = recipe.data.wait_limit, recipe.watchdog
        assert wait < watchdog.limit_s(wait) < watchdog.collective_timeout_s(wait)


def test_a_mistake_shared_by_all_stages_is_told_once() -> None:
    assert len(problems("sdxl-progressive", ["objective.shift=2"])) == 1
    assert len(problems("sdxl-progressive", ["validation.scheduler=flow_match_euler"])) == 1
