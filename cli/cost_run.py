"""``isthmus cost run``: what a run has cost, and what the rest of it would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.cost_recipe import ASSUME, PRICES
from isthmus.cli.output import emit

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Recipe
    from isthmus.cost.assumptions import Assumptions
    from isthmus.cost.catalog import Catalog
    from isthmus.cost.estimate import Estimate
    from isthmus.cost.spent import Rest, Spent


def run(
    run: str = typer.Argument(
        metavar="RUN", help="A run's id, the start of it, or its directory (a path or URI)."
    ),
    change: str = typer.Option(
        "",
        "--what-if",
        metavar="CHANGES",
        help="The rest elsewhere, as in nodes=8,tier=spot,sku=ml.p5.48xlarge.",
    ),
    prices: str = PRICES,
    assume: list[str] = ASSUME,
    offline: bool = typer.Option(
        False, "--offline", help="Do not ask the clouds how long their machines ran; its own events tell."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say what a run has cost so far over all its restarts and tiers, against its estimate, and what the rest would cost.

    Example: isthmus cost run sdxl-progressive --what-if tier=on_demand
    """
    from isthmus.backends.runs import find
    from isthmus.cli.costing import catalog_of, warn
    from isthmus.cost.assumptions import assumptions
    from isthmus.cost.spent import what_if
    from isthmus.errors import IsthmusError

    changes = what_if(change) if change else None
    chosen, catalog = assumptions(assume), catalog_of(prices)
    record = find(run)
    recipe, so_far = _so_far(record.run_uri, catalog, offline=offline)
    if recipe.encode is not None:
        from isthmus.cli.cost_run_encode import tell

        tell(record, recipe, so_far, catalog, changes, change, as_json=as_json)
        return
    here: Rest | None = None
    whole: Estimate | None = None
    other: Rest | None = None
    try:
        whole, here = _rest_here(recipe, so_far, catalog, chosen)
    except IsthmusError as error:
        # What was spent is known all the same.
        warn([f"the rest is not estimated: {error}"])
    if changes is not None:
        from isthmus.cost.spent import rest

        place = {**place_of(so_far), **changes}
        if changes.get("backend", place["backend"]) != place_of(so_far)["backend"]:
            place = {"backend": place["backend"], **changes}
        other = rest(recipe, so_far, catalog, assume=chosen, here=whole, **place)
    facts = _facts(record.id, so_far, here, other, change)
    emit(facts, as_json=as_json, text=lambda: _text(record.id, so_far, here, other, change))


def _so_far(run_uri: str, catalog: Catalog, *, offline: bool) -> tuple[Recipe, Spent]:
    import time
    from json import dumps

    from isthmus.backends import metering
    from isthmus.backends.supervise import spans
    from isthmus.cli.budgeting import FILE
    from isthmus.cli.costing import warn
    from isthmus.core.recipe import parse_recipe
    from isthmus.cost.spent import spent
    from isthmus.storage.rundir import RunDirectory

    directory = RunDirectory.open(run_uri)
    data = directory.read_run_json()
    recipe = parse_recipe(dumps(data["recipe"]), filename=f"{data.get('id')}/run.json").recipe
    events = directory.events()
    encodes = recipe.encode is not None
    rows = directory.read_metrics("encode" if encodes else "train")
    done = int(rows[-1]["pictures" if encodes else "step"]) if rows else 0
    return recipe, spent(
        recipe,
        spans(events, time.time()),
        [one.data for one in directory.submissions().all()],
        step=done,
        total=int((rows[-1].get("expected") if rows else 0) or 0) if encodes else None,
        metered=metering.told(events)
        if offline
        else metering.asked(directory, events, say=lambda text: warn([text])),
        catalog=catalog,
        estimate=_kept(directory.read_file(FILE)),
    )


def _kept(data: bytes | None) -> dict[str, Any] | None:
    from json import loads

    try:
        kept = loads(data) if data else None
    except ValueError:
        return None
    return kept if isinstance(kept, dict) else None


def place_of(so_far: Spent) -> dict[str, Any]:
    """Where the run was last, as arguments of an estimate."""
    if not so_far.attempts:
        return {"backend": None}
    last = so_far.attempts[-1]
    return {"backend": last.backend, "region": last.region, "tier": last.tier, "sku": last.sku}


def _rest_here(recipe: Recipe, so_far: Spent, catalog: Catalog, assume: Assumptions) -> tuple[Estimate, Rest]:
    from isthmus.cli.costing import known_measurements
    from isthmus.cost.estimate import estimate
    from isthmus.cost.measured import fitting
    from isthmus.cost.placing import place
    from isthmus.cost.spent import rest

    told = place_of(so_far)
    name = told.pop("backend") or "local"
    where = place(recipe, catalog, backend=name, **told)
    measured = fitting(
        known_measurements(recipe),
        backend=where.backend,
        sku=where.sku,
        nodes=where.nodes,
        gpus_per_node=where.gpus_per_node,
    )
    whole = estimate(recipe, place=where, catalog=catalog, assume=assume, measured=measured)
    return whole, rest(recipe, so_far, catalog, assume=assume, here=whole, place=where, measured=measured)


def _facts(run_id: str, so_far: Spent, here: Rest | None, other: Rest | None, change: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "run": run_id,
        "usd": so_far.usd,
        "hours": so_far.hours,
        "step": so_far.step,
        "total_steps": so_far.total_steps,
        "attempts": attempt_facts(so_far),
        "estimate_at_launch": so_far.estimate,
        "rest": _rest_facts(here),
    }
    if change:
        facts["what_if"] = {"changes": change, **(_rest_facts(other) or {})}
    return facts


def attempt_facts(so_far: Spent) -> list[dict[str, Any]]:
    """Each attempt, as JSON has it."""
    return [
        {
            "job": attempt.job,
            "backend": attempt.backend,
            "region": attempt.region,
            "tier": attempt.tier,
            "sku": attempt.sku,
            "hours": attempt.hours,
            "billed": attempt.billed,
            "hours_from": attempt.hours_from,
            "usd_per_hour": attempt.usd_per_hour,
            "usd": attempt.usd,
            "price_from": attempt.price_from,
        }
        for attempt in so_far.attempts
    ]


def _rest_facts(rest: Rest | None) -> dict[str, Any] | None:
    if rest is None:
        return None
    from isthmus.cost.table import place_json

    return {**place_json(rest.estimate), "hours": rest.hours, "usd": rest.usd}


def _text(run_id: str, so_far: Spent, here: Rest | None, other: Rest | None, change: str) -> str:
    from isthmus.cost.table import amount, dollars

    lines = [
        f"{run_id}: {money(so_far.usd)}, {amount(so_far.hours)} h, step {so_far.step:,} of {so_far.total_steps:,} "
        f"({so_far.share:.0%})",
        *attempt_lines(so_far),
    ]
    if here is not None:
        lines.append(f"  the rest here: {money(here.usd)}, {amount(here.hours)} h")
        if so_far.usd is not None and here.usd is not None:
            total = f"{dollars(so_far.usd + here.usd)}, {amount(so_far.hours + here.hours)} h"
            lines.append(f"  together: {total}")
    if other is not None:
        lines.append(
            f"  the rest with {change}: {money(other.usd)}, {amount(other.hours)} h on {other.estimate.place.label}"
        )
    return "\n".join(lines)


def money(usd: float | None) -> str:
    """Dollars, or that nobody prices it."""
    from isthmus.cost.table import dollars

    return "unpriced" if usd is None else dollars(usd)


def attempt_lines(so_far: Spent) -> list[str]:
    """A line for each attempt, and one for the estimate at launch."""
    from isthmus.cost.table import amount, dollars

    lines = []
    for attempt in so_far.attempts:
        place = " ".join(
            word for word in (attempt.backend, attempt.region, attempt.tier, attempt.sku) if word
        )
        rate = "unpriced" if attempt.usd_per_hour is None else f"${attempt.usd_per_hour:,.2f}/h"
        told = {"today": ", at today's price", "launch": "", "nobody": ""}[attempt.price_from]
        clock = {"events": "", "cloud": " by its cloud's clock", "billed": " billed"}[attempt.hours_from]
        hours = f"{amount(attempt.hours)} h{clock}"
        lines.append(f"  {attempt.job or 'job'}  {place}  {hours} x {rate} = {money(attempt.usd)}{told}")
    if so_far.estimate is None:
        lines.append("  estimate at launch: none was recorded")
    else:
        told_usd = so_far.estimate.get("usd")
        ends = so_far.estimate.get("usd_interval80") or so_far.estimate.get("usd_interval")
        span = f" ({dollars(ends[0])} to {dollars(ends[1])})" if ends else ""
        lines.append(
            f"  estimate at launch: {money(told_usd)}{span}, {amount(so_far.estimate.get('hours') or 0.0)} h"
        )
    return lines
