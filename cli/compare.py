"""``isthmus compare``: every offer of both clouds that a recipe fits on."""

from __future__ import annotations

import typer

from isthmus.cli.cost_recipe import ASSUME, DATA_IN, DATASET_GB, OVERRIDES, PRICES
from isthmus.cli.output import emit

SHOWN = 20
"""Priced rows, unless all are asked for; below them a few that nobody prices."""

_REGIONS = typer.Option([], "--region", help="A region, or us, eu, asia ... May be repeated.")
_TIERS = typer.Option([], "--tier", help="on_demand, spot or reserved. May be repeated.")
_GPUS = typer.Option([], "--gpu", help="Only these, such as a100-80gb. May be repeated.")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("compare")(compare)


def compare(
    recipe: str = typer.Argument(metavar="RECIPE", help="A file, or a name from `isthmus recipes list`."),
    regions: list[str] = _REGIONS,
    tiers: list[str] = _TIERS,
    gpus: list[str] = _GPUS,
    backends: str = typer.Option(
        "", "--backend", metavar="NAMES", help="Only these, such as azure,sagemaker."
    ),
    max_usd: float | None = typer.Option(None, "--max-usd", help="Leave out what costs more."),
    deadline: str = typer.Option("", "--deadline", help="Leave out what takes longer, such as 72 h or 5 d."),
    with_data_move: bool = typer.Option(
        False, "--with-data-move", help="Moving the data to where it does not lie is part of the cost."
    ),
    data_in: str = DATA_IN,
    dataset_gb: float | None = DATASET_GB,
    prices: str = PRICES,
    assume: list[str] = ASSUME,
    overrides: list[str] = OVERRIDES,
    measure: bool = typer.Option(
        False, "--measure", help="Launch a short run on each backend and predict from what it does."
    ),
    steps: int | None = typer.Option(None, "--steps", help="With --measure: steps of a stage."),
    html: str = typer.Option("", "--html", metavar="FILE", help="Also write a page with a chart."),
    show_all: bool = typer.Option(
        False, "--all", help=f"Show all offers, not only {SHOWN} priced ones and a few others."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Price a recipe on every offer of both clouds: dollars, hours, an interval, and the Pareto front. Asks no network.

    Example: isthmus compare sdxl-progressive --region eu --max-usd 200000 --html compare.html
    """
    from isthmus.cli.costing import catalog_of, dataset_of, known_measurements, warn
    from isthmus.core.recipe import load_recipe
    from isthmus.cost.assumptions import assumptions
    from isthmus.cost.compare import Wish
    from isthmus.cost.compare import compare as compared
    from isthmus.cost.compare_page import comparison_json, comparison_page, comparison_text
    from isthmus.cost.placing import CLOUDS, check_tier
    from isthmus.errors import UsageError

    chosen = assumptions(assume)
    names = tuple(name for name in backends.split(",") if name)
    if measure:
        from isthmus.cli.measuring import measure as measured

        _refuse_with_measure(
            {
                "--region": regions, "--tier": tiers, "--gpu": gpus, "--max-usd": max_usd, "--deadline": deadline,
                "--with-data-move": with_data_move, "--data-in": data_in, "--dataset-gb": dataset_gb, "--html": html,
                "--all": show_all,
            }
        )  # fmt: skip
        names = names or tuple(
            dict.fromkeys(o.backend for o in load_recipe(recipe, overrides).recipe.compute.offers)
        )
        measured(
            recipe, overrides, names or ("local",), steps=steps, prices=prices, assume=chosen, as_json=as_json
        )
        return
    if steps is not None:
        raise UsageError("has no effect without --measure", where="--steps")
    for name in names:
        if name not in CLOUDS:
            raise UsageError(f"no cloud {name!r}", where="--backend", hint=f"there are {', '.join(CLOUDS)}")
    loaded = load_recipe(recipe, overrides).recipe
    if data_in and not with_data_move:
        raise UsageError("has no effect without --with-data-move", where="--data-in")
    wish = Wish(
        regions=tuple(regions),
        tiers=tuple(tier for text in tiers if (tier := check_tier(text))),
        gpus=tuple(gpus),
        backends=names or CLOUDS,
        max_usd=_positive(max_usd, "--max-usd"),
        deadline_h=_hours(deadline),
    )
    lies_in = (data_in or _home(loaded.compute.offers)) if with_data_move else None
    found = compared(
        loaded,
        catalog_of(prices),
        wish,
        assume=chosen,
        data=dataset_of(loaded, dataset_gb, lies_in),
        measured=known_measurements(loaded),
    )
    if html:
        from datetime import UTC, datetime

        write(html, comparison_page(found, written=datetime.now(UTC).strftime("%Y-%m-%d")))
    warn(found.warnings)
    emit(
        comparison_json(found),
        as_json=as_json,
        text=lambda: comparison_text(found, None if show_all else SHOWN),
    )


def _refuse_with_measure(options: dict[str, object]) -> None:
    from isthmus.errors import UsageError

    for name, value in options.items():
        if value:
            raise UsageError(
                "has no effect with --measure", where=name, hint="compare once more, without --measure"
            )


def write(file: str, page: str) -> None:
    """A page to a file. Raises StorageError."""
    from pathlib import Path

    from isthmus.errors import StorageError

    path = Path(file).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the page: {error.strerror}", where=str(path)) from error


def _home(offers: object) -> str:
    """Where the data lies when nobody says: where the recipe would go first."""
    from isthmus.errors import UsageError

    for offer in offers if isinstance(offers, list) else []:
        if offer.region:
            return f"{offer.backend}:{offer.region}"
    raise UsageError(
        "where does the data lie?", where="--with-data-move", hint="say it: --data-in azure:italynorth"
    )


def _positive(number: float | None, where: str) -> float | None:
    from isthmus.errors import UsageError

    if number is not None and not 0 < number < 1e12:
        raise UsageError(f"{number:g} cannot be; it must be above zero", where=where)
    return number


def _hours(text: str) -> float | None:
    from isthmus.core.recipe.units import parse_duration
    from isthmus.errors import UsageError

    if not text:
        return None
    try:
        return parse_duration(text) / 3600
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}", where="--deadline") from None
