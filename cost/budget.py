"""The budget before a launch: what an estimate says of `budget.max_usd` and `max_hours`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.backends.spec import Finding
from isthmus.core.recipe.schema import Budget, Recipe
from isthmus.cost.encoding import EncodeEstimate
from isthmus.cost.estimate import Estimate
from isthmus.cost.table import amount, dollars, estimate_json

USD, HOURS, UNPRICED, UNESTIMATED = (
    "budget.max_usd",
    "budget.max_hours",
    "budget.unpriced",
    "budget.unestimated",
)
"""Ids of the findings."""
FIX = "shorten the stages, or look for another offer: isthmus compare RECIPE"
ENCODE_FIX = "encode at bf16, or fewer pictures, resolutions or captions, or look for another offer"


def budget_findings(recipe: Recipe, found: Estimate) -> list[Finding]:
    """An error where even the estimate's lower end is over a cap, a warning where its upper end is.

    Args:
        recipe: whose budget counts.
        found: of that recipe where it shall run.
    """
    budget, findings = recipe.budget, []
    if budget.max_hours is not None:
        # The cap counts hours of running, not of waiting for nodes.
        waited = found.times.allocation_h * (1 + found.times.interruptions)
        low, high = (max(0.0, hours - waited) for hours in found.hours_interval)
        findings += _over(HOURS, budget.max_hours, low, high, _hours, found.place.label)
    if budget.max_usd is not None:
        if found.usd_interval is None:
            findings.append(
                Finding(
                    UNPRICED,
                    "warning",
                    f"budget.max_usd {dollars(budget.max_usd)} cannot be checked: {found.place.label} is unpriced",
                    found.place.how_to_price(),
                )
            )
        else:
            low, high = found.usd_interval
            findings += _over(USD, budget.max_usd, low, high, dollars, found.place.label)
    return findings


def encode_findings(budget: Budget, found: EncodeEstimate, where: str) -> list[Finding]:
    """As `budget_findings`, of an encode job."""
    findings = []
    if budget.max_hours is not None:
        findings += _over(HOURS, budget.max_hours, *found.hours_interval, _hours, where, ENCODE_FIX)
    if budget.max_usd is not None:
        if found.usd_interval is None:
            text = f"budget.max_usd {dollars(budget.max_usd)} cannot be checked: {where} is unpriced"
            findings.append(Finding(UNPRICED, "warning", text, "give --prices FILE with a row for it"))
        else:
            findings += _over(USD, budget.max_usd, *found.usd_interval, dollars, where, ENCODE_FIX)
    return findings


def launch_record(found: Estimate) -> Mapping[str, Any]:
    """What of an estimate is kept with a run, to be held against what it has cost."""
    told = estimate_json(found)
    names = (
        "backend",
        "region",
        "tier",
        "sku",
        "nodes",
        "usd",
        "usd_interval80",
        "hours",
        "hours_interval80",
        "speed",
    )
    return {name: told[name] for name in (*names, "usd_per_hour", "basis")}


def _hours(hours: float) -> str:
    return f"{amount(hours)} h"


def _over(
    id: str, cap: float, low: float, high: float, text: Callable[[float], str], where: str, instead: str = FIX
) -> list[Finding]:
    said = f"{text(low)} to {text(high)} are expected on {where}"
    fix = f"raise {id}, {instead}"
    if low > cap:
        return [Finding(id, "error", f"{id} {text(cap)} cannot be enough: {said}", fix)]
    if high > cap:
        return [Finding(id, "warning", f"{id} {text(cap)} may not be enough: {said}", fix)]
    return []
