"""What ``isthmus data bench`` reads: a dataset with settings of the command line, or in the order of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.cli.data_bench_ranks import Task
    from isthmus.core.recipe.schema import Recipe
    from isthmus.storage.shards import Dataset
    from isthmus.storage.stream.access import Access
    from isthmus.storage.stream.loader import Loader


@dataclass(slots=True, kw_only=True)
class Setup:
    """One rank's reading, ready to be measured."""

    datasets: tuple[Dataset, ...]
    repeats: tuple[Fraction, ...]
    access: Callable[[], list[Access]]
    """New accesses of the datasets, with counters of their own."""
    mode: str
    resolution: int
    global_batch_size: int
    lanes: int
    window: int
    world_size: int = 1
    memory_limit: int
    check: bool = True
    seed: int = 0
    stage: int = 0
    stages: list[int]
    recipe: Recipe | None = None
    """Resolved; None without one."""
    wait_limit: float = 600.0

    def make_loader(self, depth: int | None, start_step: int, rank: int = 0) -> Loader:
        """A rank's loader from a step on."""
        from isthmus.storage.stream.owning import OwningLoader
        from isthmus.storage.stream.plan import Plan, Segment

        return OwningLoader(
            self.datasets,
            self.repeats,
            seed=self.seed,
            lanes=self.lanes,
            shuffle_window=self.window,
            stages=self.stages,
            plan=Plan((Segment(self.stage, 0, 0, self.global_batch_size),)),
            rank=rank,
            world_size=self.world_size,
            memory_limit=self.memory_limit,
            start_step=start_step,
            access=self.access(),
            depth=depth,
            check=self.check,
            wait_limit=self.wait_limit,
        )

    @property
    def row_bytes(self) -> float:
        """Bytes of a sample, the mean over the sources as their repeats mix them."""
        from isthmus.storage.stream.bench import row_bytes

        return self._mean(row_bytes)

    def facts(self) -> dict[str, Any]:
        """What is read, as JSON data."""
        return {
            "roots": [list(dataset.roots) for dataset in self.datasets],
            "access": self.mode,
            "resolution": self.resolution,
            "batch_size": self.global_batch_size // self.world_size,
            "lanes": self.lanes // self.world_size,
            "shuffle_window": self.window,
            "world_size": self.world_size,
            "memory_limit_bytes": self.memory_limit,
            "checksums": self.check,
            "row_bytes": self.row_bytes,
        }

    def describe(self) -> str:
        """The same in a line for people."""
        facts = self.facts()
        places = ", ".join(root for roots in facts["roots"] for root in roots)
        rank = "" if self.world_size == 1 else f", rank 0 of {self.world_size}"
        return (
            f"{places} ({self.mode}), {self.resolution} px, {facts['row_bytes'] / 1e3:.4g} kB a sample; batches of"
            f" {facts['batch_size']} from {facts['lanes']} lanes, a window of {self.window:,}{rank};"
            f" checksums {'on' if self.check else 'off'}"
        )

    @property
    def requests_per_row(self) -> float:
        """Requests that a sample costs, the mean over the sources."""
        from isthmus.storage.stream.bench import requests_per_row

        return self._mean(requests_per_row)

    def _mean(self, figure: Callable[[Dataset, int], float]) -> float:
        weights = [
            dataset.manifest.samples * float(repeat)
            for dataset, repeat in zip(self.datasets, self.repeats, strict=True)
        ]
        values = [figure(dataset, self.resolution) for dataset in self.datasets]
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def setup_of(task: Task) -> Setup:
    """What a task reads."""
    from isthmus.errors import UsageError

    if not task.recipe:
        return from_roots(
            task.roots,
            task.access or "stream",
            task.resolution,
            task.batch_size,
            task.lanes,
            task.window,
            task.memory_limit,
            task.overrides,
            task.ranks,
        )
    setup = from_recipe(task.recipe, task.overrides, task.backend, task.roots, task.stage, task.access)
    if task.ranks > setup.world_size:
        raise UsageError(
            f"--ranks {task.ranks}: the recipe's world has {setup.world_size}",
            hint="--set compute.nodes=... makes it larger",
        )
    return setup


def from_roots(
    roots: list[str],
    mode: str,
    resolution: int,
    batch_size: int,
    lanes: int,
    window: int,
    memory_limit: str,
    overrides: list[str],
    ranks: int = 1,
) -> Setup:
    """A dataset read by a world of some ranks, each with such a batch, lanes and window."""
    from isthmus.core.recipe.units import parse_size
    from isthmus.errors import UsageError
    from isthmus.storage.ranges.counters import Counters
    from isthmus.storage.shards import open_dataset
    from isthmus.storage.stream.access import Access

    if not roots:
        raise UsageError("name a dataset, or a recipe with --recipe", hint="isthmus data bench ./data")
    if overrides:
        raise UsageError("--set is of a recipe", hint="add --recipe, or use --batch-size, --lanes, --window")
    if batch_size < 1 or lanes < 1 or batch_size % lanes:
        raise UsageError(f"--batch-size {batch_size} is not a multiple of --lanes {lanes}")
    try:
        limit = parse_size(memory_limit)
    except ValueError as error:
        raise UsageError(f"--memory-limit {memory_limit}: {error}") from None
    dataset = open_dataset(roots)
    stored = dataset.spec.resolutions
    if resolution and resolution not in stored:
        raise UsageError(
            f"no latents at {resolution} px", where=dataset.uri, hint=f"it has {', '.join(map(str, stored))}"
        )
    size = resolution or max(stored)

    def access() -> list[Access]:
        return [Access(dataset, mode, counters=Counters())]

    return Setup(
        datasets=(dataset,),
        repeats=(Fraction(1),),
        access=access,
        mode=mode,
        resolution=size,
        global_batch_size=batch_size * ranks,
        lanes=lanes * ranks,
        window=window * ranks,
        world_size=ranks,
        memory_limit=limit,
        stages=[size],
    )


def from_recipe(
    recipe: str, overrides: list[str], backend: str, roots: list[str], stage: int, mode: str
) -> Setup:
    """Rank 0 of a recipe's world, in one of its stages."""
    from isthmus.core.recipe import load_recipe, resolve
    from isthmus.core.train.sources import make_access, open_sources
    from isthmus.errors import UsageError

    found = resolve(load_recipe(recipe, overrides).recipe, backend)
    changes: dict[str, Any] = {}
    if mode:
        changes["access"] = mode
    if roots:
        changes["sources"] = [found.data.sources[0].model_copy(update={"uri": roots})]
    found = found.model_copy(update={"data": found.data.model_copy(update=changes)})
    if mode not in ("", "stream", "mount", "download"):
        raise UsageError(f"--access {mode}: stream, mount or download")
    if not 0 <= stage < len(found.stages):
        raise UsageError(
            f"no stage {stage}", where=found.name, hint=f"stages are 0 to {len(found.stages) - 1}"
        )
    sources = open_sources(found, found.data.sources)
    data, chosen = found.data, found.stages[stage]
    return Setup(
        datasets=sources.datasets,
        repeats=sources.repeats,
        access=lambda: make_access(found, sources, [chosen.resolution]),
        mode=data.access,
        resolution=chosen.resolution,
        global_batch_size=chosen.global_batch_size,
        lanes=data.lanes,
        window=data.shuffle_window,
        world_size=found.compute.nodes * found.compute.gpus_per_node,
        memory_limit=data.memory_limit,
        check=data.checksums,
        seed=found.seed,
        stage=stage,
        stages=[one.resolution for one in found.stages],
        recipe=found,
        wait_limit=data.wait_limit,
    )
