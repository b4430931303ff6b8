"""Checks that need more than one field. Every problem is found at once, each with its fix where there is one.

A field that another field's choice would leave without effect is refused too: what a recipe says, it does.
"""

from __future__ import annotations

from isthmus.core.recipe.checks_alive import check_alive
from isthmus.core.recipe.checks_batches import check_batches
from isthmus.core.recipe.checks_data import check_data
from isthmus.core.recipe.checks_model import check_model
from isthmus.core.recipe.checks_objective import check_objectives
from isthmus.core.recipe.checks_places import check_places
from isthmus.core.recipe.checks_tokens import check_tokens
from isthmus.core.recipe.encoding import check_encoding
from isthmus.core.recipe.hub import check_hub
from isthmus.core.recipe.problems import Problem, closest
from isthmus.core.recipe.schema import Recipe


def check(recipe: Recipe) -> list[Problem]:
    """All problems of a recipe whose fields are valid one by one."""
    if recipe.encode is not None:
        return check_encoding(recipe)
    return [
        *check_batches(recipe),
        *check_data(recipe),
        *check_alive(recipe),
        *check_model(recipe),
        *check_hub(recipe),
        *check_objectives(recipe),
        *check_places(recipe),
        *_stages(recipe),
        *_parallel(recipe),
        *_validation(recipe),
        *_monitor(recipe),
        *_budget(recipe),
        *check_tokens(recipe),
    ]


def _stages(recipe: Recipe) -> list[Problem]:
    problems = []
    seen: dict[str, int] = {}
    for index, stage in enumerate(recipe.stages):
        if stage.name in seen:
            message = f"`{stage.name}` is already the name of stages[{seen[stage.name]}]"
            problems.append(Problem(("stages", index, "name"), message))
        seen.setdefault(stage.name, index)
        for number, prompt in enumerate(stage.validation.prompts or []):
            if prompt not in recipe.validation.prompts:
                guess = closest(prompt, recipe.validation.prompts)
                problems.append(
                    Problem(
                        ("stages", index, "validation", "prompts", number),
                        "is not among validation.prompts, whose embeddings are stored beside the shards",
                        f"did you mean `{guess}`?" if guess else "add it to validation.prompts",
                    )
                )
    if recipe.stages[0].on_enter.model_fields_set:
        problems.append(
            Problem(("stages", 0, "on_enter"), "the first stage inherits no state", "leave it out")
        )
    return problems


def _parallel(recipe: Recipe) -> list[Problem]:
    parallel, compute = recipe.parallel, recipe.compute
    path = ("parallel", "shard_size")
    if parallel.strategy != "hsdp":
        if "shard_size" not in parallel.model_fields_set:
            return []
        return [Problem(path, f"is of hsdp; parallel.strategy is {parallel.strategy}", "leave it out")]
    world_size = compute.nodes * compute.gpus_per_node
    size = parallel.shard_size or compute.gpus_per_node
    if world_size % size:
        from isthmus.core.recipe.batches import divisors

        fits = ", ".join(str(divisor) for divisor in divisors(world_size)[1:])
        return [Problem(path, f"{size} does not divide the world size {world_size}", f"can be {fits}")]
    if size == 1:
        message = "hsdp with one rank to a shard shards nothing"
        return [Problem(("parallel", "strategy"), message, "ddp, or a larger parallel.shard_size")]
    return []


def _validation(recipe: Recipe) -> list[Problem]:
    validation = recipe.validation
    written = validation.model_fields_set
    problems: list[Problem] = []

    def unused(fields: tuple[str, ...], message: str, hint: str) -> None:
        problems.extend(Problem(("validation", field), message, hint) for field in fields if field in written)

    if not validation.loss_by_timestep:
        fields = ("sources", "samples", "timestep_bins")
        unused(
            fields, "has no effect without validation.loss_by_timestep", "set it to true, or leave this out"
        )
        for index, stage in enumerate(recipe.stages):
            if stage.validation.timestep_bins is not None:
                path = ("stages", index, "validation", "timestep_bins")
                problems.append(Problem(path, "has no effect without validation.loss_by_timestep"))
    if not validation.prompts:
        fields = ("guidance_scale", "sampling_steps", "scheduler")
        unused(fields, "has no effect without validation.prompts", "give prompts, or leave this out")
        if not validation.loss_by_timestep:
            unused(("every",), "has no effect without prompts or loss_by_timestep", "leave it out")
    return problems


def _monitor(recipe: Recipe) -> list[Problem]:
    if not recipe.monitor.model_fields_set:
        return []
    from isthmus.core.telemetry.limits import unmeasurable

    return [
        Problem(tuple(path.split(".")), message)
        for path, message in unmeasurable(recipe.monitor, recipe.compute)
    ]


PEAK_FLOPS = {
    "a100-40gb": 312e12,
    "a100-80gb": 312e12,
    "h100-80gb": 989e12,
    "h200-141gb": 989e12,
    "b200-180gb": 2250e12,
    "l40s-48gb": 362e12,
    "a10g-24gb": 125e12,
}
"""Dense bf16 peak of one GPU in FLOP/s, NVIDIA's data sheets; where forms differ, the highest."""


def _budget(recipe: Recipe) -> list[Problem]:
    """Refuses a time cap that the stages could not meet even at the hardware's peak."""
    cap, compute = recipe.budget.max_hours, recipe.compute
    if cap is None or compute.gpu == "none":
        return []
    from isthmus.core.models.presets import PRESETS
    from isthmus.core.models.profiles import profile

    if recipe.model.preset is not None and recipe.model.preset not in PRESETS:
        return []
    known = profile(recipe.model)
    if known is None:
        return []
    flops = 0.0
    for stage in recipe.stages:
        samples = stage.samples or (stage.steps or 0) * stage.global_batch_size
        flops += known.train_flops.get(stage.resolution, 0) * samples
    hours = flops / (PEAK_FLOPS[compute.gpu] * compute.nodes * compute.gpus_per_node) / 3600
    if hours <= cap:
        return []
    message = f"{cap:g} hours cannot be enough: the stages need {hours:.3g} hours even at the GPUs' peak"
    return [Problem(("budget", "max_hours"), message, "raise it, shorten the stages, or use more GPUs")]
