"""``isthmus cost RECIPE``: what a whole run would cost somewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from isthmus.cli.output import emit

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Recipe
    from isthmus.cost.assumptions import Assumptions
    from isthmus.cost.catalog import Catalog
    from isthmus.cost.chart import AtNodes
    from isthmus.cost.estimate import Estimate
    from isthmus.cost.lines import Dataset

OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field, as in stages.0.steps=500. May be repeated."
)
ASSUME = typer.Option(
    [],
    "--assume",
    metavar="NAME=VALUE",
    help="Another assumption, as in spot_interruptions=0.02 (of a node in an hour). May be repeated.",
)
PRICES = typer.Option("", "--prices", metavar="FILE", help="Your own prices, over the snapshot's.")
DATASET_GB = typer.Option(
    None, "--dataset-gb", help="Size of the latents; default: what lies here, or unknown."
)
DATA_IN = typer.Option(
    "", "--data-in", metavar="BACKEND:REGION", help="Where the data lies, such as azure:italynorth."
)
UNPRICED_EXIT = 2


def recipe(
    recipe: str = typer.Argument(metavar="RECIPE", help="A file, or a name from `isthmus recipes list`."),
    backend: str = typer.Option(
        "",
        "--backend",
        metavar="NAME",
        help="azure, sagemaker or local; default: the first of compute.offers.",
    ),
    region: str = typer.Option("", "--region", help="Such as italynorth or us-east-1."),
    tier: str = typer.Option("", "--tier", help="on_demand, spot or reserved."),
    sku: str = typer.Option("", "--sku", help="Such as Standard_ND96amsr_A100_v4 or ml.p4d.24xlarge."),
    nodes: int | None = typer.Option(None, "--nodes", help="Another number of machines."),
    prices: str = PRICES,
    dataset_gb: float | None = DATASET_GB,
    data_in: str = DATA_IN,
    assume: list[str] = ASSUME,
    overrides: list[str] = OVERRIDES,
    chart: str = typer.Option("", "--chart", metavar="FILE", help="Also draw it: .svg or .png."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Estimate hours and dollars of a whole run, line by line, with an interval. Asks no network.

    Exit code 2 when nobody prices the machines: hours are printed all the same, and how to add the price.

    Example: isthmus cost sdxl-progressive --backend azure --region eastus --tier on_demand
    """
    from isthmus.cli.costing import catalog_of, dataset_of, known_measurements, warn
    from isthmus.core.recipe import load_recipe
    from isthmus.cost.assumptions import assumptions
    from isthmus.cost.estimate import estimate
    from isthmus.cost.measured import fitting
    from isthmus.cost.own_price import own_priced
    from isthmus.cost.placing import as_measured, check_tier, place
    from isthmus.cost.table import estimate_json, estimate_text

    chosen = assumptions(assume)
    loaded = load_recipe(recipe, overrides).recipe
    catalog = catalog_of(prices)
    name = backend or next((offer.backend for offer in loaded.compute.offers), "local")
    where = place(
        loaded,
        catalog,
        backend=name,
        region=region or None,
        tier=check_tier(tier),
        sku=sku or None,
        nodes=nodes,
    )
    measured = fitting(
        known_measurements(loaded),
        backend=where.backend,
        sku=where.sku,
        nodes=where.nodes,
        gpus_per_node=where.gpus_per_node,
    )
    if measured is not None:
        where = as_measured(where, measured.sku, measured.region, catalog)
    where = own_priced(loaded, where)
    data = dataset_of(loaded, dataset_gb, data_in or None)
    found = estimate(loaded, place=where, catalog=catalog, assume=chosen, data=data, measured=measured)
    if chart:
        _draw(chart, loaded, found, catalog, chosen, data)
    warn(found.warnings)
    emit(estimate_json(found), as_json=as_json, text=lambda: estimate_text(found))
    if found.usd is None and where.backend != "local":
        from sys import stderr

        print(f"error: {where.label}: unpriced\nhint: {where.how_to_price()}", file=stderr)
        raise typer.Exit(UNPRICED_EXIT)


def _draw(
    chart: str, recipe: Recipe, found: Estimate, catalog: Catalog, assume: Assumptions, data: Dataset
) -> None:
    from pathlib import Path

    from isthmus.cost.chart import cost_chart, node_counts

    counts = node_counts(recipe, found.place.gpus_per_node)
    sweep = [_at(recipe, found, nodes, catalog, assume, data) for nodes in counts]
    cost_chart(found, sweep).write(Path(chart).expanduser())


def _at(
    recipe: Recipe, found: Estimate, nodes: int, catalog: Catalog, assume: Assumptions, data: Dataset
) -> AtNodes:
    """The same run on so many nodes; what was measured holds for its own number only."""
    from dataclasses import replace

    from isthmus.cost.chart import AtNodes
    from isthmus.cost.estimate import estimate

    if nodes == found.place.nodes:
        other = found
    else:
        place = replace(found.place, nodes=nodes)
        other = estimate(recipe, place=place, catalog=catalog, assume=assume, data=data)
    return AtNodes(nodes=nodes, usd=other.usd, hours=other.hours, node_hours=other.times.billed_h * nodes)
