"""World size | lanes | global batch size, accumulation, and the lengths of stages."""

from __future__ import annotations

from isthmus.core.recipe.batches import divisors, nearest_multiple, world_sizes
from isthmus.core.recipe.document import Path
from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.stages import Stage


def check_batches(recipe: Recipe) -> list[Problem]:
    """Problems of batch sizes, lanes, world size and stage lengths."""
    lanes, compute = recipe.data.lanes, recipe.compute
    world_size = compute.nodes * compute.gpus_per_node
    problems = []
    if lanes % world_size:
        message = (
            f"data.lanes {lanes} is not divisible by the world size {world_size}"
            f" (compute.nodes {compute.nodes} x compute.gpus_per_node {compute.gpus_per_node})"
        )
        hint = f"nearest: {nearest_multiple(lanes, world_size)}; {lanes} lanes admit {listed(divisors(lanes))} ranks"
        problems.append(Problem(("data", "lanes"), message, hint))
    for index, stage in enumerate(recipe.stages):
        path: Path = ("stages", index)
        problems += _batch(stage, path, lanes, world_size)
        problems += _length(stage, path)
    window = recipe.data.shuffle_window
    if window < lanes:
        message = (
            f"data.shuffle_window {window} is below data.lanes {lanes}: each lane shuffles its share of it"
        )
        problems.append(Problem(("data", "shuffle_window"), message, f"at least {lanes}"))
    problems += _memory(recipe, world_size)
    return problems


def _batch(stage: Stage, path: Path, lanes: int, world_size: int) -> list[Problem]:
    batch, micro = stage.global_batch_size, stage.micro_batch_size
    if batch % lanes:
        message = f"{_name(path)}.global_batch_size {batch} is not divisible by data.lanes {lanes}"
        near = nearest_multiple(batch, lanes)
        hint = f"nearest: {near}, which admits world sizes {listed(world_sizes(lanes, near))}"
        return [Problem((*path, "global_batch_size"), message, hint)]
    if batch % (world_size * micro) == 0:
        return []
    message = (
        f"{_name(path)}.micro_batch_size {micro}: global_batch_size {batch} is not divisible by"
        f" world size {world_size} x micro_batch_size {micro} = {world_size * micro}"
    )
    hints = []
    if batch % world_size == 0:
        hints.append(f"micro_batch_size can be {listed(divisors(batch // world_size))}")
    admitted = world_sizes(lanes, batch, micro)
    if admitted:
        hints.append(
            f"{lanes} lanes and batch {batch} at this micro_batch_size admit world sizes {listed(admitted)}"
        )
    else:
        hints.append(f"{lanes} lanes and batch {batch} admit world sizes {listed(world_sizes(lanes, batch))}")
    return [Problem((*path, "micro_batch_size"), message, "; ".join(hints))]


def _length(stage: Stage, path: Path) -> list[Problem]:
    batch = stage.global_batch_size
    if stage.steps is None and stage.samples is None:
        return [Problem(path, "needs exactly one of `steps` and `samples`, and has neither")]
    if stage.steps is not None and stage.samples is not None:
        return [Problem((*path, "samples"), "needs exactly one of `steps` and `samples`, and has both")]
    if stage.samples is not None and stage.samples % batch:
        message = f"{_name(path)}.samples {stage.samples} is not a multiple of global_batch_size {batch}"
        return [Problem((*path, "samples"), message, f"nearest: {nearest_multiple(stage.samples, batch)}")]
    if stage.lr_warmup_steps >= stage.total_steps:
        message = f"{stage.lr_warmup_steps} is not shorter than the stage's {stage.total_steps} steps"
        return [Problem((*path, "lr_warmup_steps"), message)]
    return []


def _memory(recipe: Recipe, world_size: int) -> list[Problem]:
    """A lower bound that needs no dataset: a rank holds its share of the window's rows."""
    autoencoder = recipe.encoders.autoencoder
    resolution = max(stage.resolution for stage in recipe.stages)
    latent = 2 * 2 * autoencoder.latent_channels * (resolution // autoencoder.factor) ** 2
    text = sum(2 * (text.max_tokens * text.width + (text.pooled_width or 0)) for text in recipe.encoders.text)
    rows = recipe.data.shuffle_window // world_size
    needed = rows * (latent + text)
    if needed <= recipe.data.memory_limit:
        return []
    message = (
        f"{recipe.data.memory_limit / 1e9:.3g} GB cannot hold a rank's {rows} rows of data.shuffle_window at"
        f" {resolution} px: {needed / 1e9:.3g} GB at {(latent + text) / 1e3:.4g} kB a row"
    )
    window = recipe.data.memory_limit // (latent + text) * world_size
    return [Problem(("data", "memory_limit"), message, f"raise it, or shuffle_window at most {window}")]


def listed(numbers: list[int]) -> str:
    """``1, 2, 4``; of many, the largest dozen."""
    shown = [str(number) for number in numbers[-12:]]
    return ", ".join(["...", *shown] if len(numbers) > 12 else shown)


def _name(path: Path) -> str:
    return f"{path[0]}[{path[1]}]"
