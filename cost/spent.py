"""What a run has cost so far, over its restarts, places and tiers, and what the rest would cost here or elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isthmus.backends.spec import Metered
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.assumptions import Assumptions
from isthmus.cost.catalog import Catalog
from isthmus.cost.estimate import Estimate, estimate, usd_per_hour
from isthmus.errors import UsageError

HoursFrom = Literal["events", "cloud", "billed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One time that the run was running."""

    job: str | None
    backend: str
    region: str | None
    tier: str | None
    sku: str | None
    hours: float
    hours_from: HoursFrom
    """events: from the first event to the last; cloud: by the cloud's clock; billed: what the cloud bills of these."""
    usd_per_hour: float | None
    """Of all nodes; None where nobody prices it. On demand, where the cloud tells spot's discount as fewer billed hours."""
    price_from: str
    """launch: as recorded then; today: by the catalog now; nobody."""

    @property
    def billed(self) -> bool:
        """Whether its cloud told what it bills."""
        return self.hours_from == "billed"

    @property
    def usd(self) -> float | None:
        """Of this attempt."""
        return None if self.usd_per_hour is None else self.hours * self.usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Of the whole run."""

    attempts: tuple[Attempt, ...]
    step: int
    """The last one that was done; of an encode job, pictures."""
    total_steps: int
    estimate: Mapping[str, Any] | None
    """As it was recorded at launch."""

    @property
    def hours(self) -> float:
        """Of running."""
        return math.fsum(attempt.hours for attempt in self.attempts)

    @property
    def usd(self) -> float | None:
        """None when an attempt that ran has no price: a part is no total."""
        known = [attempt.usd for attempt in self.attempts if attempt.usd is not None]
        return math.fsum(known) if len(known) == len(self.attempts) else None

    @property
    def share(self) -> float:
        """Of the steps that are done."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is left of a run, somewhere."""

    estimate: Estimate
    hours: float
    usd: float | None


def spent(
    recipe: Recipe,
    spans: Sequence[tuple[str | None, float]],
    submissions: Sequence[Mapping[str, Any]],
    *,
    step: int,
    total: int | None = None,
    metered: Mapping[str, Metered] | None = None,
    catalog: Catalog | None = None,
    estimate: Mapping[str, Any] | None = None,
) -> Spent:
    """Adds up a run.

    Args:
        recipe: as the run was begun with.
        spans: (job id, seconds) of each time it ran, see `backends.supervise.spans`.
        submissions: what was put down before each was sent: `rendered.job_id`, `rendered.backend`, `destination`, `usd_per_hour`.
        step: the last one that was done; of an encode job, pictures.
        total: how many there are; None: the recipe's steps.
        metered: job id -> what its cloud tells of it; replaces the spans of that job.
        catalog: for attempts that were submitted without a price.
        estimate: as recorded at launch.
    """
    told = {str(one["rendered"]["job_id"]): one for one in submissions}
    seconds: dict[str | None, float] = {}
    for job, part in spans:
        seconds[job] = seconds.get(job, 0.0) + part
    attempts = []
    for job, ran in seconds.items():
        one = told.get(str(job), {})
        attempts.append(_attempt(recipe, job, one, ran, (metered or {}).get(str(job)), catalog))
    return Spent(
        attempts=tuple(attempts),
        step=step,
        total_steps=sum(stage.total_steps for stage in recipe.stages) if total is None else total,
        estimate=estimate,
    )


def _attempt(
    recipe: Recipe,
    job: str | None,
    one: Mapping[str, Any],
    ran: float,
    meter: Metered | None,
    catalog: Catalog | None,
) -> Attempt:
    destination = one.get("destination") or {}
    offer = _machines(one)
    backend = str(destination.get("backend") or (one.get("rendered") or {}).get("backend") or "unknown")

    def today(tier: str | None) -> float | None:
        if catalog is None or backend == "unknown":
            return None
        return usd_per_hour(recipe, backend, offer.get("region"), tier, offer.get("sku"), catalog=catalog)

    price, source = one.get("usd_per_hour"), "launch"
    hours_from: HoursFrom = "events" if meter is None else "cloud"
    seconds = ran if meter is None else meter.seconds
    if meter is not None and meter.billable_s is not None:
        # Billed seconds are of the price on demand: with a spot price they would be discounted twice.
        spot = offer.get("tier") == "spot"
        full = today("on_demand") if spot else None
        if full is not None:
            price, source = full, "today"
        if full is not None or not spot:
            seconds, hours_from = meter.billable_s, "billed"
    if price is None:
        price, source = today(offer.get("tier")), "today"
    return Attempt(
        job=job,
        backend=backend,
        region=offer.get("region"),
        tier=offer.get("tier"),
        sku=offer.get("sku"),
        hours=seconds / 3600,
        hours_from=hours_from,
        usd_per_hour=None if price is None else float(price),
        price_from="nobody" if price is None else source,
    )


def _machines(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """Region, tier and SKU of a submission: what its backend told, else what the recipe's offer asked for."""
    return one.get("runs_on") or (one.get("destination") or {}).get("offer") or {}


CHANGES = ("backend", "region", "tier", "sku", "nodes")


def what_if(text: str) -> dict[str, Any]:
    """`nodes=8,tier=spot` as arguments of an estimate. Raises UsageError."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in CHANGES or not equals or not value:
            raise UsageError(
                f"{part.strip()!r} is no change",
                where="--what-if",
                hint=f"name=value of {', '.join(CHANGES)}",
            )
        if name == "nodes":
            if not value.isdigit() or int(value) < 1:
                raise UsageError(f"nodes must be a number of machines, got {value!r}", where="--what-if")
            found[name] = int(value)
        else:
            found[name] = value
    return found


def rest(
    recipe: Recipe,
    so_far: Spent,
    catalog: Catalog,
    *,
    assume: Assumptions | None = None,
    here: Estimate | None = None,
    **place: Any,
) -> Rest:
    """What is left of a run somewhere, by the estimator and by how fast it has been.

    The stages that are done are left out; the one it is in counts by the steps that are left. Where the run has done enough to
    tell, the ratio of its hours to those estimated for that part scales what is estimated elsewhere.

    Args:
        here: the estimate of the whole run where it has been running; gives that ratio.
        place: backend, region, tier, sku, nodes.
    """
    left = remaining(recipe, so_far.step)
    if left is None:
        whole = estimate(recipe, catalog=catalog, assume=assume, **place)
        return Rest(estimate=whole, hours=0.0, usd=None if whole.usd is None else 0.0)
    found = estimate(left, catalog=catalog, assume=assume, **place)
    ratio = pace_ratio(here, so_far) if here is not None else 1.0
    # Storage and traffic do not take longer when steps do.
    machines = math.fsum(line.usd or 0.0 for line in found.lines if line.unit == "node-hours")
    usd = None if found.usd is None else found.usd + (ratio - 1) * machines
    return Rest(estimate=found, hours=found.hours * ratio, usd=usd)


def pace_ratio(whole: Estimate, so_far: Spent) -> float:
    """Hours that the done part took over those estimated for it; 1 before a hundredth is done."""
    if so_far.share < 0.01 or not so_far.hours or not whole.hours:
        return 1.0
    return so_far.hours / (whole.hours * so_far.share)


def remaining(recipe: Recipe, step: int) -> Recipe | None:
    """The recipe of the steps that are left; None when there are none."""
    stages = []
    for stage in recipe.stages:
        total = stage.total_steps
        left = total - min(step, total)
        step -= min(step, total)
        if left:
            stages.append(stage.model_copy(update={"steps": left, "samples": None}))
    return recipe.model_copy(update={"stages": stages}) if stages else None
