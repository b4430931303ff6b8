"""``isthmus launch``: start a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from isthmus.cli.cost_recipe import PRICES
from isthmus.cli.output import emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus.backends.prepare import Launch
    from isthmus.errors import UsageError

_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field, as in stages.0.steps=500. May be repeated."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("launch")(launch)


def launch(
    recipe: str = typer.Argument(metavar="RECIPE", help="A file, or a name from `isthmus recipes list`."),
    backend: str = typer.Option(
        "",
        "--backend",
        metavar="NAME[,NAME...]",
        help="Where to run, and where to go next; default: compute.offers in their order, or local.",
    ),
    overrides: list[str] = _OVERRIDES,
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Print the native request and what is wrong with it; no network, nothing written.",
    ),
    format: str = typer.Option(
        "text",
        "--format",
        metavar="json|yaml|text",
        help="Of a dry run: the request as the cloud's own tools take it, or all of it as text.",
    ),
    detach: bool = typer.Option(False, "--detach", help="Return at once; the run goes on."),
    follow: bool = typer.Option(
        False, "--follow", help="Stay with a job that goes on by itself: its log, and `isthmus supervise`."
    ),
    run_id: str = typer.Option("", "--run-id", metavar="ID", help="Name the run; a known one goes on."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask, even when there are warnings."),
    prices: str = PRICES,
    as_json: bool = typer.Option(False, "--json", help="Print JSON; the log goes to stderr."),
) -> None:
    """Check a recipe and start it as a run. Exit codes: 0 finished, 1 failed, 2 usage, 3 refused, 4 stopped, 75 preempted.

    On this machine it stays in the foreground, where Ctrl-C checkpoints and ends the run; a cloud's job goes on by itself.

    Example: isthmus launch my.yaml --backend azure,sagemaker --set stages.0.steps=500 --follow
    """
    from isthmus.backends.destinations import destinations
    from isthmus.backends.prepare import launch_folder, prepare
    from isthmus.cli.following import run_launch
    from isthmus.cli.pricing import price_function
    from isthmus.core.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    names = named(backend)
    price = price_function(prices)

    def make(choice: int) -> Launch:
        return prepare(
            loaded, backends=names, choice=choice, run_id=run_id or None, detach=detach, price=price,
            offline=dry_run,
        )  # fmt: skip

    count = len(destinations(loaded.recipe, names))
    if dry_run:
        show(make, count, format, as_json=as_json, prices=prices)
        return
    if format != "text":
        raise _usage("--format belongs to --dry-run", "--json prints what a launch did")
    run_launch(make, count, launch_folder(loaded), yes=yes, as_json=as_json, follow=follow, prices=prices)


def named(backend: str) -> list[str]:
    """The names in `--backend`."""
    return [name for part in backend.split(",") if (name := part.strip())]


def _usage(message: str, hint: str) -> UsageError:
    from isthmus.errors import UsageError

    return UsageError(message, hint=hint)


def show(make: Callable[[int], Launch], count: int, format: str, *, as_json: bool, prices: str = "") -> None:
    """The request of a dry run."""
    from json import dumps, loads

    from isthmus.backends.failover import choose
    from isthmus.backends.prepare import refuse_errors
    from isthmus.cli.budgeting import with_budget
    from isthmus.cli.following import show_findings

    if format not in ("json", "yaml", "text"):
        raise _usage(f"no format {format!r}", "there are json, yaml and text")
    launch, notes = choose(count, make, lambda launch: with_budget(launch, prices, offline=True))
    show_findings([*notes, *launch.findings])
    refuse_errors(launch)
    rendered = launch.rendered
    if format != "text":
        print(launch.backend.document(rendered, "json" if format == "json" else "yaml").rstrip("\n"))
        return
    files = "".join(f"\n# {name}\n{text}" for name, text in rendered.files.items())
    request = dumps(dict(rendered.request), indent=2, sort_keys=True, ensure_ascii=False)
    emit(loads(rendered.to_json()), as_json=as_json, text=f"{request}\n{files}".rstrip("\n"))
