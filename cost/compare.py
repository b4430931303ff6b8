"""Every offer of both clouds that a recipe fits on, priced, timed and ranked. No network; the same answer each time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date

from isthmus.core.models.memory import memory_fit
from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.assumptions import Assumptions
from isthmus.cost.catalog import Catalog, Price
from isthmus.cost.estimate import Estimate, Speed, estimate, speed_of
from isthmus.cost.lines import Dataset
from isthmus.cost.measured import Measurement, fitting
from isthmus.cost.own_price import own_priced
from isthmus.cost.placing import CLOUDS, Place, find_price, nodes_for, with_place
from isthmus.cost.regions import GEOGRAPHIES, check_region, geography
from isthmus.errors import UsageError

_TIERS = {"low_priority": "spot"}
"""The catalog's word for a tier -> the recipe's, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked of an offer; None is no wish."""

    regions: tuple[str, ...] = ()
    """Regions, or geographies such as `eu`."""
    tiers: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    backends: tuple[str, ...] = CLOUDS
    max_usd: float | None = None
    deadline_h: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One offer."""

    estimate: Estimate
    pareto: bool = False
    """No priced offer is both cheaper and at least as fast."""
    cheapest: bool = False
    fastest: bool = False
    named: bool = False
    """The recipe's own `compute.offers` name it."""
    comparable_usd: float | None = None
    """What offers are ranked by: the total without the groups of lines that some priced offer has no figure for."""

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Groups of lines that are not in the total since nobody prices them there."""
        missing = (line.group for line in self.estimate.lines if line.usd is None and line.note == "unpriced")
        return tuple(dict.fromkeys(missing)) if self.estimate.usd is not None else ()

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.estimate.place


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All offers: priced ones by dollars, then unpriced ones by hours."""

    recipe: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    """Why others are not among them, one line each."""
    warnings: tuple[str, ...]


def compare(
    recipe: Recipe,
    catalog: Catalog,
    wish: Wish | None = None,
    *,
    assume: Assumptions | None = None,
    data: Dataset | None = None,
    measured: Sequence[Measurement] = (),
    today: date | None = None,
) -> Comparison:
    """Estimates every offer that fits.

    An offer fits when it has as many GPUs a node as the recipe, and the recipe's stages fit into their memory. What nobody
    prices stays in as `unpriced`, whatever `max_usd` says: nobody knows that it is too dear.

    Args:
        wish: filters.
        data: where `lies_in` is given, moving the data to an offer elsewhere is part of its cost.
        measured: of this recipe; the one on the same machines replaces the estimate of speed.
        today: for the age of prices; None: by the clock.

    Raises:
        UsageError: no such region, GPU or tier; a GPU that no cloud prices; a model without figures.
    """
    wish = wish or Wish()
    _check(catalog, wish)
    if recipe.compute.gpu == "none":
        raise UsageError(
            "trains on CPU; the clouds are compared by GPUs",
            where="compute.gpu",
            hint="name one: --set compute.gpu=a100-80gb",
        )
    places = list(_places(recipe, catalog, wish))
    left_out = _without_memory(recipe, places)
    places = [place for place in places if place.gpu not in left_out]
    if not places:
        raise UsageError(
            _nothing(recipe, catalog, left_out),
            where="compute.gpu",
            hint="`isthmus prices show` lists what there is",
        )
    speed = _remembered()
    rows = []
    for place in places:
        known = fitting(
            list(measured),
            backend=place.backend,
            sku=place.sku,
            nodes=place.nodes,
            gpus_per_node=place.gpus_per_node,
        )
        found = estimate(
            recipe,
            place=place,
            catalog=catalog,
            assume=assume,
            data=data,
            measured=known,
            speed=speed_of(known) if known else speed,
            today=today,
        )
        rows.append(Row(estimate=found, named=_named(recipe, place)))
    too_slow = [row for row in rows if wish.deadline_h is not None and row.estimate.hours > wish.deadline_h]
    too_dear = [
        row
        for row in rows
        if wish.max_usd is not None and row.estimate.usd is not None and row.estimate.usd > wish.max_usd
    ]
    out = [*too_slow, *too_dear]
    said = list(left_out.values())
    if too_slow:
        said.append(
            f"{len(too_slow)} offer{'s take' if len(too_slow) > 1 else ' takes'} longer than {wish.deadline_h:g} h"
        )
    if too_dear:
        said.append(
            f"{len(too_dear)} offer{'s cost' if len(too_dear) > 1 else ' costs'} more than ${wish.max_usd:,.0f}"
        )
    kept = [row for row in rows if all(row is not other for other in out)]
    return Comparison(
        recipe=recipe.name,
        rows=tuple(_ranked(kept)),
        left_out=tuple(said),
        warnings=_warnings(kept, catalog, today),
    )


def _warnings(rows: Sequence[Row], catalog: Catalog, today: date | None) -> tuple[str, ...]:
    """Each once: what rows have in common with the first of them, how old prices are, and the catalog's own."""
    prices = [row.place.price for row in rows if row.place.price is not None]
    old = {stale: price for price in prices if (stale := price.stale(today))}
    own: dict[str, list[str]] = {}
    for row in rows:
        for warning in row.estimate.warnings:
            if warning not in catalog.warnings and warning not in old:
                own.setdefault(warning, []).append(row.place.label)
    said = [
        f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {warning}"
        for warning, places in own.items()
    ]
    if old:
        oldest = min(old, key=lambda stale: old[stale].as_of)
        said.append(f"{len(old)} of the prices are old; {oldest}")
    return (*said, *catalog.warnings)


def _check(catalog: Catalog, wish: Wish) -> None:
    priced = {backend: {p.region for p in catalog.prices if p.backend == backend} for backend in CLOUDS}
    for region in wish.regions:
        if region in GEOGRAPHIES or any(region in regions for regions in priced.values()):
            continue
        if not any(geography(backend, region) for backend in CLOUDS):
            check_region(
                "a cloud", region, {*GEOGRAPHIES, *(name for regions in priced.values() for name in regions)}
            )
    known = {*PEAK_FLOPS, *(price.gpu for price in catalog.prices)}
    for gpu in wish.gpus:
        if gpu not in known:
            raise UsageError(
                f"no GPU {gpu!r}", where="--gpu", hint=f"there are {', '.join(sorted(PEAK_FLOPS))}"
            )


def _places(recipe: Recipe, catalog: Catalog, wish: Wish) -> Iterator[Place]:
    """Offers of the catalog, those that the recipe itself names, and its machines in regions that are asked for by name."""
    wanted: dict[tuple[str, str, str, str], Price] = {}
    machines: dict[tuple[str, str], Price] = {}
    for price in catalog.prices:
        fits = price.gpus == recipe.compute.gpus_per_node and price.gpu in PEAK_FLOPS
        if price.backend not in wish.backends or not fits:
            continue
        machines.setdefault((price.backend, price.sku), price)
        wanted.setdefault((price.backend, price.sku, price.region, _TIERS.get(price.tier, price.tier)), price)
    own = [machine for machine in machines.values() if machine.gpu == recipe.compute.gpu]
    for offer in recipe.compute.offers:
        for machine in own:
            if offer.backend == machine.backend and offer.sku in (None, machine.sku) and offer.region:
                wanted.setdefault((machine.backend, machine.sku, offer.region, offer.tier), machine)
    for region in wish.regions:
        for machine in machines.values():
            if geography(machine.backend, region):
                for tier in wish.tiers or ("on_demand",):
                    wanted.setdefault((machine.backend, machine.sku, region, tier), machine)
    for (backend, sku, region, tier), price in sorted(wanted.items()):
        if wish.regions and not ({region, geography(backend, region)} & {*wish.regions}):
            continue
        if (wish.tiers and tier not in wish.tiers) or (wish.gpus and price.gpu not in wish.gpus):
            continue
        found = Place(
            backend=backend,
            region=region,
            tier=tier,
            sku=sku,
            gpu=price.gpu,
            gpus_per_node=price.gpus,
            nodes=nodes_for(recipe, price.gpus),
            price=find_price(catalog, backend, sku, region, tier),
        )
        yield own_priced(recipe, found)


def _named(recipe: Recipe, place: Place) -> bool:
    return any(
        (offer.backend, offer.region, offer.tier) == (place.backend, place.region, place.tier)
        and (offer.sku == place.sku if offer.sku else recipe.compute.gpu == place.gpu)
        for offer in recipe.compute.offers
    )


def _without_memory(recipe: Recipe, places: Sequence[Place]) -> dict[str, str]:
    """GPU -> why it is left out."""
    found: dict[str, str] = {}
    for place in {place.gpu: place for place in places}.values():
        there = with_place(recipe, place)
        for index, stage in enumerate(recipe.stages):
            fit = memory_fit(there, index)
            if fit is not None and not fit.fits:
                change = f"; fits with {fit.change}" if fit.change else ""
                found[place.gpu] = (
                    f"{place.gpu}: stage {stage.name} needs {fit.total / 1e9:.1f} of {fit.gpu_bytes / 1e9:.1f} GB{change}"
                )
                break
    return found


def _nothing(recipe: Recipe, catalog: Catalog, left_out: dict[str, str]) -> str:
    if left_out:
        return "no offer has enough memory: " + "; ".join(left_out.values())
    count = recipe.compute.gpus_per_node
    counts = sorted({price.gpus for price in catalog.prices if price.gpu == recipe.compute.gpu})
    there = f"; {recipe.compute.gpu} comes in machines of {', '.join(map(str, counts))}" if counts else ""
    return f"no cloud offers a machine with {count} GPUs that fits these filters{there}"


def _remembered() -> Speed:
    """The estimator, asked once for the same GPUs, fabric and stage."""
    fresh = speed_of(None)
    known: dict[tuple[str, int, int, str | None, int], tuple[float, float, float, str]] = {}

    def speed(recipe: Recipe, index: int, place: Place) -> tuple[float, float, float, str]:
        key = (place.gpu, place.nodes, place.gpus_per_node, place.fabric, index)
        if key not in known:
            known[key] = fresh(recipe, index, place)
        return known[key]

    return speed


def _ranked(rows: Sequence[Row]) -> list[Row]:
    """By dollars; an offer is not cheaper because nobody prices a part of it."""
    missing = {group for row in rows for group in row.incomplete}
    rows = [replace(row, comparable_usd=_without(row.estimate, missing)) for row in rows]
    priced = [row for row in rows if row.comparable_usd is not None]
    cheapest = min((row.comparable_usd or 0.0 for row in priced), default=None)
    fastest = min((row.estimate.hours for row in rows), default=None)
    marked = [
        replace(
            row,
            pareto=row.comparable_usd is not None and not any(_beats(other, row) for other in priced),
            cheapest=row.comparable_usd is not None and row.comparable_usd == cheapest,
            fastest=row.estimate.hours == fastest,
        )
        for row in rows
    ]
    return sorted(
        marked,
        key=lambda row: (
            row.comparable_usd is None,
            row.comparable_usd or 0.0,
            row.estimate.hours,
            row.place.label,
        ),
    )


def _without(found: Estimate, groups: set[str]) -> float | None:
    if found.usd is None:
        return None
    return math.fsum(line.usd or 0.0 for line in found.lines if line.group not in groups)


def _beats(other: Row, row: Row) -> bool:
    """Whether another priced offer is no worse in both and better in one."""
    a = (other.comparable_usd or 0.0, other.estimate.hours)
    b = (row.comparable_usd or 0.0, row.estimate.hours)
    return a[0] <= b[0] and a[1] <= b[1] and a != b
