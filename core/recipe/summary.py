"""What a recipe amounts to: parameters, world sizes, samples and compute of each stage."""

from __future__ import annotations

from typing import Any

from isthmus.core.recipe.schema import Recipe


def title(text: str) -> str:
    """The first comment of a recipe's text: its one-line description."""
    for line in text.splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").rstrip()
    return ""


def admitted_world_sizes(recipe: Recipe) -> list[int]:
    """World sizes that lanes and all stages' batch sizes admit, ascending."""
    from isthmus.core.recipe.batches import world_sizes

    lanes = recipe.data.lanes
    batches = [(stage.global_batch_size, stage.micro_batch_size) for stage in recipe.stages]
    return sorted(set.intersection(*({*world_sizes(lanes, *batch)} for batch in batches)))


def summary(recipe: Recipe) -> dict[str, Any]:
    """JSON-able figures of a valid recipe: counts, samples, FLOPs (of one image and of the whole stage)."""
    from isthmus.core.models.profiles import profile

    world_size = recipe.compute.nodes * recipe.compute.gpus_per_node
    known = profile(recipe.model)
    stages = []
    for stage in recipe.stages:
        flops = known.train_flops.get(stage.resolution) if known else None
        samples = stage.total_steps * stage.global_batch_size
        stages.append(
            {
                "name": stage.name,
                "resolution": stage.resolution,
                "steps": stage.total_steps,
                "global_batch_size": stage.global_batch_size,
                "micro_batch_size": stage.micro_batch_size,
                "gradient_accumulation_steps": stage.global_batch_size
                // (world_size * stage.micro_batch_size),
                "samples": samples,
                "train_flops_per_image": flops,
                "train_flops": flops * samples if flops else None,
            }
        )
    return {
        "name": recipe.name,
        "family": recipe.model.family,
        "preset": recipe.model.preset,
        "parameters": known.parameters if known else None,
        "prediction_type": recipe.objective.prediction_type,
        "world_size": world_size,
        "admitted_world_sizes": admitted_world_sizes(recipe),
        "data": {
            "access": recipe.data.access,
            "sources": len(recipe.data.sources),
            "lanes": recipe.data.lanes,
            "shuffle_window": recipe.data.shuffle_window,
            "memory_limit_bytes": recipe.data.memory_limit,
            "checksums": recipe.data.checksums,
            "read_depth": recipe.data.read_depth,
            "retry_budget_s": recipe.data.retry_budget,
            "wait_limit_s": recipe.data.wait_limit,
        },
        "stages": stages,
    }


def summary_text(found: dict[str, Any]) -> str:
    """The summary as a few lines for people."""
    model = f"{found['family']}{' ' + found['preset'] if found['preset'] else ''}"
    if found["parameters"]:
        model += f", {_short(found['parameters'])} parameters"
    admitted = ", ".join(str(size) for size in found["admitted_world_sizes"])
    lines = [f"  model   {model}, {found['prediction_type']}"]
    lines.append(f"  ranks   {found['world_size']}; lanes and batch sizes admit {admitted}")
    data = found["data"]
    lines.append(
        f"  data    {data['access']}, {data['lanes']} lanes, a window of {data['shuffle_window']:,} samples,"
        f" at most {data['memory_limit_bytes'] / 1e9:.3g} GB on a rank"
        + ("" if data["checksums"] else ", checksums off")
    )
    for stage in found["stages"]:
        line = f"  stage   {stage['name']}: {stage['steps']:,} steps x {stage['global_batch_size']:,}"
        line += f" = {_short(stage['samples'])} samples, {stage['gradient_accumulation_steps']} x micro batch"
        line += f" {stage['micro_batch_size']}"
        if stage["train_flops_per_image"]:
            line += f", {stage['train_flops_per_image'] / 1e12:.3g} TFLOP an image"
        lines.append(line)
    return "\n".join(lines)


def _short(count: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return str(count)
