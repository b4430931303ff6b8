"""``isthmus prices``: the snapshot of prices that estimates are made with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.output import counted, emit
from isthmus.errors import IsthmusError, UsageError

if TYPE_CHECKING:
    from isthmus.cost.catalog import Price

CLOUDS = ("azure", "sagemaker")


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="Prices of machines, storage and traffic."
    )
    group.command("show")(show)
    group.command("check")(check)
    group.command("refresh")(refresh)
    app.add_typer(group, name="prices")


def show(
    gpu: str | None = typer.Option(None, "--gpu", help="Only machines with this GPU, such as a100-80gb."),
    region: str | None = typer.Option(None, "--region", help="Only regions whose name starts so."),
    backend: str | None = typer.Option(None, "--backend", help="Only azure, sagemaker or ec2."),
    traffic: bool = typer.Option(False, "--traffic", help="Storage and traffic instead of machines."),
    prices: str | None = typer.Option(
        None, "--prices", metavar="FILE", help="Your own rows over the snapshot; default $ISTHMUS_PRICES."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the prices that estimates use, with where each is from and how old it is.

    Example: isthmus prices show --gpu a100-80gb --region eastus
    """
    from dataclasses import asdict

    catalog = _catalog(prices)
    rows = list(catalog.rates if traffic else catalog.prices)
    known = {price.gpu for price in catalog.prices}
    if gpu is not None and gpu not in known:
        hint = f"priced are {', '.join(sorted(known))}; docs/cost.md says how to add a price"
        raise UsageError(f"nobody prices the GPU `{gpu}`", hint=hint)
    found = [
        row
        for row in rows
        if (gpu is None or getattr(row, "gpu", None) == gpu)
        and (region is None or row.region.startswith(region))
        and backend in (None, row.backend)
    ]
    if not found:
        raise UsageError("no row is like that", hint="`isthmus prices show` prints all")
    data: list[dict[str, Any]] = [asdict(row) for row in found]
    for row, dump in zip(found, data, strict=True):
        if not traffic:
            dump["age_days"] = row.age_days()
    text = "\n".join(_rates(data) if traffic else _prices(found))
    emit(data, as_json=as_json, text=text)


def _catalog(prices: str | None) -> Any:
    from pathlib import Path

    from isthmus.cost.catalog import load_catalog

    return load_catalog(Path(prices) if prices else None)


def _prices(rows: list[Price]) -> list[str]:
    lines = [
        f"{'':<9} {'sku':<27} {'gpus':<16} {'region':<16} {'tier':<12} {'$/hour':>9} {'$/GPU':>7}  as of"
    ]
    old = 0
    for row in sorted(
        rows, key=lambda row: (row.gpu, row.gpus, row.usd_per_hour is None, row.usd_per_hour or 0)
    ):
        usd = row.usd_per_hour
        each = "" if usd is None else f"{usd / row.gpus:.3f}"
        stale = row.stale() is not None
        old += stale
        lines.append(
            f"{row.backend:<9} {row.sku:<27} {f'{row.gpus} x {row.gpu}':<16} {row.region:<16} {row.tier:<12} "
            f"{'unpriced' if usd is None else f'{usd:.3f}':>9} {each:>7}  {row.as_of}{' (old)' if stale else ''}"
        )
    lines.append("sources and notes: --json; your own prices: --prices FILE (docs/cost.md)")
    if old:
        lines.append(f"{counted(old, 'row is', 'rows are')} older than half a year: `isthmus prices refresh`")
    return lines


def _rates(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        usd = "unpriced" if row["usd"] is None else f"${row['usd']:g}"
        to = f" to {row['to']}" if row["to"] else ""
        start = f" from {row['from_gb']:,.0f} GB" if row["from_gb"] else ""
        lines.append(
            f"{row['backend']:<9} {row['region']:<16} {row['kind']}{to}{start}: {usd} a {row['unit']}"
        )
    return lines


def check(
    prices: str | None = typer.Option(None, "--prices", metavar="FILE", help="Check your own rows, too."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check the snapshot: GPU counts, zero prices, spot above on-demand, currencies, dates; say what is old or unpriced.

    Example: isthmus prices check
    """
    from datetime import date

    from isthmus.cost.integrity import price_problems, rate_problems

    catalog, today = _catalog(prices), date.today()
    wrong = price_problems(catalog.prices, today) + rate_problems(catalog.rates, today)
    old = [line for price in catalog.prices if (line := price.stale(today))]
    unpriced = [" ".join(price.key) for price in catalog.prices if price.usd_per_hour is None]
    if wrong and not as_json:
        more = f" (and {len(wrong) - 1} more: --json)" if len(wrong) > 1 else ""
        raise IsthmusError(f"{wrong[0]}{more}", where="prices")
    data = {"rows": len(catalog.prices), "wrong": wrong, "old": old, "unpriced": unpriced}
    text = [
        f"{len(catalog.prices)} prices and {len(catalog.rates)} rates of storage and traffic are in order"
    ]
    if old:
        text.append(f"{len(old)} are older than half a year, such as: {old[0]}")
    if unpriced:
        text.append(f"{len(unpriced)} have no figure, such as {unpriced[0]}")
    emit(data, as_json=as_json, text="\n".join(text))
    if wrong:
        raise typer.Exit(1)


def refresh(
    cloud: str | None = typer.Option(None, "--cloud", help="azure or sagemaker; default both."),
    region: Annotated[
        list[str] | None, typer.Option("--region", help="Only this region; may be repeated.")
    ] = None,
    to: str | None = typer.Option(
        None, "--to", metavar="FOLDER", help="Where to keep them; default with this machine's state."
    ),
    azure_endpoint: str | None = typer.Option(None, "--azure-endpoint", help="A mirror of the price API."),
    aws_endpoint: str | None = typer.Option(None, "--aws-endpoint", help="A mirror of the price list."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Fetch today's list prices of both clouds; needs no account. All or nothing: a failure leaves the old ones.

    Example: isthmus prices refresh --cloud azure --region italynorth
    """
    from datetime import date
    from pathlib import Path

    from isthmus.cost import refresh_aws, refresh_azure
    from isthmus.cost.catalog import PRICES, TRAFFIC, Price, Rate, snapshot, snapshot_folder
    from isthmus.cost.refresh import Http, merge, write

    if cloud is not None and cloud not in CLOUDS:
        raise UsageError(f"there is no price list of `{cloud}`", hint=f"one of {', '.join(CLOUDS)}")
    http, today = Http(), date.today()
    new: tuple[list[Price], list[Rate]] = ([], [])
    endpoints = {
        "azure": (refresh_azure, azure_endpoint or refresh_azure.ENDPOINT),
        "sagemaker": (refresh_aws, aws_endpoint or refresh_aws.ENDPOINT),
    }
    for name, (module, endpoint) in endpoints.items():
        if cloud in (None, name):
            found = module.fetch(http, today, endpoint=endpoint, regions=region or ())
            new[0].extend(found[0])
            new[1].extend(found[1])
    folder = Path(to) if to else snapshot_folder()
    prices, rates = merge(snapshot(folder), new, today)
    write(rates, Rate, folder / TRAFFIC.name)
    write(prices, Price, folder / PRICES.name)
    data = {
        "prices": len(new[0]),
        "rates": len(new[1]),
        "kept": len(prices) - len(new[0]),
        "folder": str(folder),
    }
    text = f"{len(new[0])} prices and {len(new[1])} rates of today are in {folder}; {data['kept']} older ones stay"
    emit(data, as_json=as_json, text=text)
