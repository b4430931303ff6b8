"""Which samples a step of a recipe, or of a run, holds. No torch and no threads: a laptop can ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.recipe import parse_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train.sources import Sources, open_sources
from isthmus.core.train.stages import Schedule, with_stages_to_come
from isthmus.errors import DatasetMismatch, UsageError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.stream.describe import Describer, StepDescription
from isthmus.storage.stream.plan import Plan, Segment


@dataclass(frozen=True, slots=True)
class OrderView:
    """The order of a recipe's samples, to be looked at."""

    recipe: Recipe
    """Resolved."""
    sources: Sources
    describer: Describer
    total_steps: int
    world_size: int
    """Of the recipe's machines, or of the run's newest attempt."""

    def steps(
        self, first: int, count: int = 1, *, rank: int | None = None, world_size: int | None = None
    ) -> list[StepDescription]:
        """Steps `first`, `first` + 1, ... (0 is the run's first), of the global batch or of one rank.

        Raises:
            UsageError: the run has no such step, or its ranks no such number.
            WorldSizeError: so many ranks cannot share the lanes.
        """
        if count < 1 or not 0 <= first <= self.total_steps - count:
            raise UsageError(
                f"no steps {first} to {first + count - 1}",
                where=self.recipe.name,
                hint=f"its steps are 0 to {self.total_steps - 1}",
            )
        ranks = (world_size or self.world_size) if rank is not None else 1
        if rank is not None and not 0 <= rank < ranks:
            raise UsageError(
                f"no rank {rank} of {ranks}", hint=f"ranks are 0 to {ranks - 1}; see --world-size"
            )
        return [self.describer.step(step, rank or 0, ranks) for step in range(first, first + count)]

    def mix(self, steps: Sequence[StepDescription]) -> list[dict[str, object]]:
        """For each source: its rows in these steps, in the run up to their end, and the share its repeat asks for."""
        rows = [0] * len(self.sources.datasets)
        for step in steps:
            for source, count in step.rows_by_source().items():
                rows[source] += count
        so_far = self.describer.mix(0, steps[-1].step + 1)
        shares = self.describer.shares(steps[-1].stage)
        return [
            {
                "source": dataset.uri,
                "repeat": str(self.sources.repeats[number]),
                "rows": rows[number],
                "share": rows[number] / sum(rows),
                "rows_so_far": so_far.rows[number],
                "share_so_far": so_far.shares[number],
                "share_by_repeat": float(shares[number]),
            }
            for number, dataset in enumerate(self.sources.datasets)
        ]


def view_recipe(recipe: Recipe) -> OrderView:
    """The order that a resolved recipe gives to a new run: one segment of the plan for each stage."""
    first = Segment(
        stage=0, first_step=0, first_sample=0, global_batch_size=recipe.stages[0].global_batch_size
    )
    return _view(recipe, Plan((first,)), recipe.compute.nodes * recipe.compute.gpus_per_node)


def view_run(run: RunDirectory, overrides: Sequence[str] = ()) -> OrderView:
    """The order that a run follows: its plan with what was rewound and skipped.

    Args:
        overrides: `data.sources...=value`: another place of the same data.

    Raises:
        DatasetMismatch: the data is not the run's.
        UsageError: an override of something else, which would be another run's order.
    """
    for override in overrides:
        if not override.startswith("data.sources"):
            raise UsageError(
                f"a run's order is its own: --set {override} cannot change it",
                hint="only data.sources can be named anew, where the same data lies elsewhere",
            )
    recipe = parse_recipe(run.read_recipe(), filename=f"{run.uri}/recipe.yaml", overrides=overrides).recipe
    facts = run.read_run_json()
    segments = run.segments()
    known = facts.get("world_size")
    ranks = known if isinstance(known, int) else recipe.compute.nodes * recipe.compute.gpus_per_node
    if not segments:
        return view_recipe(recipe)
    view = _view(recipe, Plan.from_json(segments), ranks)
    recorded = facts.get("dataset_fingerprints")
    if recorded and list(recorded) != list(view.sources.fingerprints):
        raise DatasetMismatch(
            "the data is not the run's: its fingerprint is another",
            where=view.sources.datasets[0].uri,
            hint="name the run's data with --set data.sources.0.uri=...",
        )
    return view


def make_describer(recipe: Recipe, sources: Sources, plan: Plan) -> Describer:
    """The order of a resolved recipe's samples along a plan."""
    return Describer(
        sources.datasets,
        sources.repeats,
        seed=recipe.seed,
        lanes=recipe.data.lanes,
        shuffle_window=recipe.data.shuffle_window,
        stages=[stage.resolution for stage in recipe.stages],
        plan=plan,
    )


def _view(recipe: Recipe, plan: Plan, world_size: int) -> OrderView:
    schedule = Schedule(recipe.stages)
    sources = open_sources(recipe, recipe.data.sources)
    describer = make_describer(recipe, sources, with_stages_to_come(plan, schedule))
    return OrderView(recipe, sources, describer, schedule.total_steps, world_size)
