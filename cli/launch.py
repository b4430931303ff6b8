"""``isthmus launch``: start a run."""

from __future__ import annotations

import typer

from isthmus.cli.output import emit

_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field, as in stages.0.steps=500. May be repeated."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("launch")(launch)


def launch(
    recipe: str = typer.Argument(metavar="RECIPE", help="A file, or a name from `isthmus recipes list`."),
    backend: str = typer.Option(
        "", "--backend", metavar="NAME", help="Where to run; default: the first of compute.offers, or local."
    ),
    overrides: list[str] = _OVERRIDES,
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Print the native request and what is wrong with it; no network, nothing written.",
    ),
    detach: bool = typer.Option(False, "--detach", help="Return at once; the run goes on."),
    run_id: str = typer.Option("", "--run-id", metavar="ID", help="Name the run; a known one goes on."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask, even when there are warnings."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; the log goes to stderr."),
) -> None:
    """Check a recipe and start it as a run. Exit codes: 0 finished, 1 failed, 2 usage, 3 refused, 4 stopped, 75 preempted.

    In the foreground Ctrl-C checkpoints and ends the run; `isthmus resume` goes on.

    Example: isthmus launch my.yaml --backend local --set stages.0.steps=500 --detach
    """
    from isthmus.backends.prepare import launch_folder, prepare
    from isthmus.cli.following import run_launch
    from isthmus.core.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    prepared = prepare(loaded, backend=backend or None, run_id=run_id or None, detach=detach)
    if dry_run:
        from json import dumps, loads

        from isthmus.backends.prepare import refuse_errors
        from isthmus.cli.following import show_findings

        show_findings(prepared)
        refuse_errors(prepared)
        rendered = prepared.rendered
        files = "".join(f"\n# {name}\n{text}" for name, text in rendered.files.items())
        request = dumps(dict(rendered.request), indent=2, sort_keys=True, ensure_ascii=False)
        emit(loads(rendered.to_json()), as_json=as_json, text=f"{request}\n{files}".rstrip("\n"))
        return
    run_launch(prepared, launch_folder(loaded), yes=yes, as_json=as_json)
