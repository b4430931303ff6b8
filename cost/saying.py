"""What an estimate says beside its figures: what it takes for granted, and what one should know before believing it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from isthmus.core.models.memory import memory_fit
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.assumptions import Assumptions
from isthmus.cost.catalog import Price
from isthmus.cost.lines import Dataset
from isthmus.cost.measured import Measurement
from isthmus.cost.placing import Place
from isthmus.cost.times import Times


def assumptions_said(
    recipe: Recipe,
    place: Place,
    found: Times,
    assume: Assumptions,
    data: Dataset,
    measured: Measurement | None,
) -> tuple[str, ...]:
    """What an estimate takes for granted, one line each."""
    said = []
    if place.why:
        said.append(place.why)
    if place.backend != "local":
        said.append(
            f"start-up: {assume.allocation_s:g} s for the nodes, {assume.image_gb:g} GB of image at "
            f"{assume.pull_gb_per_s:g} GB/s, {(measured.start_s if measured else assume.start_s):g} s of processes and data"
            + (f", {assume.compile_s:g} s of compiling a stage" if recipe.parallel.compile else "")
        )
        low, rate, high = assume.interruptions(place.tier)
        said.append(
            f"interruptions of a node: {rate:.3g} an hour"
            + (f" ({low:.3g} to {high:.3g})" if low != high else "")
            + f", so one of the run in {found.interruption_model.mean_h:,.1f} h; nobody's promise"
        )
        said.append(
            f"the storage path gives a node {assume.read_gb_per_s(recipe.data.access):g} GB/s (data.access "
            f"{recipe.data.access}), checkpoints go at {assume.store_gb_per_s:g} GB/s a node"
        )
        said.append(f"data and checkpoints are kept for {assume.kept_months:g} months after the run")
    if data.lies_in is not None:
        said.append(f"the data lies in {' '.join(data.lies_in)}")
    if data.gigabytes is None:
        said.append("the dataset's size is not known: --dataset-gb")
    return tuple(said)


def warnings_said(
    recipe: Recipe,
    place: Place,
    found: Times,
    slow: Times,
    speeds: Sequence[tuple[float, float, float, str]],
    caps: Sequence[float],
) -> tuple[str, ...]:
    """What may not go as estimated: memory, data, restarts, the rhythm of checkpoints."""
    said = []
    for index, stage in enumerate(recipe.stages):
        fit = memory_fit(recipe, index)
        if fit is not None and not fit.fits:
            change = f"; fits with {fit.change}" if fit.change else ""
            said.append(f"stage {stage.name} does not fit into {place.gpu}: {fit.arithmetic()}{change}")
        if speeds[index][0] > caps[index]:
            said.append(
                f"stage {stage.name} is limited by its data: {caps[index]:,.0f} images/s can be read, "
                f"{speeds[index][0]:,.0f} could be trained on"
            )
    restarts = recipe.compute.max_restarts
    if slow.interruptions > restarts and place.tier == "spot":
        said.append(
            f"up to {slow.interruptions:,.0f} interruptions are expected, and compute.max_restarts is {restarts}"
        )
    best = found.best_interval_h
    if place.tier == "spot" and not best / 3 < found.interval_h < best * 3:
        said.append(
            f"checkpoints every {60 * found.interval_h:,.0f} min; every {60 * best:,.0f} min would lose least (Daly 2006)"
        )
    return tuple(said)


def age_said(price: Price | None, today: date | None) -> tuple[str, ...]:
    """How old the price is, when it is old."""
    old = None if price is None else price.stale(today)
    return () if old is None else (old,)
