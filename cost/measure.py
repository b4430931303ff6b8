"""Short runs on real backends, to measure what an estimate only supposes. The one module here that launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.backends.launch import attend, start
from isthmus.backends.prepare import Launch, launch_folder, preflight, prepare, refuse_errors
from isthmus.core.recipe import LoadedRecipe, load_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.assumptions import Assumptions
from isthmus.cost.catalog import Catalog
from isthmus.cost.estimate import Estimate, estimate
from isthmus.cost.measured import Measurement, record
from isthmus.cost.measuring import read, short_overrides, steps_of
from isthmus.cost.placing import LOCAL, Place, find_price, place
from isthmus.errors import IsthmusError, TrainingFailed
from isthmus.storage.rundir import RunDirectory

Say = Callable[[str], None]
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One backend's short run and the whole recipe by it, or why there is none."""

    backend: str
    measurement: Measurement | None = None
    estimate: Estimate | None = None
    """Of the whole recipe."""
    error: IsthmusError | None = None
    steps: int = 0
    """Of the short run."""
    whole_steps: int = 1
    file: Path | None = None
    """Where the measurement is kept."""

    @property
    def steps_share(self) -> float | None:
        """Steps that were measured, of those of the whole run."""
        if self.measurement is None or self.estimate is None:
            return None
        return self.steps / self.whole_steps

    @property
    def share(self) -> float | None:
        """What the short run took of the time that the whole one is predicted to take."""
        if self.measurement is None or self.estimate is None:
            return None
        return self.measurement.seconds / (self.estimate.hours * 3600)


def measure(
    path: str,
    overrides: Sequence[str],
    backends: Sequence[str],
    *,
    catalog: Catalog,
    folder: Path,
    steps: int | None = None,
    assume: Assumptions | None = None,
    say: Say = lambda text: None,
) -> list[Measured]:
    """Launches a short run on each backend, one after the other; keeps what each says and predicts the whole run by it.

    The prediction is in the kept file before this returns. A backend that fails does not keep the others from being measured.

    Args:
        path, overrides: of the recipe.
        backends: names.
        folder: where measurements are kept.
        steps: of each stage; None: see `measuring.steps_of`.
        say: gets a line when something happens.
    """
    found = []
    for backend in backends:
        try:
            found.append(_one(path, overrides, backend, catalog, folder, steps, assume, say))
        except IsthmusError as error:
            say(f"{backend}: not measured: {error}")
            found.append(Measured(backend=backend, error=error))
    return found


def _one(
    path: str,
    overrides: Sequence[str],
    backend: str,
    catalog: Catalog,
    folder: Path,
    steps: int | None,
    assume: Assumptions | None,
    say: Say,
) -> Measured:
    whole = load_recipe(path, overrides).recipe
    counts = steps_of(whole, steps)
    short = load_recipe(path, [*overrides, *short_overrides(whole, counts)])
    launch = _prepared(short, backend, say)
    where = place_of(whole, launch, catalog)
    say(f"{backend}: measuring {' + '.join(map(str, counts))} steps on {where.label}")
    run_uri = _run(launch, short, say)
    found = _read(short.recipe, where, run_uri)
    prediction = predict(whole, where, found, catalog, assume)
    found = replace(found, predicted_s=prediction.hours * 3600)
    file = record(folder, found)
    measured = Measured(
        backend=backend,
        measurement=found,
        estimate=prediction,
        steps=sum(counts),
        whole_steps=sum(stage.total_steps for stage in whole.stages),
        file=file,
    )
    say(
        f"{backend}: took {found.seconds:.0f} s, {100 * (measured.share or 0):.1f} % of the {prediction.hours:.3g} h that the "
        "whole run is predicted to take"
    )
    return measured


def predict(
    recipe: Recipe, where: Place, found: Measurement, catalog: Catalog, assume: Assumptions | None = None
) -> Estimate:
    """The whole recipe, stage by stage, by a short run of it."""
    return estimate(recipe, place=where, catalog=catalog, assume=assume, measured=found)


def place_of(recipe: Recipe, launch: Launch, catalog: Catalog) -> Place:
    """Where a launch goes, as an estimate knows it."""
    backend, offer = launch.backend.name, launch.offer
    if backend == LOCAL or offer is None:
        return place(recipe, catalog, backend=backend)
    region = offer.region or "its-own-region"
    return Place(
        backend=backend,
        region=region,
        tier=offer.tier,
        sku=offer.sku,
        gpu=recipe.compute.gpu,
        gpus_per_node=recipe.compute.gpus_per_node,
        nodes=recipe.compute.nodes,
        price=find_price(catalog, backend, offer.sku, region, offer.tier),
    )


def _prepared(short: LoadedRecipe, backend: str, say: Say) -> Launch:
    """Ready to start. Raises IsthmusError where a check refuses it."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    launch = preflight(prepare(short, backend=backend, run_id=f"{short.recipe.name}-measure-{stamp}"))
    for finding in launch.findings:
        if finding.level == "warning":
            say(f"{backend}: warning: {finding.message}")
    refuse_errors(launch)
    return launch


def _run(launch: Launch, short: LoadedRecipe, say: Say) -> str:
    """Starts it and stays until it has ended; returns the run directory's URI."""
    handle = start(launch, launch_folder(short))
    status = attend(launch.backend, handle, lambda line: None, say)
    while not status.ended:
        # A cloud's log may end, or not have begun, while the job has not ended.
        time.sleep(_LOOK_S)
        status = launch.backend.status(handle)
    if status.state != "finished":
        why = status.cause or status.state
        raise TrainingFailed(
            f"the short run {status.state}: {why}" if why != status.state else f"the short run {why}",
            where=launch.job.run_uri,
            hint=f"isthmus logs {launch.job.run_id}",
        )
    return launch.job.run_uri


def _read(short: Recipe, where: Place, run_uri: str) -> Measurement:
    run = RunDirectory.open(run_uri)
    system = [
        row for kind in run.metric_kinds() if kind.startswith("system") for row in run.read_metrics(kind)
    ]
    return read(
        short,
        where,
        rows=run.read_metrics("train"),
        events=run.events(),
        system=system,
        run_uri=run_uri,
    )
