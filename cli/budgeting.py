"""A launch's estimate: held against the recipe's budget before, and kept with the run to be held against its cost after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isthmus.backends.prepare import Launch
    from isthmus.cost.estimate import Estimate

FILE = "estimate.json"
"""In the run directory; of the first launch."""


def with_budget(launch: Launch, prices: str = "", *, offline: bool = False) -> Launch:
    """The launch with what its estimate says of `budget.max_usd` and `max_hours`; nothing where there is no cap.

    Args:
        prices: a file of the user's own prices.
        offline: look at no store.
    """
    from dataclasses import replace

    from isthmus.backends.spec import Finding
    from isthmus.cost.budget import UNESTIMATED, UNPRICED, budget_findings
    from isthmus.errors import IsthmusError

    budget = launch.job.source.budget
    if budget.max_usd is None and budget.max_hours is None:
        return launch
    try:
        if launch.job.source.encode is not None:
            from isthmus.cli.encode_job import encode_budget

            found = encode_budget(launch, offline=offline)
        else:
            found = budget_findings(launch.job.source, estimate_of(launch, prices))
    except IsthmusError as error:
        if launch.backend.name == "local":
            return launch  # a CPU's speed nobody estimates, and nothing is billed
        text = f"the budget cannot be checked before the launch: {error}"
        found = [Finding(UNESTIMATED, "warning", text)]
    if any(finding.id.endswith(".price") for finding in launch.findings):
        # The backend has said of the same cap that nobody knows the price.
        found = [finding for finding in found if finding.id != UNPRICED]
    return replace(launch, findings=(*launch.findings, *found))


def keep_estimate(launch: Launch, prices: str = "") -> None:
    """Puts the estimate into the run directory, once; a run that cannot be estimated has none."""
    from contextlib import suppress
    from json import dumps

    from isthmus.cost.budget import launch_record
    from isthmus.errors import IsthmusError
    from isthmus.storage.rundir import RunDirectory

    with suppress(IsthmusError):
        run = RunDirectory(launch.job.run_uri)
        if run.read_file(FILE) is None:
            if launch.job.source.encode is not None:
                from isthmus.cli.encode_job import encode_record

                kept: Mapping[str, Any] = encode_record(launch)
            else:
                kept = launch_record(estimate_of(launch, prices))
            run.write_file(FILE, (dumps(kept, indent=1) + "\n").encode())


def estimate_of(launch: Launch, prices: str = "") -> Estimate:
    """Of a whole training run where it is about to go, at the price that the launch counts with.

    Raises IsthmusError where that cannot be told.
    """
    from isthmus.cli.costing import catalog_of, known_measurements
    from isthmus.cost.estimate import estimate
    from isthmus.cost.measured import fitting
    from isthmus.cost.placing import place, priced_at

    recipe, offer, catalog = launch.job.source, launch.offer, catalog_of(prices or None)
    away = offer is not None and launch.backend.name != "local"
    where = place(
        recipe,
        catalog,
        backend=launch.backend.name,
        region=offer.region if offer and away else None,
        tier=offer.tier if offer and away else None,
        sku=offer.sku if offer and away else None,
    )
    price = launch.usd_per_hour
    if away and price is not None and price != where.usd_per_hour:
        # As with backends.sagemaker.usd_per_hour: what the running job's cap is kept by is what it is checked by.
        where = priced_at(where, price, f"backends.{launch.backend.name}")
    measured = fitting(
        known_measurements(recipe),
        backend=where.backend,
        sku=where.sku,
        nodes=where.nodes,
        gpus_per_node=where.gpus_per_node,
    )
    return estimate(recipe, place=where, catalog=catalog, measured=measured)
