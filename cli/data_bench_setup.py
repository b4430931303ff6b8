"""What ``isthmus data bench`` reads: a dataset with settings of the command line, or in the order of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.cost.pace import Pace
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
    pace: Pace | None = None
    wait_limit: float = 600.0

    def make_loader(self, depth: int | None, start_step: int) -> Loader:
        """Rank 0's loader from a step on."""
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

        weights = [dataset.manifest.samples * float(repeat) for dataset, repeat in self._sources]
        sizes = [row_bytes(dataset, self.resolution) for dataset in self.datasets]
        return sum(w * s for w, s in zip(weights, sizes, strict=True)) / sum(weights)

    @property
    def _sources(self) -> list[tuple[Dataset, Fraction]]:
        return list(zip(self.datasets, self.repeats, strict=True))

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

    def keeps_up(self, samples_per_s: float) -> dict[str, Any] | None:
        """Whether a rank's measured pace is that of the recipe's GPU; None where that is not known."""
        if self.pace is None:
            return None
        pace, size = self.pace, self.row_bytes
        ratio = samples_per_s / pace.images_per_s
        rank, node = pace.images_per_s * size / 1e6, pace.images_per_s * size * pace.ranks_per_node / 1e6
        measured = samples_per_s * size / 1e6
        sentence = (
            f"A rank trains on {pace.images_per_s:,.3g} images/s ({pace.gpu} at {100 * pace.utilization:.0f} % of its"
            f" peak), {rank:,.3g} MB/s: the store delivers {ratio:.3g} times that"
        )
        sentence += ", enough for a rank" if ratio >= 1 else ", too little: steps will wait"
        if ratio >= 1 and pace.ranks_per_node > 1:
            sentence += (
                f"; the {pace.ranks_per_node} ranks of a node need {node:,.3g} MB/s together, which "
                + ("this process alone reached" if measured >= node else "one process did not reach")
            )
        return {
            "images_per_s": pace.images_per_s,
            "utilization": pace.utilization,
            "gpu": pace.gpu,
            "megabytes_per_s": rank,
            "node_megabytes_per_s": node,
            "ratio": ratio,
            "keeps_up": ratio >= 1,
            "node_keeps_up": measured >= node,
            "sentence": sentence + ".",
        }


def from_roots(
    roots: list[str],
    mode: str,
    resolution: int,
    batch_size: int,
    lanes: int,
    window: int,
    memory_limit: str,
    overrides: list[str],
) -> Setup:
    """A dataset read by one rank alone."""
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
        global_batch_size=batch_size,
        lanes=lanes,
        window=window,
        memory_limit=limit,
        stages=[size],
    )


def from_recipe(
    recipe: str, overrides: list[str], backend: str, roots: list[str], stage: int, mode: str
) -> Setup:
    """Rank 0 of a recipe's world, in one of its stages."""
    from isthmus.core.recipe import load_recipe, resolve
    from isthmus.core.train.sources import make_access, open_sources
    from isthmus.cost.pace import pace
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
        pace=pace(found, stage),
        wait_limit=data.wait_limit,
    )
