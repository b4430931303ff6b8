"""``isthmus doctor``: everything that is checked before a launch, one line each."""

from __future__ import annotations

import typer

from isthmus.cli.cost_recipe import PRICES
from isthmus.cli.output import emit

_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field, as in stages.0.steps=500. May be repeated."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(doctor)


def doctor(
    recipe: str = typer.Argument(metavar="RECIPE", help="A file, or a name from `isthmus recipes list`."),
    backend: str = typer.Option(
        "",
        "--backend",
        metavar="NAME[,NAME...]",
        help="Where it shall run; default: compute.offers, or local.",
    ),
    overrides: list[str] = _OVERRIDES,
    prices: str = PRICES,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check what a launch would check, and start nothing; the exit code is the launch's: 3 when a check would refuse it.

    Example: isthmus doctor my.yaml --backend azure
    """
    from isthmus.backends.doctoring import examine, verdict
    from isthmus.cli.budgeting import with_budget
    from isthmus.cli.launch import named
    from isthmus.cli.pricing import price_function
    from isthmus.core.recipe import load_recipe

    report = examine(
        load_recipe(recipe, overrides), named(backend), price=price_function(prices),
        more=lambda launch: with_budget(launch, prices),
    )  # fmt: skip
    emit([place.to_json() for place in report], as_json=as_json, text=lambda: "\n\n".join(map(str, report)))
    if code := verdict(report):
        raise typer.Exit(code)
