"""``isthmus prices``: the snapshot of prices that estimates are made with."""

from __future__ import annotations

import typer

from isthmus.cli.output import emit


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="Prices of machines, storage and traffic."
    )
    group.command("show")(show)
    app.add_typer(group, name="prices")


def show(
    gpu: str | None = typer.Option(None, "--gpu", help="Only machines with this GPU, such as a100-80gb."),
    region: str | None = typer.Option(None, "--region", help="Only this region, or those that start so."),
    backend: str | None = typer.Option(None, "--backend", help="Only azure or sagemaker."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the prices that estimates use, with where each is from and how old it is.

    Example: isthmus prices show --gpu a100-80gb
    """
    from dataclasses import asdict

    from isthmus.cost.catalog import load_catalog

    rows = [
        price
        for price in load_catalog().prices
        if gpu in (None, price.gpu)
        and (region is None or price.region.startswith(region))
        and backend in (None, price.backend)
    ]
    lines = [f"{p.backend:<10} {p.sku:<28} {p.region:<14} {p.tier:<10} {p.usd_per_hour}" for p in rows]
    emit([asdict(price) for price in rows], as_json=as_json, text="\n".join(lines))
