"""The lines of an estimate: what is paid for, how much of it, and what that comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.core.recipe.schema import Recipe
from isthmus.cost.assumptions import Assumptions
from isthmus.cost.catalog import Catalog, Rate
from isthmus.cost.placing import Place
from isthmus.cost.times import Times

HOURS_A_MONTH = 730.0
"""As both clouds' calculators have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table."""

    group: str
    """compute, start-up, validation, checkpoints, end, interruptions, idle, storage, transfer."""
    name: str
    quantity: float | None
    """None: not known."""
    unit: str
    usd: float | None
    """None: nobody prices it, or the quantity is not known."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What is known of the latents: their size, and where they lie."""

    gigabytes: float | None = None
    """None: nobody said, and the recipe does not know it."""
    lies_in: tuple[str, str] | None = None
    """(backend, region); None: beside the machines."""


def lines(
    recipe: Recipe, place: Place, found: Times, catalog: Catalog, assume: Assumptions, data: Dataset
) -> list[Line]:
    """All lines; those of zero hours are left out, unpriced ones are not."""
    return [
        *_node_lines(recipe, place, found),
        *_storage_lines(recipe, place, found, catalog, assume, data),
        *_transfer_lines(place, catalog, data),
    ]


def _node_lines(recipe: Recipe, place: Place, found: Times) -> Iterator[Line]:
    price = place.usd_per_hour

    def line(group: str, name: str, hours: float, note: str = "", *, billed: bool = True) -> Line:
        usd = 0.0 if not billed else None if price is None else hours * price
        return Line(
            group=group, name=name, quantity=hours * place.nodes, unit="node-hours", usd=usd, note=note
        )

    for stage, hours in zip(recipe.stages, found.stages_h, strict=True):
        yield line("compute", stage.name, hours)
    free = found.unbilled_h > 0
    if found.allocation_h:
        note = "not billed" if free else ""
        yield line("start-up", "node allocation", found.allocation_h, note, billed=not free)
    if found.pull_h:
        yield line("start-up", "image pull", found.pull_h)
    if found.start_h:
        yield line("start-up", "processes and data", found.start_h)
    if found.compile_h:
        yield line("start-up", "compile", found.compile_h)
    if found.validation_h:
        yield line("validation", "loss and grids", found.validation_h)
    yield line("checkpoints", f"{found.checkpoints:,.0f} stalls", found.checkpoints_h)
    if found.end_h:
        yield line("end", "last checkpoint and validation", found.end_h)
    if found.interrupted_h > 1e-9:
        # Of what restarts take, waiting for nodes is as free as the first time.
        waits = found.allocation_h * found.interruptions if free else 0.0
        name = f"{found.interruptions:,.1f} restarts and work done twice"
        yield line("interruptions", name, max(0.0, found.interrupted_h - waits))
    if found.idle_h:
        yield line("idle", "before nodes are taken down", found.idle_h)


def _storage_lines(
    recipe: Recipe, place: Place, found: Times, catalog: Catalog, assume: Assumptions, data: Dataset
) -> Iterator[Line]:
    if place.backend == "local":
        return
    rates = catalog.rate(place.backend, "storage", place.region)
    months = found.total_h / HOURS_A_MONTH + assume.kept_months
    yield _amount("storage", "dataset", _times(data.gigabytes, months), "GB-months", rates, "size unknown")
    size = None if found.checkpoint_bytes is None else found.checkpoint_bytes / 1e9
    yield _amount(
        "storage",
        f"checkpoints, {kept_checkpoints(recipe, found):,} kept",
        _times(size, kept_checkpoints(recipe, found) * months),
        "GB-months",
        rates,
        "size unknown",
    )


def _transfer_lines(place: Place, catalog: Catalog, data: Dataset) -> Iterator[Line]:
    if data.lies_in is None or place.backend == "local":
        return
    backend, region = data.lies_in
    if (backend, region) == (place.backend, place.region):
        return
    if backend == place.backend:
        rates = catalog.rate(backend, "inter_region", region)
        exact = [rate for rate in rates if rate.to == place.region]
        rates, name = exact or rates, f"dataset from {region}"
    else:
        rates, name = catalog.rate(backend, "egress", region), f"dataset out of {backend} {region}"
    yield _amount("transfer", name, data.gigabytes, "GB", rates, "size unknown")


def kept_checkpoints(recipe: Recipe, found: Times) -> int:
    """Checkpoints that are there at the end: the newest, and those at multiples of `keep_every`."""
    newest = min(recipe.checkpoint.keep, max(1, round(found.checkpoints)))
    if recipe.checkpoint.keep_every is None:
        return newest
    steps = sum(stage.total_steps for stage in recipe.stages)
    return newest + steps // recipe.checkpoint.keep_every


def tiered_usd(amount: float, rates: list[Rate]) -> float | None:
    """What an amount of a month costs when it gets cheaper with more; None where a tier that it reaches has no figure.

    Args:
        rates: by the amount that they start at, the first from zero or the free allowance.
    """
    total, begun = 0.0, False
    for index, rate in enumerate(rates):
        end = rates[index + 1].from_gb if index + 1 < len(rates) else float("inf")
        part = min(amount, end) - rate.from_gb
        if part <= 0:
            continue
        if rate.usd is None:
            return None
        total, begun = total + part * rate.usd, True
    return total if begun or (rates and amount == 0) else None


def _amount(
    group: str, name: str, quantity: float | None, unit: str, rates: list[Rate], unknown: str
) -> Line:
    # One destination's tiers, not those of all of them one after the other.
    rates = [rate for rate in rates if rate.to == rates[0].to]
    usd = None if quantity is None else tiered_usd(quantity, rates)
    note = unknown if quantity is None else "unpriced" if usd is None else ""
    return Line(group=group, name=name, quantity=quantity, unit=unit, usd=usd, note=note)


def _times(size: float | None, factor: float) -> float | None:
    return None if size is None else size * factor
