"""What a whole run costs before it starts: hours and dollars by line and by stage, with an interval. No network, no torch.

Hours are images over speed (`cost/throughput.py`, or a measured run) and what comes beside it (`cost/times.py`); dollars are
billed hours times the price row of the place, and storage and traffic (`cost/lines.py`). The interval takes the ends of the
speed's 80 % interval together with the ends of the interruption rate: both good, both bad; so on spot it is wider than 80 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date

from isthmus.core.models.memory import MemoryFit, memory_fit
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.assumptions import Assumptions
from isthmus.cost.catalog import Catalog, Price
from isthmus.cost.lines import Dataset, Line, lines
from isthmus.cost.measured import Measurement
from isthmus.cost.placing import Place, find_price, nodes_for, place, with_place
from isthmus.cost.saying import age_said, assumptions_said, warnings_said
from isthmus.cost.spot import break_even_rate, expected_hours
from isthmus.cost.times import Times, row_bytes, times
from isthmus.errors import IsthmusError, UsageError

Speed = Callable[[Recipe, int, Place], tuple[float, float, float, str]]
"""(recipe, stage, place) -> images a second of all GPUs: expected, low, high; and what that rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage: its training alone."""

    name: str
    resolution: int
    images: int
    images_per_s: float
    images_per_s_interval: tuple[float, float]
    hours: float
    usd: float | None
    data_gb_per_s: float
    """That one node must read."""
    data_limited: bool
    """Whether the storage path gives less than the GPUs would take: then it sets the speed."""
    memory: MemoryFit | None
    """None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run takes."""

    recipe: str
    place: Place
    lines: tuple[Line, ...]
    by_stage: tuple[StageCost, ...]
    usd: float | None
    """Of all lines that have a figure; None where nobody prices the machines."""
    hours: float
    """From submission to the end."""
    usd_interval: tuple[float, float] | None
    hours_interval: tuple[float, float]
    images: int
    times: Times
    measured: Measurement | None
    basis: str
    """What the speed rests on, in one line."""
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    spot: SpotFacts | None = None

    @property
    def usd_per_million_images(self) -> float | None:
        """Dollars of the whole run by the images it trains on."""
        return None if self.usd is None else self.usd / (self.images / 1e6)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """What has no figure, in words."""
        missing = [f"{line.group}: {line.name} ({line.note})" for line in self.lines if line.usd is None]
        if self.place.usd_per_hour is None:
            missing = [
                self.place.label,
                *(text for text in missing if text.startswith(("storage", "transfer"))),
            ]
        return tuple(missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotFacts:
    """What interruptions do to the run, beside the price without them."""

    interruptions: float
    """Expected."""
    mean_h: float
    """Between them."""
    interval_h: float
    """Of the recipe's checkpoints."""
    best_interval_h: float
    """Daly's."""
    on_demand_usd: float | None
    """Of the node hours at the same place's on-demand price."""
    break_even: float | None
    """Interruptions of one node in an hour at which spot costs as much; None without an on-demand price, or when it always does."""


def estimate(
    recipe: Recipe,
    *,
    backend: str | None = None,
    place: Place | None = None,
    catalog: Catalog,
    region: str | None = None,
    tier: str | None = None,
    sku: str | None = None,
    nodes: int | None = None,
    assume: Assumptions | None = None,
    data: Dataset | None = None,
    measured: Measurement | None = None,
    speed: Speed | None = None,
    today: date | None = None,
) -> Estimate:
    """The estimate of a recipe somewhere.

    Args:
        recipe: as loaded.
        backend, region, tier, sku, nodes: where, see `placing.place`; or
        place: chosen already.
        catalog: prices and rates.
        assume: start-up, interruptions and the like.
        data: the dataset's size, and where it lies.
        measured: of a short run on the same machines; it replaces the prior.
        speed: another source of images a second.
        today: for the age of prices; None: by the clock.

    Raises:
        UsageError: no such place, no figures of the model or GPU, or a run that would never end.
    """
    if place is None:
        place = _place(recipe, catalog, backend, region, tier, sku, nodes)
    recipe = with_place(recipe, place)
    filled = (assume or Assumptions()).of(place.backend)
    data = data or Dataset()
    speeds = [(speed or speed_of(measured))(recipe, index, place) for index in range(len(recipe.stages))]
    caps = [
        filled.read_gb_per_s(recipe.data.access) * 1e9 * place.nodes / row_bytes(recipe, stage.resolution)
        for stage in recipe.stages
    ]
    if measured is not None or place.backend == "local":
        caps = [math.inf] * len(caps)
    low_rate, rate, high_rate = filled.interruptions(place.tier)

    def at(images_per_s: Sequence[float], interrupted: float) -> Times:
        limited = [min(found, cap) for found, cap in zip(images_per_s, caps, strict=True)]
        return times(recipe, place, limited, interrupted, filled, measured)

    found = at([expected for expected, *_ in speeds], rate)
    fast = at([high for _, _, high, _ in speeds], low_rate)
    slow = at([low for _, low, _, _ in speeds], high_rate)
    if math.isinf(found.total_h):
        raise UsageError(
            f"would never end: {place.nodes} nodes are interrupted every {60 * found.interruption_model.mean_h:.3g} min",
            where=place.label,
            hint="checkpoint more often, take fewer nodes, or on_demand",
        )
    rows = lines(recipe, place, found, catalog, filled, data)
    priced = place.usd_per_hour is not None
    ends = [_sum(lines(recipe, place, end, catalog, filled, data)) for end in (fast, slow)]
    return Estimate(
        recipe=recipe.name,
        place=place,
        lines=tuple(rows),
        by_stage=_stages(recipe, place, speeds, caps, found),
        usd=_sum(rows) if priced else None,
        hours=found.total_h,
        usd_interval=(ends[0], ends[1]) if priced else None,
        hours_interval=(fast.total_h, slow.total_h),
        images=sum(stage.total_steps * stage.global_batch_size for stage in recipe.stages),
        times=found,
        measured=measured,
        basis=speeds[0][3],
        assumptions=assumptions_said(recipe, place, found, filled, data, measured),
        warnings=(
            *warnings_said(recipe, place, found, slow, speeds, caps),
            *age_said(place.price, today),
            *catalog.warnings,
        ),
        spot=_spot(recipe, place, found, catalog, filled) if place.tier == "spot" else None,
    )


def usd_per_hour(
    recipe: Recipe,
    backend: str,
    region: str | None = None,
    tier: str | None = None,
    sku: str | None = None,
    *,
    catalog: Catalog | None = None,
) -> float | None:
    """What an hour of all nodes of a recipe costs there; None where nobody prices it, or it cannot be placed there."""
    from isthmus.cost.catalog import load_catalog

    try:
        return place(
            recipe, catalog or load_catalog(), backend=backend, region=region, tier=tier, sku=sku
        ).usd_per_hour
    except IsthmusError:
        return None


def speed_of(measured: Measurement | None) -> Speed:
    """Images a second by the measured run for the stages that it has, and by the estimator for others."""

    def speed(recipe: Recipe, index: int, place: Place) -> tuple[float, float, float, str]:
        stage = recipe.stages[index]
        for known in measured.stages if measured else ():
            if (known.resolution, known.global_batch_size) == (stage.resolution, stage.global_batch_size):
                return known.images_per_s, known.low, known.high, f"measured over {known.steps} steps"
        if place.gpu == "none":
            raise UsageError(
                "the speed of a CPU is not estimated",
                where="compute.gpu",
                hint=f"measure it: isthmus compare RECIPE --measure --backend {place.backend}",
            )
        return prior(recipe, index, place)

    return speed


def prior(recipe: Recipe, index: int, place: Place) -> tuple[float, float, float, str]:
    """Images a second of a stage before anybody has run it."""
    from isthmus.cost.throughput import estimate_throughput

    stage = recipe.stages[index]
    found = estimate_throughput(
        model=recipe.model,
        gpu=place.gpu,
        gpus=place.nodes * place.gpus_per_node,
        gpus_per_node=place.gpus_per_node,
        global_batch_size=stage.global_batch_size,
        resolution=stage.resolution,
        precision=recipe.parallel.precision,
        strategy=recipe.parallel.strategy,
        fabric=place.fabric,
        activation_checkpointing=bool(recipe.parallel.activation_checkpointing),
    )
    low, high = found.interval80
    return found.images_per_s, low, high, f"estimated: {found.basis}"


def _place(
    recipe: Recipe,
    catalog: Catalog,
    backend: str | None,
    region: str | None,
    tier: str | None,
    sku: str | None,
    nodes: int | None,
) -> Place:
    name = backend or next((offer.backend for offer in recipe.compute.offers), "local")
    return place(recipe, catalog, backend=name, region=region, tier=tier, sku=sku, nodes=nodes)


def _sum(rows: Sequence[Line]) -> float:
    return math.fsum(line.usd for line in rows if line.usd is not None)


def _stages(
    recipe: Recipe,
    place: Place,
    speeds: Sequence[tuple[float, float, float, str]],
    caps: Sequence[float],
    found: Times,
) -> tuple[StageCost, ...]:
    rows = []
    for index, (stage, (expected, low, high, _), cap) in enumerate(
        zip(recipe.stages, speeds, caps, strict=True)
    ):
        hours = found.stages_h[index]
        usd = None if place.usd_per_hour is None else hours * place.usd_per_hour
        rows.append(
            StageCost(
                name=stage.name,
                resolution=stage.resolution,
                images=stage.total_steps * stage.global_batch_size,
                images_per_s=min(expected, cap),
                images_per_s_interval=(min(low, cap), min(high, cap)),
                hours=hours,
                usd=usd,
                data_gb_per_s=expected * row_bytes(recipe, stage.resolution) / place.nodes / 1e9,
                data_limited=expected > cap,
                memory=memory_fit(recipe, index),
            )
        )
    return tuple(rows)


def _spot(recipe: Recipe, place: Place, found: Times, catalog: Catalog, assume: Assumptions) -> SpotFacts:
    other: Price | None = find_price(catalog, place.backend, place.sku, place.region, "on_demand")
    model = found.interruption_model
    on_demand_usd = break_even = None
    if other is not None and other.usd_per_hour is not None:
        by_failures = replace(model, per_node_hour=assume.failures)
        hours = expected_hours(found.work_h, by_failures)
        on_demand_usd = other.usd_per_hour * place.nodes * hours
        if place.usd_per_hour is not None:
            break_even = break_even_rate(
                found.work_h,
                spot_usd_h=place.usd_per_hour,
                other_usd_h=other.usd_per_hour * place.nodes,
                other_hours=hours,
                by=model,
            )
    return SpotFacts(
        interruptions=found.interruptions,
        mean_h=model.mean_h,
        interval_h=found.interval_h,
        best_interval_h=found.best_interval_h,
        on_demand_usd=on_demand_usd,
        break_even=break_even,
    )


__all__ = ["Estimate", "SpotFacts", "StageCost", "estimate", "nodes_for", "prior", "speed_of", "usd_per_hour"]
