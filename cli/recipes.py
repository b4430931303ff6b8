"""``isthmus recipes``: list, show, check, schema."""

from __future__ import annotations

import typer

from isthmus.cli.output import emit

_AS_JSON = typer.Option(False, "--json", help="Print JSON.")
_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field, as in stages.0.steps=500. May be repeated."
)


def register(app: typer.Typer) -> None:
    """Add the command group to the application."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(list_recipes)
    group.command("show")(show)
    group.command("check")(check)
    group.command("schema")(schema)
    app.add_typer(group, name="recipes", help="Look at recipes and check them.")


def list_recipes(as_json: bool = _AS_JSON) -> None:
    """List the recipes that ship with isthmus.

    Example: isthmus recipes list
    """
    from isthmus.core.recipe import load_recipe
    from isthmus.core.recipe.load import shipped_recipes
    from isthmus.core.recipe.summary import title

    rows: list[dict[str, str]] = []
    for name, file in shipped_recipes().items():
        recipe = load_recipe(name).recipe
        rows.append(
            {
                "name": name,
                "family": recipe.model.family,
                "resolutions": "/".join(str(stage.resolution) for stage in recipe.stages),
                "title": title(file.read_text("utf-8")),
            }
        )
    widths = {key: max(len(row[key]) for row in rows) for key in ("name", "family", "resolutions")}
    lines = [
        "  ".join([*(f"{row[key]:{width}}" for key, width in widths.items()), row["title"]]) for row in rows
    ]
    emit(rows, as_json=as_json, text="\n".join(lines))


def show(
    recipe: str = typer.Argument(help="A file, or a name from `isthmus recipes list`."),
    overrides: list[str] = _OVERRIDES,
    as_json: bool = _AS_JSON,
) -> None:
    """Print a recipe: as written with its comments, or with overrides applied.

    Example: isthmus recipes show quickstart > my.yaml
    """
    from isthmus.core.recipe import parse_recipe
    from isthmus.core.recipe.dump import dump_recipe, recipe_data
    from isthmus.core.recipe.load import read_recipe

    filename, text = read_recipe(recipe)
    loaded = parse_recipe(text, filename=filename, overrides=overrides).recipe
    emit(
        recipe_data(loaded),
        as_json=as_json,
        text=(dump_recipe(loaded) if overrides else text).rstrip("\n"),
    )


def check(
    recipe: str = typer.Argument(help="A file, or a name from `isthmus recipes list`."),
    overrides: list[str] = _OVERRIDES,
    backend: str = typer.Option("", "--backend", help="Also check that it can go to this backend."),
    as_json: bool = _AS_JSON,
) -> None:
    """Check a recipe and say what it amounts to. All problems are listed at once; exit code 2 if there are any.

    Example: isthmus recipes check my.yaml --set stages.0.global_batch_size=1024
    """
    from isthmus.cli.checking import Request
    from isthmus.cli.checking import check as check_recipe

    check_recipe(Request(recipe, overrides, backend, as_json))


def schema() -> None:
    """Print the recipe's JSON schema, for editors to complete and check from.

    Example: isthmus recipes schema > recipe.schema.json
    """
    from isthmus.core.recipe.json_schema import recipe_schema

    emit(recipe_schema(), as_json=True, text="")
